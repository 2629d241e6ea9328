"""Divides the copies of a store among ranks that hold the same KV and share one arena."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob
from vllm_tiered_kv.device.copier import StoreDone
from vllm_tiered_kv.metrics.names import DropReason


@dataclass(frozen=True)
class _Begun:
    blocks: int  # of all ranks together
    usable: int  # how many of the first blocks lie in memory that this rank has pinned
    first: int  # index of the first block that this rank copies


class ReplicaStriping:
    """Assigns every n-th block of a job to this rank, starting at an offset derived from the job.
    Ranks thus share large jobs and many small ones evenly without communication. `WorkerHalf` calls
    it from the model's thread."""

    def __init__(self, replica: int = 0, replicas: int = 1) -> None:
        self._replica = replica
        self._replicas = replicas
        self._begun: dict[int, _Begun] = {}

    @property
    def is_shared(self) -> bool:
        """Whether other ranks copy a part of each job."""
        return self._replicas > 1

    def begin(self, job: StoreJob, usable: int) -> GroupTransfer:
        """Returns the blocks of the job that this rank copies, possibly none.

        `usable`: how many of the job's first slots this rank has pinned. It must not report more
        blocks than these as stored, because it also loads blocks that other ranks copied.
        """
        transfer = job.transfer
        first = (self._replica - _scattered(job.job_id)) % self._replicas
        self._begun[job.job_id] = _Begun(len(transfer), min(usable, len(transfer)), first)
        mine = slice(first, usable, self._replicas)
        return GroupTransfer(transfer.group_id, transfer.block_ids[mine], transfer.slots[mine])

    def end(self, done: StoreDone) -> StoreReport:
        """Reports how many of the job's first blocks are stored as far as this rank knows."""
        begun = self._begun.pop(done.job_id)
        first_missing = begun.first + done.stored * self._replicas
        if first_missing < begun.usable:
            return StoreReport(first_missing, done.reason)
        is_whole = begun.usable == begun.blocks
        return StoreReport(begun.usable, None if is_whole else DropReason.NOT_PINNED_YET)


def _scattered(job_id: int) -> int:
    """Hashes the job id: puts share the numbering, so that all stores could have even ids."""
    return job_id * 0x9E3779B1 >> 16
