"""Least recently used, over the leaves of the prefix trees.

A heap of (last use, slot) with lazy deletion: a touch of a shielded block costs one list write,
a touch of a leaf one push. A linked list would not do: a block that becomes a leaf again has to
go back to the place its last use gives it, in the middle.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator


class LRUPolicy:
    def __init__(self, capacity: int) -> None:
        self._clock = 0
        self._used: dict[int, int] = {}  # slot -> time of last use
        self._shielded: set[int] = set()
        self._heap: list[tuple[int, int]] = []  # entries whose time is not the slot's are stale

    def admit(self, slot: int, key: bytes, shielded: bool = False) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        if shielded:
            self._shielded.add(slot)
        else:
            self._push(slot)

    def touch(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock
        if slot not in self._shielded:
            self._push(slot)

    def forget(self, slot: int, key: bytes, evicted: bool) -> None:
        del self._used[slot]
        self._shielded.discard(slot)

    def shield(self, slot: int) -> None:
        self._shielded.add(slot)

    def unshield(self, slot: int) -> None:
        self._shielded.discard(slot)
        self._push(slot)

    def candidates(self) -> Generator[int, None, None]:
        kept: list[tuple[int, int]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if not self._is_current(entry):
                    continue
                kept.append(entry)
                yield entry[1]
        finally:
            for entry in kept:
                if self._is_current(entry):
                    heapq.heappush(self._heap, entry)

    def slots(self) -> set[int]:
        return set(self._used)

    def leaves(self) -> set[int]:
        return {entry[1] for entry in self._heap if self._is_current(entry)}

    def _is_current(self, entry: tuple[int, int]) -> bool:
        used, slot = entry
        return self._used.get(slot) == used and slot not in self._shielded

    def _push(self, slot: int) -> None:
        heapq.heappush(self._heap, (self._used[slot], slot))
        if len(self._heap) > 4 * len(self._used) + 64:
            self._heap = [
                (used, slot) for slot, used in self._used.items() if slot not in self._shielded
            ]
            heapq.heapify(self._heap)
