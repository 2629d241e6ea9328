"""Stores of finished requests that the staging ring had no room for yet.

The blocks belong to nobody any more, but they lie at the far end of vLLM's free queue with their
content intact. They are stored as the ring drains, each as long as its hash says that it still
holds what it held; no reference keeps them from being reused when vLLM needs the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.connector.gpu_block import KnownBlock, StoreBatch
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics.names import DropReason

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class DeferredStores:
    def __init__(self) -> None:
        # By block id, so never more than there are GPU blocks; heads before tails of a request.
        self._waiting: dict[int, KnownBlock] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, block: KnownBlock) -> int:
        """Says how many blocks were given up for it: what the GPU block held before."""
        replaced = self._waiting.pop(block.block_id, None)
        self._waiting[block.block_id] = block
        return int(replaced is not None and replaced.key != block.key)

    def plan(
        self, pool: BlockPool, index: BlockIndex, room: int
    ) -> tuple[list[StoreBatch], dict[DropReason, int]]:
        """At most `room` blocks to store in this step, and what was given up and why."""
        batches: dict[int, StoreBatch] = {}
        dropped = {DropReason.STAGING_FULL: 0, DropReason.TIER_FULL: 0}
        while self._waiting and room > 0:
            block = self._waiting.pop(next(iter(self._waiting)))
            if not block.still_there(pool):
                dropped[DropReason.STAGING_FULL] += 1
                continue
            if index.lookup(block.key) is not Lookup.MISS:
                continue
            slot = index.reserve(block.key, block.parent, block.group.size_class)
            if slot is None:
                dropped[DropReason.TIER_FULL] += 1
                continue
            batch = batches.setdefault(block.group.group_id, StoreBatch(block.group))
            batch.add(block, slot)
            room -= 1
        return list(batches.values()), dropped

    def forget(self, block_ids: set[int]) -> int:
        """These GPU blocks hold something else than they seemed to; says how many were waiting."""
        return sum(self._waiting.pop(block_id, None) is not None for block_id in block_ids)

    def clear(self) -> int:
        """Forgets all; says how many there were."""
        count = len(self._waiting)
        self._waiting.clear()
        return count
