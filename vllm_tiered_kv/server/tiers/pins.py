"""Blocks that clients have pinned for a limited time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot


class Pins:
    """All pins of clients, and their limit. Used on the reactor's thread only; the daemon calls
    `expire` regularly."""

    def __init__(self, memory: MemoryStore, limits: ClientLimits) -> None:
        self._memory = memory
        self._max_bytes = limits.pins
        self._bytes = 0
        self._pins: dict[StoreKey, tuple[PinnedSlot, float]] = {}

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._pins)

    def has_room(self, nbytes: int) -> bool:
        return self._bytes + nbytes <= self._max_bytes

    def pin(self, block: PinnedSlot, ttl_s: float) -> bool:
        """Takes over the hold on the block. An existing pin is only extended. A block that was
        deleted meanwhile is not pinned."""
        if not self._memory.is_readable(block):
            self._memory.let_go([block])
            return False
        until = time.monotonic() + ttl_s
        known = self._pins.get(block.key)
        if known is not None and known[0].slot == block.slot:
            self._memory.let_go([block])
            self._pins[block.key] = (known[0], max(until, known[1]))
            return True
        if known is not None:  # deleted and stored again
            self.release([block.key])
        if not self.has_room(block.nbytes):
            self._memory.let_go([block])
            return False
        self._bytes += block.nbytes
        self._pins[block.key] = (block, until)
        return True

    def release(self, keys: Sequence[StoreKey]) -> int:
        ended = [known[0] for key in keys if (known := self._pins.pop(key, None)) is not None]
        self._bytes -= sum(block.nbytes for block in ended)
        self._memory.let_go(ended)
        return len(ended)

    def void(self, keys: Sequence[StoreKey]) -> None:
        """Ends the pins of deleted blocks. Called after the deletion, so that it includes pins made
        during it."""
        pinned = [(key, known[0]) for key in keys if (known := self._pins.get(key)) is not None]
        self.release([key for key, block in pinned if not self._memory.is_readable(block)])

    def expire(self) -> None:
        now = time.monotonic()
        self.release([key for key, (_, until) in self._pins.items() if until <= now])
