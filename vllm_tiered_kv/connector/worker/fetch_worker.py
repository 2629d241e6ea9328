"""Fills slots of the CPU tier with blocks from daemons, in a thread of its own.

No request waits for these blocks. The scheduler has reserved the slots until their job is reported,
and a job is reported only when nothing writes to its slots any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.core.transfer import FetchJob, Int64Array
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.errors import TransferPending
from vllm_tiered_kv.remote.block_server import BlockServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchDone:
    """A fetch job that has ended, and how many of its first blocks are in their slots."""

    job_id: int
    count: int


class FetchWorker:
    """Runs fetch jobs one after the other. `WorkerHalf` calls it from the model's thread."""

    def __init__(
        self,
        stores: Mapping[str, BlockServer],
        shard: Shard,
        arena: Arena,
        offsets_of: Callable[[int, Int64Array], Int64Array],
        timeout_s: float,
    ) -> None:
        """`offsets_of` returns the arena offsets of a group's slots."""
        self._stores = stores
        self._shard = shard
        self._arena = arena
        self._offsets_of = offsets_of
        self._timeout_s = timeout_s
        self._stopping = False
        self._jobs: queue.SimpleQueue[FetchJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[FetchDone] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tiered-kv-prefetch", daemon=True)
        self._thread.start()

    def fetch(self, job: FetchJob) -> None:
        self._jobs.put(job)

    def poll(self) -> list[FetchDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Waits for the job in flight and gives up queued ones. Idempotent."""
        self._stopping = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                count = self._fetch(job)
            except TransferPending as pending:  # it still writes to the slots
                pending.on_end(partial(self._done.put, FetchDone(job.job_id, 0)))
                continue
            except Exception:  # the scheduler keeps the slots until the job is reported
                logger.exception("fetch job %d from daemon %s failed", job.job_id, job.address)
                count = 0
            self._done.put(FetchDone(job.job_id, count))

    def _fetch(self, job: FetchJob) -> int:
        store = self._stores[job.address]
        if self._stopping or not store.available:
            return 0
        nbytes, shards = self._shard.shard_bytes(job.group_id), self._shard.count
        buffers = [
            memoryview(self._arena.bytes_at(offset + number * nbytes, nbytes).data)
            for offset in self._offsets_of(job.group_id, job.slots).tolist()
            for number in range(shards)
        ]
        deadline = time.monotonic() + self._timeout_s
        found = store.get(self._shard.keys(job.keys), buffers, deadline)
        leading = found.index(False) if False in found else len(found)
        return leading // shards
