"""Storing a block only when vLLM is about to reuse it: the block-pool hook.

vLLM has no eviction callback, but its free queue is a list whose head goes first. Each step the
first `window` blocks of that queue are looked at, and those still holding a known prefix are
stored. They are free, so nobody writes them before the next step; and the copy is read in stream
order before that step's forward. A block's hash tells whether it still holds what we saw it hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request


@dataclass(frozen=True)
class _Observed:
    vllm_hash: bytes  # of the block and its group, while the content is what we saw
    key: BlockKey
    parent: BlockKey | None
    group: Group


@dataclass
class LazyPlan:
    """Blocks of one group to store now, heads of prefixes first."""

    group: Group
    block_ids: list[int]
    slots: list[int]


class LazyStore:
    def __init__(self, window: int, hash_block_size: int) -> None:
        self._window = window
        self._hash_block_size = hash_block_size
        self._observed: dict[int, _Observed] = {}

    def observe(
        self,
        request: Request,
        block_id: int,
        group: Group,
        position: int,
        keys: Sequence[BlockKey],
    ) -> None:
        """Block `position` of a request is full and lies in `block_id`."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        end = (position + 1) * group.block_size // self._hash_block_size
        vllm_hash = make_block_hash_with_group_id(request.block_hashes[end - 1], group.group_id)
        parent = keys[position - 1] if position else None
        self._observed[block_id] = _Observed(vllm_hash, keys[position], parent, group)

    def plan(self, pool: BlockPool, index: BlockIndex) -> tuple[list[LazyPlan], int]:
        """What to store in this step, and how many blocks found no room in the tier."""
        plans: dict[int, LazyPlan] = {}
        dropped = 0
        queue = pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(self._window):
            if block is None or block is queue.fake_free_list_tail:
                break
            seen = self._observed.get(block.block_id)
            if seen is not None:
                if block.block_hash != seen.vllm_hash:
                    del self._observed[block.block_id]
                elif index.lookup(seen.key) is Lookup.MISS:
                    slot = index.reserve(seen.key, seen.parent, seen.group.size_class)
                    if slot is None:
                        dropped += 1
                        del self._observed[block.block_id]
                    else:
                        plan = plans.setdefault(seen.group.group_id, LazyPlan(seen.group, [], []))
                        plan.block_ids.append(block.block_id)
                        plan.slots.append(slot)
            block = block.next_free_block
        for plan in plans.values():
            # The queue gives tails first; if the ring cannot take all, heads are worth more.
            plan.block_ids.reverse()
            plan.slots.reverse()
        return list(plans.values()), dropped

    def clear(self) -> None:
        self._observed.clear()
