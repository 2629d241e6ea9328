"""Blocks that clients asked to keep for a while."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot


class Pins:
    """Used on the reactor's thread only; `expire` is to be called now and then."""

    def __init__(self, memory: MemoryStore, allowances: ClientLimits) -> None:
        self._memory = memory
        self._most_bytes = allowances.pins
        self._bytes = 0
        self._pins: dict[StoreKey, tuple[PinnedSlot, float]] = {}

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._pins)

    def has_room(self, nbytes: int) -> bool:
        return self._bytes + nbytes <= self._most_bytes

    def pin(self, block: PinnedSlot, ttl_s: float) -> bool:
        """Takes over the hold on the block. A pin that is there already is only made longer; a
        block that was deleted on its way here gets none."""
        if not self._memory.is_readable(block):
            self._memory.let_go([block])
            return False
        until = time.monotonic() + ttl_s
        known = self._pins.get(block.key)
        if known is not None and known[0].slot == block.slot:
            self._memory.let_go([block])
            self._pins[block.key] = (known[0], max(until, known[1]))
            return True
        if known is not None:  # it was deleted, and put again
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
        """To be called after blocks were deleted: their pins end, also those made meanwhile."""
        pinned = [(key, known[0]) for key in keys if (known := self._pins.get(key)) is not None]
        self.release([key for key, block in pinned if not self._memory.is_readable(block)])

    def expire(self) -> None:
        now = time.monotonic()
        self.release([key for key, (_, until) in self._pins.items() if until <= now])
