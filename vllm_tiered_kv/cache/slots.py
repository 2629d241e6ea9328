"""Slots of an arena without an index: the typed face of `csrc/index/slot_pool.h`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.cache.index import dimensions
from vllm_tiered_kv.core.arena_geometry import Geometry
from vllm_tiered_kv.native import _cpu


class SlotPool:
    """Hands out slot ids, lowest first."""

    def __init__(self, geometry: Geometry) -> None:
        self._native = _cpu.SlotPool(*dimensions(geometry))
        for size in geometry.slot_bytes:
            self._native.add_class(size)

    def allocate(self, size_class: int) -> int | None:
        """A free slot of the class, or None when neither it nor a free slab is left."""
        return self._native.allocate(size_class)

    def adopt(self, slots: Sequence[int], size_classes: Sequence[int]) -> None:
        """Takes exactly these slots out of a fresh pool; a slab has slots of one class."""
        self._native.adopt(slots, size_classes)

    def release(self, slot: int) -> None:
        self._native.release(slot)
