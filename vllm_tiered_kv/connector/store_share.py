"""What each of several ranks copies of a store, where they fill one arena together."""

from __future__ import annotations

from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.core.transfer import GroupTransfer, StoreJob
from vllm_tiered_kv.device.copier import StoreDone


class StoreShare:
    """Every so-many-th block, beginning at this rank's number: all are busy with each job, and need
    not talk about it."""

    def __init__(self, replica: int = 0, replicas: int = 1) -> None:
        self._replica = replica
        self._replicas = replicas
        self._whole: dict[int, int] = {}  # blocks of each job under way, of all ranks together

    @property
    def is_first(self) -> bool:
        return self._replica == 0

    def begin(self, job: StoreJob) -> GroupTransfer:
        """The blocks to copy of this job; there may be none."""
        self._whole[job.job_id] = len(job.transfer)
        mine = slice(self._replica, None, self._replicas)
        transfer = job.transfer
        return GroupTransfer(transfer.group_id, transfer.block_ids[mine], transfer.slots[mine])

    def end(self, done: StoreDone) -> StoreReport:
        """How many first blocks of the whole job arrived, for all this rank knows."""
        whole = self._whole.pop(done.job_id)
        first_missing = self._replica + done.stored * self._replicas
        return StoreReport(min(first_missing, whole), done.reason)
