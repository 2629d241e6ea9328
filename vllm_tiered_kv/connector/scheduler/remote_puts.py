"""Plans which blocks of the CPU tier are sent to a daemon.

Every block is offered once, when it becomes readable in the CPU tier. It stays pinned until it is
sent. If too many bytes are pending, or the daemon is down, further blocks are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import PutJob, int64_array
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.placement import Cluster


class RemotePuts:
    """Builds put jobs for blocks that became readable. The scheduler half and the remote tier call
    it, in the scheduler's thread."""

    def __init__(self, cluster: Cluster, tier: CpuTier, queue_bytes: int) -> None:
        self._cluster = cluster
        self._groups = tier.groups
        self._index = tier.index
        self._ledger = tier.ledger
        self._queue_bytes = queue_bytes
        self._next: list[PutJob] = []

    def take(self) -> list[PutJob]:
        """Returns the jobs planned since the last call."""
        jobs, self._next = self._next, []
        return jobs

    def offer(self, stored: Sequence[tuple[BlockKey, list[int]]]) -> None:
        """Plans puts of blocks that have just become readable; `stored` has slots by anchor."""
        batches: dict[tuple[str, int], list[int]] = {}
        for anchor, slots in stored:
            server = self._cluster.server_for(anchor)
            if server is None:
                self._ledger.drop(len(slots), DropReason.UNAVAILABLE, Tier.REMOTE)
                continue
            group_id = anchor[-1]  # an anchor is a key of the same group
            batches.setdefault((str(server.address), group_id), []).extend(slots)
        for (address, group_id), batch in batches.items():
            nbytes = self._groups[group_id].block_bytes
            room = max(0, self._queue_bytes - self._ledger.pending_put_bytes) // nbytes
            # Heads of prefixes come first, so the blocks that are sent can be found without the
            # dropped ones.
            self._ledger.drop(max(0, len(batch) - room), DropReason.QUEUE_FULL, Tier.REMOTE)
            if batch[:room]:
                self._next.append(self._put_job(address, group_id, batch[:room]))

    def _put_job(self, address: str, group_id: int, slots: list[int]) -> PutJob:
        columns = zip(*self._index.blocks_in(slots), strict=True)
        keys, parents = cast(
            "tuple[tuple[BlockKey, ...], tuple[BlockKey | None, ...]]", tuple(columns)
        )
        job_id = self._ledger.open_put(slots, keys, self._groups[group_id].block_bytes)
        return PutJob(job_id, address, group_id, int64_array(slots), keys, parents)
