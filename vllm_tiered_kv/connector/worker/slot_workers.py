"""Moves blocks between slots of the CPU tier and daemons, in threads of its own.

Blocks are sent from their slots, or read into them, without a copy: the scheduler keeps the slots
of a job until the job is reported, and a job is reported only when nothing reads or writes its
slots any more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, TypeVar

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.connector.identity.shard import Shard
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult
from vllm_tiered_kv.core.transfer import FetchJob, Int64Array, PutJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.errors import TransferPending
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.block_server import BlockServer

logger = logging.getLogger(__name__)

_ACCEPTED = (PutResult.STORED, PutResult.PRESENT)
_Job = TypeVar("_Job", PutJob, FetchJob)


@dataclass(frozen=True)
class JobDone:
    """A put or fetch job that has ended, and its report: how many of its first blocks moved."""

    job_id: int
    report: StoreReport


class SlotWorker(ABC, Generic[_Job]):
    """Runs jobs of one kind. `WorkerHalf` calls it from the model's thread."""

    _kind: ClassVar[str]  # for messages and names of threads

    def __init__(
        self,
        stores: Mapping[str, BlockServer],
        shard: Shard,
        arena: Arena,
        offsets_of: Callable[[int, Int64Array], Int64Array],
        timeout_s: float,
        threads: int,
    ) -> None:
        """`offsets_of` returns the arena offsets of a group's slots."""
        self._stores = stores
        self._shard = shard
        self._arena = arena
        self._offsets_of = offsets_of
        self._timeout_s = timeout_s
        self._stopping = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[JobDone] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"tiered-kv-{self._kind}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, job: _Job) -> None:
        self._jobs.put(job)

    def poll(self) -> list[JobDone]:
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
                store = self._stores[job.address]
                report = StoreReport(0, DropReason.UNAVAILABLE)
                if not self._stopping and store.available:
                    report = self._run(job, store, time.monotonic() + self._timeout_s)
            except TransferPending as pending:  # it still uses the slots
                late = JobDone(job.job_id, StoreReport(0, DropReason.UNAVAILABLE))
                pending.on_end(partial(self._done.put, late))
                continue
            except Exception:  # the scheduler keeps the slots until the job is reported
                logger.exception(
                    "%s job %d at daemon %s failed", self._kind, job.job_id, job.address
                )
                report = StoreReport(0, DropReason.REFUSED)
            self._done.put(JobDone(job.job_id, report))

    @abstractmethod
    def _run(self, job: _Job, store: BlockServer, deadline: float) -> StoreReport:
        """Moves the blocks of one job."""

    def _buffers(self, job: _Job) -> list[memoryview]:
        """The memory of all shards of the job's blocks, block by block."""
        nbytes = self._shard.shard_bytes(job.group_id)
        return [
            memoryview(self._arena.bytes_at(offset + number * nbytes, nbytes).data)
            for offset in self._offsets_of(job.group_id, job.slots).tolist()
            for number in range(self._shard.count)
        ]


class PutWorker(SlotWorker[PutJob]):
    """Sends blocks to daemons."""

    _kind = "send"

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
        """`is_ours` returns whether this rank sends the job with this first block: of the ranks
        that hold the same bytes one does."""
        self._regions = regions
        self._is_ours = is_ours
        super().__init__(stores, shard, arena, offsets_of, timeout_s, threads)

    def begin(self, job: PutJob) -> None:
        if self._is_ours(job.keys[0]):
            super().begin(job)
        else:
            # The rank that sends the job reports any failure.
            self._done.put(JobDone(job.job_id, StoreReport(len(job.keys))))

    def _run(self, job: PutJob, store: BlockServer, deadline: float) -> StoreReport:
        shards = self._shard.count
        parents = [
            None if parent is None else self._shard.key(parent, number)
            for parent in job.parents
            for number in range(shards)
        ]
        columns = self._shard.keys(job.keys), parents, self._buffers(job)
        items = [PutItem(*item) for item in zip(*columns, strict=True)]
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


class FetchWorker(SlotWorker[FetchJob]):
    """Fills slots with blocks from daemons, one job after the other. No request waits for them."""

    _kind = "prefetch"

    def _run(self, job: FetchJob, store: BlockServer, deadline: float) -> StoreReport:
        found = store.get(self._shard.keys(job.keys), self._buffers(job), deadline)
        leading = found.index(False) if False in found else len(found)
        return StoreReport(leading // self._shard.count)
