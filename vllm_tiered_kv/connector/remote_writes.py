"""Which blocks of the CPU tier are sent on to a daemon.

Every block that becomes readable here is offered once. A block on its way is pinned; when too many
are, or its daemon is gone, the rest is not sent, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import PutJob, int64_array
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.placement import Cluster


class RemoteWrites:
    def __init__(
        self,
        cluster: Cluster,
        groups: Sequence[Group],
        index: BlockIndex,
        ledger: TransferLedger,
        queue_bytes: int,
    ) -> None:
        self._cluster = cluster
        self._groups = groups
        self._index = index
        self._ledger = ledger
        self._queue_bytes = queue_bytes
        self._next: list[PutJob] = []

    def take(self) -> list[PutJob]:
        """Jobs for the workers, planned since the last call."""
        jobs, self._next = self._next, []
        return jobs

    def offer(self, slots: Sequence[int], anchors: Sequence[BlockKey]) -> None:
        """Plans to send blocks that have just become readable."""
        batches: dict[tuple[str, int], list[int]] = {}
        # Neighbours in a chain share their anchor, as a rule.
        for anchor, run in groupby(zip(anchors, slots, strict=True), key=itemgetter(0)):
            server = self._cluster.server_for(anchor)
            some = [slot for _, slot in run]
            if server is None:
                self._ledger.drop(len(some), DropReason.UNAVAILABLE, Tier.REMOTE)
                continue
            address = str(server.address)
            for slot, (key, _) in zip(some, self._index.blocks_in(some), strict=True):
                batches.setdefault((address, key[-1]), []).append(slot)
        for (address, group_id), batch in batches.items():
            nbytes = self._groups[group_id].block_bytes
            room = max(0, self._queue_bytes - self._ledger.pending_put_bytes) // nbytes
            # Heads come first: what is sent can be found without the rest.
            self._ledger.drop(max(0, len(batch) - room), DropReason.QUEUE_FULL, Tier.REMOTE)
            if batch[:room]:
                self._next.append(self._put_job(address, group_id, batch[:room]))

    def _put_job(self, address: str, group_id: int, slots: list[int]) -> PutJob:
        blocks = self._index.blocks_in(slots)
        keys = tuple(BlockKey(key) for key, _ in blocks)
        parents = tuple(None if parent is None else BlockKey(parent) for _, parent in blocks)
        job_id = self._ledger.open_put(slots, keys, self._groups[group_id].block_bytes)
        return PutJob(job_id, address, group_id, int64_array(slots), keys, parents)
