"""Slots of an arena without an index: the typed interface of `csrc/index/slot_pool.h`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.cache.index import dimensions
from vllm_tiered_kv.core.arena_geometry import Geometry
from vllm_tiered_kv.native import _cpu


class SlotPool:
    """Allocates slot ids, lowest first. It is not thread-safe."""

    def __init__(self, geometry: Geometry) -> None:
        self._native = _cpu.SlotPool(*dimensions(geometry))
        for size in geometry.slot_bytes:
            self._native.add_class(size)

    def allocate(self, size_class: int) -> int | None:
        """Returns a free slot of the class; None if the class and the free slabs have none."""
        return self._native.allocate(size_class)

    def adopt(self, slots: Sequence[int], size_classes: Sequence[int]) -> None:
        """Marks these slots of a new pool as used; a slab must have slots of one class only."""
        self._native.adopt(slots, size_classes)

    def release(self, slot: int) -> None:
        self._native.release(slot)
