"""Stores of finished requests that the staging ring had no room for yet.

The blocks belong to nobody any more, but they lie at the far end of vLLM's free queue with their
content intact. They are stored as the ring drains, each as long as its hash says that it still
holds what it held; no reference keeps them from being reused when vLLM needs the memory.

A request that ends only leaves a note behind: what its blocks are is worked out when there is room
for them, not while its client waits for the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.connector.gpu_block import KnownRun, StoreBatch
from vllm_tiered_kv.metrics.names import DropReason

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


_MOST_IN_VAIN = 256  # looks at blocks that need not be stored, in a step


@dataclass
class _Note:
    """Blocks of one request, heads before tails."""

    positions: range
    run: KnownRun


class DeferredStores:
    def __init__(self) -> None:
        self._notes: deque[_Note] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, positions: range, run: KnownRun, num_gpu_blocks: int) -> int:
        """Notes these positions of a request. Says how many blocks were given up for them: there
        cannot be more than the GPU has, so the oldest have been reused."""
        if positions:
            self._notes.append(_Note(positions, run))
            self._count += len(positions)
        given_up = 0
        while self._count > num_gpu_blocks:
            note = self._notes[0]
            excess = min(self._count - num_gpu_blocks, len(note.positions))
            note.positions = note.positions[excess:]
            self._count -= excess
            given_up += excess
            if not note.positions:
                self._notes.popleft()
        return given_up

    def plan(
        self, pool: BlockPool, index: BlockIndex, room: int
    ) -> tuple[list[StoreBatch], dict[DropReason, int]]:
        """At most `room` blocks to store in this step, and what was given up and why. Of blocks
        that are in the tier by now, or reused, only so many are looked at: the step waits."""
        batches: dict[int, StoreBatch] = {}
        dropped = {DropReason.STAGING_FULL: 0, DropReason.TIER_FULL: 0}
        looks = room + _MOST_IN_VAIN
        while self._notes and room > 0 and looks > 0:
            run, positions = self._take(min(room, looks))
            looks -= len(positions)
            there = run.still_there(pool, positions)
            dropped[DropReason.STAGING_FULL] += there.count(False)
            group = run.group
            for part in _where_true(there, positions.start):
                found = index.reserve_missing(run.keys, part.start, part.stop, group.size_class)
                dropped[DropReason.TIER_FULL] += found.dropped
                batch = batches.setdefault(group.group_id, StoreBatch(group))
                batch.extend(run, found.positions, found.slots)
                room -= len(found.slots)
        return [batch for batch in batches.values() if batch.slots], dropped

    def _take(self, most: int) -> tuple[KnownRun, range]:
        """The next blocks, of one request."""
        note = self._notes[0]
        positions, note.positions = note.positions[:most], note.positions[most:]
        self._count -= len(positions)
        if not note.positions:
            self._notes.popleft()
        return note.run, positions

    def clear(self) -> int:
        """Forgets all; says how many there were."""
        count, self._count = self._count, 0
        self._notes.clear()
        return count


def _where_true(flags: Sequence[bool], first: int) -> Iterator[range]:
    """The runs of positions, counted from `first`, that are flagged."""
    end = 0
    while True in flags[end:]:
        start = flags.index(True, end)
        end = flags.index(False, start) if False in flags[start:] else len(flags)
        yield range(first + start, first + end)
