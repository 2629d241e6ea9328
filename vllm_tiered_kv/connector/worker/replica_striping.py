"""What each of several ranks copies of a store, where they fill one arena together."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob
from vllm_tiered_kv.device.copier import StoreDone
from vllm_tiered_kv.metrics.names import DropReason


@dataclass(frozen=True)
class _Begun:
    blocks: int  # of all ranks together
    usable: int  # how many of them, from the first on, this rank may ever read
    first: int  # the first one it copies


class ReplicaStriping:
    """Every so-many-th block, each job beginning with another rank: all have their part of large
    jobs and of many small ones, and need not talk about it."""

    def __init__(self, replica: int = 0, replicas: int = 1) -> None:
        self._replica = replica
        self._replicas = replicas
        self._begun: dict[int, _Begun] = {}

    @property
    def is_first(self) -> bool:
        return self._replica == 0

    def begin(self, job: StoreJob, usable: int) -> GroupTransfer:
        """The blocks to copy of this job; there may be none.

        `usable`: how many of its first slots this rank has pinned. It loads what others copied,
        too, so it must not say of more than these that they are there.
        """
        transfer = job.transfer
        first = (self._replica - _scattered(job.job_id)) % self._replicas
        self._begun[job.job_id] = _Begun(len(transfer), min(usable, len(transfer)), first)
        mine = slice(first, usable, self._replicas)
        return GroupTransfer(transfer.group_id, transfer.block_ids[mine], transfer.slots[mine])

    def end(self, done: StoreDone) -> StoreReport:
        """How many first blocks of the whole job arrived, for all this rank knows."""
        begun = self._begun.pop(done.job_id)
        first_missing = begun.first + done.stored * self._replicas
        if first_missing < begun.usable:
            return StoreReport(first_missing, done.reason)
        is_whole = begun.usable == begun.blocks
        return StoreReport(begun.usable, None if is_whole else DropReason.NOT_PINNED_YET)


def _scattered(job_id: int) -> int:
    """Stores do not have every number, but every other one, say: puts have the rest."""
    return job_id * 0x9E3779B1 >> 16
