"""Sends blocks of the CPU tier to daemons, in threads of its own.

Blocks are sent from their arena slots without a copy: the scheduler pins the slots of a job until
the job is reported, and a job is reported only when nothing reads its slots any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult
from vllm_tiered_kv.core.transfer import Int64Array, PutJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.errors import TransferPending
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.block_server import BlockServer

logger = logging.getLogger(__name__)

_ACCEPTED = (PutResult.STORED, PutResult.PRESENT)


@dataclass(frozen=True)
class PutDone:
    """A put job that has ended, and its report."""

    job_id: int
    report: StoreReport


class PutWorker:
    """Sends put jobs to daemons. `WorkerHalf` calls it from the model's thread; the sending runs in
    the worker's own threads."""

    def __init__(
        self,
        stores: Mapping[str, BlockServer],
        shard: Shard,
        regions: SharedRegions,
        arena: Arena,
        offsets_of: Callable[[int, Int64Array], Int64Array],
        timeout_s: float,
        is_ours: Callable[[BlockKey], bool],
        threads: int = 2,
    ) -> None:
        """`offsets_of` returns the arena offsets of a group's slots. `is_ours` returns whether this
        rank sends the job with this first block: of the ranks that hold the same bytes one does."""
        self._stores = stores
        self._shard = shard
        self._regions = regions
        self._arena = arena
        self._offsets_of = offsets_of
        self._timeout_s = timeout_s
        self._is_ours = is_ours
        self._stopping = False
        self._jobs: queue.SimpleQueue[PutJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[PutDone] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tiered-kv-send-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def write(self, job: PutJob) -> None:
        if self._is_ours(job.keys[0]):
            self._jobs.put(job)
        else:
            # The rank that sends the job reports any failure.
            self._done.put(PutDone(job.job_id, StoreReport(len(job.keys))))

    def poll(self) -> list[PutDone]:
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def close(self) -> None:
        """Waits for jobs in flight and gives up queued ones. Idempotent."""
        self._stopping = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                report = self._send(job)
            except TransferPending as pending:  # it still reads the slots
                late = PutDone(job.job_id, StoreReport(0, DropReason.UNAVAILABLE))
                pending.on_end(partial(self._done.put, late))
                continue
            except Exception:  # the scheduler keeps the slots pinned until the job is reported
                logger.exception("put job %d to daemon %s failed", job.job_id, job.address)
                report = StoreReport(0, DropReason.REFUSED)
            self._done.put(PutDone(job.job_id, report))

    def _send(self, job: PutJob) -> StoreReport:
        store = self._stores[job.address]
        if self._stopping or not store.available:
            return StoreReport(0, DropReason.UNAVAILABLE)
        nbytes, shards = self._shard.shard_bytes(job.group_id), self._shard.count
        items = [
            PutItem(
                self._shard.key(key, number),
                None if parent is None else self._shard.key(parent, number),
                memoryview(self._arena.bytes_at(offset + number * nbytes, nbytes).data),
            )
            for key, parent, offset in zip(
                job.keys,
                job.parents,
                self._offsets_of(job.group_id, job.slots).tolist(),
                strict=True,
            )
            for number in range(shards)
        ]
        deadline = time.monotonic() + self._timeout_s
        region = self._regions.attached(job.address)
        results = region.store(items, deadline) if region is not None else None
        if results is None:
            results = store.put(items, Durability.MEMORY, deadline)
        are_accepted = [result in _ACCEPTED for result in results]
        if all(are_accepted):
            return StoreReport(len(job.keys))
        accepted = sum(
            all(are_accepted[n : n + shards]) for n in range(0, len(are_accepted), shards)
        )
        reason = DropReason.REFUSED if store.is_up else DropReason.UNAVAILABLE
        return StoreReport(accepted, reason)
