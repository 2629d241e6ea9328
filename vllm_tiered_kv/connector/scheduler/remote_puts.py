"""Plans which blocks of the CPU tier are sent to a daemon.

Every block is offered once, when it becomes readable in the CPU tier. It is pinned while it is on
its way. If too many bytes are pinned, further blocks wait without a pin. Those that the CPU tier
evicts meanwhile, and those whose daemon is down, are dropped and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import PutJob, int64_array
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.placement import ServerGroup

_MAX_PER_STEP = 4096  # blocks


class RemotePuts:
    """Builds put jobs for blocks that became readable. The scheduler half and the remote tier call
    it, in the scheduler's thread."""

    def __init__(self, cluster: ServerGroup[BlockServer], tier: CpuTier, queue_bytes: int) -> None:
        self._cluster = cluster
        self._groups = tier.groups
        self._index = tier.index
        self._ledger = tier.ledger
        self._queue_bytes = queue_bytes
        self._next: list[PutJob] = []
        self._waiting: OrderedDict[BlockKey, BlockKey] = OrderedDict()  # anchors, by key
        self._waiting_bytes = 0
        self._sent_since_offer = 0  # bytes

    @property
    def has_next(self) -> bool:
        """Whether an idle engine should step once more to send blocks. It does so for as many bytes
        as the queue has; pausing it must not take as long as sending the whole CPU tier."""
        if self._next:
            return True
        return self._sent_since_offer < self._queue_bytes and self._fits_next(self._room)

    @property
    def _room(self) -> int:
        return self._queue_bytes - self._ledger.pending_put_bytes

    def _fits_next(self, room: int) -> bool:
        """Whether the oldest block fits. If nothing is on its way, a block of any size does."""
        if not self._waiting:
            return False
        return room == self._queue_bytes or room >= _bytes_of(
            next(iter(self._waiting)), self._groups
        )

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
            for key, _ in self._index.blocks_in(slots):
                self._wait(BlockKey(key), anchor)
        self._sent_since_offer = 0
        self._send_waiting()
        if self._waiting_bytes > 2 * self._index.used_bytes:  # at least half of them are evicted
            self._forget_evicted()

    def reset(self) -> None:
        """The CPU tier was cleared. Nothing that waits can be found again."""
        self._ledger.drop(len(self._waiting), DropReason.RESET, Tier.REMOTE)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _forget_evicted(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, OrderedDict(), 0
        for key, anchor in waiting.items():
            if self._index.lookup(key) is Lookup.HIT:
                self._wait(key, anchor)
        lost = len(waiting) - len(self._waiting)
        self._ledger.drop(lost, DropReason.QUEUE_FULL, Tier.REMOTE)

    def _send_waiting(self) -> None:
        """Plans puts of the oldest blocks, as many as the queue has room for. The number in a step
        is bounded, because the step waits for it and dropped blocks take no room."""
        batches: dict[tuple[str, int], list[int]] = {}
        room = self._room
        for _ in range(min(len(self._waiting), _MAX_PER_STEP)):
            if not self._fits_next(room):
                break
            key, anchor = self._waiting.popitem(last=False)
            nbytes = _bytes_of(key, self._groups)
            self._waiting_bytes -= nbytes
            server = self._cluster.server_for(anchor)
            if server is None:
                self._ledger.drop(1, DropReason.UNAVAILABLE, Tier.REMOTE)
            elif self._index.lookup(key) is not Lookup.HIT:
                self._ledger.drop(1, DropReason.QUEUE_FULL, Tier.REMOTE)
            else:
                room -= nbytes
                self._sent_since_offer += nbytes
                batch = batches.setdefault((str(server.address), _group_of(key)), [])
                batch.append(self._index.slot_of(key))
        for (address, group_id), slots in batches.items():
            self._next.append(self._put_job(address, group_id, slots))

    def _wait(self, key: BlockKey, anchor: BlockKey) -> None:
        if key not in self._waiting:
            self._waiting[key] = anchor
            self._waiting_bytes += _bytes_of(key, self._groups)

    def _put_job(self, address: str, group_id: int, slots: list[int]) -> PutJob:
        columns = zip(*self._index.blocks_in(slots), strict=True)
        keys, parents = cast(
            "tuple[tuple[BlockKey, ...], tuple[BlockKey | None, ...]]", tuple(columns)
        )
        job_id = self._ledger.open_put(slots, keys, self._groups[group_id].block_bytes)
        return PutJob(job_id, address, group_id, int64_array(slots), keys, parents)


def _group_of(key: BlockKey) -> int:
    return key[-1]


def _bytes_of(key: BlockKey, groups: Sequence[Group]) -> int:
    return groups[_group_of(key)].block_bytes
