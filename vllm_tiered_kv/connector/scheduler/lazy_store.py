"""Lazy stores: a block is stored only when vLLM is about to evict it.

vLLM has no eviction callback, but it reallocates blocks from the head of its free queue. In each
step `LazyStore` checks the first `window` blocks of that queue and stores those that still hold a
known prefix. These blocks are free, so nobody writes them before the next step, and a step that
does waits for the copy (`cache/write_fence.py`).
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
    """Remembers full blocks of requests and plans their stores when they near the head of vLLM's
    free queue. The store planner owns it and calls it in the scheduler's thread."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._known: dict[int, BlockRecord] = {}

    def observe(self, run: HashedRun, positions: range) -> None:
        """Remembers blocks of a request that are full now or were prefix hits."""
        ids = run.block_ids[positions.start - run.first : positions.stop - run.first]
        if run.is_sent:
            self._known.update(zip(ids, run.records(positions), strict=False))
            return
        # Another request may want the same block sent to a daemon.
        for block_id, record in zip(ids, run.records(positions), strict=False):
            known = self._known.get(block_id)
            if known is None or known[1] != record[1]:
                self._known[block_id] = record

    def plan(self, pool: BlockPool, index: BlockIndex) -> tuple[list[StoreBatch], int]:
        """Returns what to store in this step, and for how many blocks the tier had no slot."""
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
        # Each block is stored at most once until a request uses it again. Otherwise an idle engine
        # would store the same blocks forever when copies fail or the tier is smaller than `window`.
        wanted = list(missing)
        self._forget(wanted)
        # The free queue has tails of prefixes first. Heads are worth more if the tier runs out of
        # slots, or if a rank drops the end of the batch.
        wanted.reverse()
        batches, refused = [], 0
        for group in dict.fromkeys(map(_GROUP, wanted)):
            batch, left = _reserve(index, group, [each for each in wanted if each[-1] is group])
            batches.append(batch)
            refused += left
        return [batch for batch in batches if batch.slots], refused

    def _forget(self, blocks: Iterable[BlockRecord]) -> None:
        deque(map(self._known.pop, map(_BLOCK_ID, blocks)), maxlen=0)

    def clear(self) -> None:
        self._known.clear()


def _reserve(index: BlockIndex, group: Group, wanted: list[BlockRecord]) -> tuple[StoreBatch, int]:
    """Reserves slots for these blocks. Also returns the number of blocks without a slot."""
    block_ids, _, keys, parents, anchors, _ = zip(*wanted, strict=True)
    slots = index.reserve_all(keys, parents, group.size_class)
    taken = [slot != NOWHERE for slot in slots]  # a key that appears twice gets one slot
    by_anchor = groupby(compress(anchors, taken))
    batch = StoreBatch(
        group,
        list(compress(block_ids, taken)),
        list(compress(slots, taken)),
        [(anchor, sum(1 for _ in same)) for anchor, same in by_anchor],
    )
    return batch, len(wanted) - len(slots)
