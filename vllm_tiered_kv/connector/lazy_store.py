"""Storing a block only when vLLM is about to reuse it: the block-pool hook.

vLLM has no eviction callback, but its free queue is a list whose head goes first. Each step the
first `window` blocks of that queue are looked at, and those still holding a known prefix are
stored. They are free, so nobody writes them before the next step; and the copy is read in stream
order before that step's forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.connector.gpu_block import KnownBlock, KnownRun, StoreBatch
from vllm_tiered_kv.core.tiers import Lookup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class LazyStore:
    def __init__(self, window: int) -> None:
        self._window = window
        self._known: dict[int, tuple[Any, ...]] = {}  # what makes a `KnownBlock`

    def observe(self, run: KnownRun, positions: range) -> None:
        """Blocks of a request have become full, or were found so."""
        ids = run.block_ids[positions.start - run.first : positions.stop - run.first]
        self._known.update(zip(ids, run.facts(positions), strict=False))

    def plan(self, pool: BlockPool, index: BlockIndex, room: int) -> tuple[list[StoreBatch], int]:
        """What to store in this step, at most `room` blocks; and how many the tier refused."""
        batches: dict[int, StoreBatch] = {}
        refused = 0
        queue = pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(self._window):
            if block is None or block is queue.fake_free_list_tail or room <= 0:
                break
            facts = self._known.get(block.block_id)
            block = block.next_free_block
            if facts is None:
                continue
            known = KnownBlock(*facts)
            if not known.still_there(pool):
                del self._known[known.block_id]
            elif index.lookup(known.key) is Lookup.MISS:
                slot = index.reserve(known.key, known.parent, known.group.size_class)
                if slot is None:
                    refused += 1
                    del self._known[known.block_id]
                    continue
                batch = batches.setdefault(known.group.group_id, StoreBatch(known.group))
                batch.add(known, slot)
                # Once, until a request uses it again: where the copy fails, or the tier holds less
                # than the window, an idle engine would go on storing the same blocks for ever.
                del self._known[known.block_id]
                room -= 1
        for batch in batches.values():
            # The queue gives tails first; should a rank drop the end of this, heads matter more.
            batch.reverse()
        return list(batches.values()), refused

    def clear(self) -> None:
        self._known.clear()
