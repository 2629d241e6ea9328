"""S3-FIFO: a small queue filters out what is used once, a main queue keeps the rest.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New blocks enter the
small queue (a tenth of the slots). A block reaching its end leaves unless it was used again, in
which case it moves to the main queue; the main queue gives used blocks another round. Keys of
blocks that left the small queue are remembered (the ghost): coming back, they go straight to main.

Only leaves are queued. A block that becomes a leaf again returns to the leaving end of the queue
it was in, so that a cold chain leaves from its tail to its head without being searched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator

_SMALL_SHARE = 10  # the small queue aims at one slot in this many
_MAX_USES = 3


class S3FIFOPolicy:
    def __init__(self, capacity: int) -> None:
        self._small_target = max(1, capacity // _SMALL_SHARE)
        self._ghost_limit = max(1, capacity)
        self._small: OrderedDict[int, None] = OrderedDict()  # leaving end first
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[int, int] = {}
        self._in_main: set[int] = set()
        self._shielded: set[int] = set()

    def admit(self, slot: int, key: bytes, shielded: bool = False) -> None:
        self._uses[slot] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._in_main.add(slot)
        if shielded:
            self._shielded.add(slot)
        else:
            self._queue(slot)[slot] = None

    def touch(self, slot: int) -> None:
        self._uses[slot] = min(self._uses[slot] + 1, _MAX_USES)

    def forget(self, slot: int, key: bytes, evicted: bool) -> None:
        del self._uses[slot]
        self._queue(slot).pop(slot, None)
        self._shielded.discard(slot)
        if slot in self._in_main:
            self._in_main.discard(slot)
        elif evicted:
            self._ghost[key] = None
            if len(self._ghost) > self._ghost_limit:
                self._ghost.popitem(last=False)

    def shield(self, slot: int) -> None:
        self._shielded.add(slot)
        self._queue(slot).pop(slot, None)

    def unshield(self, slot: int) -> None:
        self._shielded.discard(slot)
        queue = self._queue(slot)
        queue[slot] = None
        queue.move_to_end(slot, last=False)

    def candidates(self) -> Generator[int, None, None]:
        refused: list[int] = []  # offered and not taken (pinned): set aside, then put back
        try:
            while (slot := self._next()) is not None:
                yield slot
                if slot in self._queue(slot):
                    del self._queue(slot)[slot]
                    refused.append(slot)
        finally:
            for slot in reversed(refused):
                if slot in self._uses and slot not in self._shielded:
                    self.unshield(slot)

    def slots(self) -> set[int]:
        return set(self._uses)

    def leaves(self) -> set[int]:
        return {*self._small, *self._main}

    def _queue(self, slot: int) -> OrderedDict[int, None]:
        return self._main if slot in self._in_main else self._small

    def _next(self) -> int | None:
        """The slot that should leave now; used ones get their further round on the way."""
        while self._small or self._main:
            if self._small and (len(self._small) > self._small_target or not self._main):
                slot = next(iter(self._small))
                if not self._uses[slot]:
                    return slot
                del self._small[slot]
                self._in_main.add(slot)
                self._uses[slot] = 0
                self._main[slot] = None
            else:
                slot = next(iter(self._main))
                if not self._uses[slot]:
                    return slot
                self._uses[slot] -= 1
                self._main.move_to_end(slot)
        return None
