"""Plans which blocks of the CPU tier are sent to a daemon.

Every block is offered once, when it becomes readable in the CPU tier. It is pinned while it is on
its way. If too many bytes are pinned, further blocks wait without a pin. Those that the CPU tier
evicts meanwhile, and those whose daemon is down, are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
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
        self._waiting: deque[tuple[BlockKey, BlockKey]] = deque()  # anchor and key, oldest first
        self._waiting_bytes = 0

    @property
    def has_next(self) -> bool:
        """Whether `take` would return a job."""
        return bool(self._next) or self._fits_next(self._room)

    @property
    def _room(self) -> int:
        return self._queue_bytes - self._ledger.pending_put_bytes

    def _fits_next(self, room: int) -> bool:
        return bool(self._waiting) and room >= self._block_bytes(self._waiting[0][0])

    def take(self) -> list[PutJob]:
        """Returns the jobs planned since the last call."""
        self._send_waiting()
        jobs, self._next = self._next, []
        return jobs

    def offer(self, stored: Sequence[tuple[BlockKey, list[int]]]) -> None:
        """Plans puts of blocks that have just become readable; `stored` has slots by anchor."""
        for anchor, slots in stored:
            if self._cluster.server_for(anchor) is None:
                self._ledger.drop(len(slots), DropReason.UNAVAILABLE, Tier.REMOTE)
                continue
            self._wait(anchor, [BlockKey(key) for key, _ in self._index.blocks_in(slots)])
        self._send_waiting()
        if self._waiting_bytes > 2 * self._index.used_bytes:  # at least half of them are evicted
            self._forget_evicted()

    def _forget_evicted(self) -> None:
        for _ in range(len(self._waiting)):
            anchor, key = self._pop()
            if self._index.lookup(key) is Lookup.HIT:
                self._wait(anchor, [key])
            else:
                self._ledger.drop(1, DropReason.QUEUE_FULL, Tier.REMOTE)

    def _send_waiting(self) -> None:
        """Plans puts of the oldest blocks, as many as the queue has room for."""
        batches: dict[tuple[str, int], list[int]] = {}
        room = self._room
        while self._fits_next(room):
            anchor, key = self._pop()
            server = self._cluster.server_for(anchor)
            if server is None:
                self._ledger.drop(1, DropReason.UNAVAILABLE, Tier.REMOTE)
            elif self._index.lookup(key) is not Lookup.HIT:
                self._ledger.drop(1, DropReason.QUEUE_FULL, Tier.REMOTE)
            else:
                room -= self._block_bytes(anchor)
                batch = batches.setdefault((str(server.address), _group_of(anchor)), [])
                batch.append(self._index.slot_of(key))
        for (address, group_id), slots in batches.items():
            self._next.append(self._put_job(address, group_id, slots))

    def _wait(self, anchor: BlockKey, keys: Sequence[BlockKey]) -> None:
        self._waiting.extend((anchor, key) for key in keys)
        self._waiting_bytes += len(keys) * self._block_bytes(anchor)

    def _pop(self) -> tuple[BlockKey, BlockKey]:
        anchor, key = self._waiting.popleft()
        self._waiting_bytes -= self._block_bytes(anchor)
        return anchor, key

    def _block_bytes(self, key: BlockKey) -> int:
        return self._groups[_group_of(key)].block_bytes

    def _put_job(self, address: str, group_id: int, slots: list[int]) -> PutJob:
        columns = zip(*self._index.blocks_in(slots), strict=True)
        keys, parents = cast(
            "tuple[tuple[BlockKey, ...], tuple[BlockKey | None, ...]]", tuple(columns)
        )
        job_id = self._ledger.open_put(slots, keys, self._groups[group_id].block_bytes)
        return PutJob(job_id, address, group_id, int64_array(slots), keys, parents)


def _group_of(key: BlockKey) -> int:
    """An anchor is a key of the same group."""
    return key[-1]
