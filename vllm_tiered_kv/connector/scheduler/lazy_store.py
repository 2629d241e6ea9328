"""Storing a block only when vLLM is about to reuse it: the block-pool hook.

vLLM has no eviction callback, but its free queue is a list whose head goes first. Each step the
first `window` blocks of that queue are looked at, and those still holding a known prefix are
stored. They are free, so nobody writes them before the next step, and whoever does waits for the
copy (`cache/write_fence.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import compress, groupby
from operator import itemgetter, not_
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import NOWHERE, BlockIndex
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.connector.scheduler.hashed_blocks import (
    BlockRecord,
    HashedRun,
    StoreBatch,
    still_hashed,
)
from vllm_tiered_kv.native.cpu import follow

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_BLOCK_ID, _KEY, _GROUP = itemgetter(0), itemgetter(2), itemgetter(5)  # of `BlockRecord`


class LazyStore:
    def __init__(self, window: int) -> None:
        self._window = window
        self._known: dict[int, BlockRecord] = {}

    def observe(self, run: HashedRun, positions: range) -> None:
        """Blocks of a request have become full, or were found so."""
        ids = run.block_ids[positions.start - run.first : positions.stop - run.first]
        self._known.update(zip(ids, run.facts(positions), strict=False))

    def plan(self, pool: BlockPool, index: BlockIndex) -> tuple[list[StoreBatch], int]:
        """What to store in this step, and how many the tier refused. No step of the interpreter for
        each block that is looked at: there are thousands in every step."""
        queue = pool.free_block_queue
        first, last = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        if not self._known:
            return [], 0
        ids = follow(first, last, "next_free_block", "block_id", self._window)
        known = list(filter(None, map(self._known.get, ids)))
        there = still_hashed(pool, known)
        self._forget(compress(known, map(not_, there)))
        known = list(compress(known, there))
        missing = compress(known, index.are_missing(list(map(_KEY, known))))
        # Once, until a request uses it again: where the copy fails, or the tier holds less than the
        # window, an idle engine would go on storing the same blocks for ever.
        wanted = list(missing)
        self._forget(wanted)
        # The queue gives tails first. Should room end, or a rank drop the end of this, heads matter
        # more.
        wanted.reverse()
        batches, refused = [], 0
        for group in dict.fromkeys(map(_GROUP, wanted)):
            batch, left = _reserve(index, group, [facts for facts in wanted if facts[-1] is group])
            batches.append(batch)
            refused += left
        return [batch for batch in batches if batch.slots], refused

    def _forget(self, blocks: Iterable[BlockRecord]) -> None:
        deque(map(self._known.pop, map(_BLOCK_ID, blocks)), maxlen=0)

    def clear(self) -> None:
        self._known.clear()


def _reserve(index: BlockIndex, group: Group, wanted: list[BlockRecord]) -> tuple[StoreBatch, int]:
    """Slots for these, and how many found none."""
    block_ids, _, keys, parents, anchors, _ = zip(*wanted, strict=True)
    slots = index.reserve_all(keys, parents, group.size_class)
    taken = [slot != NOWHERE for slot in slots]  # only those, of one that was wanted twice
    by_anchor = groupby(compress(anchors, taken))
    batch = StoreBatch(
        group,
        list(compress(block_ids, taken)),
        list(compress(slots, taken)),
        [(anchor, sum(1 for _ in same)) for anchor, same in by_anchor],
    )
    return batch, len(wanted) - len(slots)
