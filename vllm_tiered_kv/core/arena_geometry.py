"""Divides an arena of fixed size into slabs and slots for blocks of several sizes.

The arena is an array of equal slabs. A slab belongs to one size class at a time and holds as many
slots of that class as fit. With a single class a slab is one slot, so no byte is wasted. With
several classes, the slab size is the smallest multiple of the largest slot that wastes at most 1/64
of a slab for every class.

Scheduler and workers compute the same geometry from the same configuration, so a slot id is enough
for a worker to find the bytes.

A store that serves many models learns their block sizes one by one. It uses `SlabGeometry`, which
has slabs of a fixed size and adds a size class when a new block size arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from vllm_tiered_kv.core.transfer import Int64Array

SLOT_ALIGNMENT = 64
_MAX_SLAB_FACTOR = 64
_MAX_SLAB_BYTES = 256 << 20


def aligned(nbytes: int, alignment: int = SLOT_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class ArenaGeometry:
    """Slab and slot arithmetic of an engine's CPU tier, whose block sizes are known at start.

    A slot id is `slab * slots_per_slab + position in the slab`. Immutable and thread-safe.
    """

    capacity_bytes: int
    slot_bytes: tuple[int, ...]  # per size class, aligned
    slab_bytes: int = field(init=False)
    num_slabs: int = field(init=False)
    slots_per_slab: int = field(init=False)  # of the smallest class: the stride of slot ids

    def __post_init__(self) -> None:
        if not self.slot_bytes or min(self.slot_bytes) <= 0:
            raise ValueError(f"slot_bytes must be positive, got {self.slot_bytes}")
        if any(size % SLOT_ALIGNMENT for size in self.slot_bytes):
            raise ValueError(f"slot_bytes must be multiples of {SLOT_ALIGNMENT}")
        if len(set(self.slot_bytes)) != len(self.slot_bytes):
            raise ValueError(f"size classes must differ, got {self.slot_bytes}")
        if self.capacity_bytes < max(self.slot_bytes):
            raise ValueError(
                f"a capacity of {self.capacity_bytes} bytes cannot hold one block of "
                f"{max(self.slot_bytes)} bytes"
            )
        slab = self._choose_slab()
        object.__setattr__(self, "slab_bytes", slab)
        object.__setattr__(self, "num_slabs", self.capacity_bytes // slab)
        object.__setattr__(self, "slots_per_slab", slab // min(self.slot_bytes))

    def _choose_slab(self) -> int:
        largest = max(self.slot_bytes)
        if len(self.slot_bytes) == 1:
            return largest
        best, least_waste = largest, 1.0
        for factor in range(1, _MAX_SLAB_FACTOR + 1):
            slab = largest * factor
            # Size classes exchange memory in whole slabs, so there must be one slab per class.
            if slab * len(self.slot_bytes) > self.capacity_bytes:
                break
            waste = max(slab % size / slab for size in self.slot_bytes)
            if waste < least_waste:
                best, least_waste = slab, waste
            if waste <= 1 / 64:
                break
        return best

    @classmethod
    def for_blocks(cls, capacity_bytes: int, block_bytes: list[int]) -> ArenaGeometry:
        """Returns the geometry for blocks of these lengths; equal lengths share a class."""
        return cls(capacity_bytes, tuple(sorted({aligned(n) for n in block_bytes})))

    def class_of_block(self, block_bytes: int) -> int:
        return self.slot_bytes.index(aligned(block_bytes))

    def slots_in_slab(self, size_class: int) -> int:
        return self.slab_bytes // self.slot_bytes[size_class]

    def offsets(self, slots: Int64Array, size_class: int) -> Int64Array:
        """Returns the byte offsets in the arena of slots of one class."""
        slabs, positions = np.divmod(slots, self.slots_per_slab)
        offsets: Int64Array = slabs * self.slab_bytes + positions * self.slot_bytes[size_class]
        return offsets


def default_slab(capacity_bytes: int, alignment: int) -> int:
    """Returns the default slab size: 1/32 of the capacity, at most 256 MiB.

    The slab size limits the size of a block and is the unit in which classes exchange memory.
    """
    slab = min(_MAX_SLAB_BYTES, capacity_bytes // 32)
    return max(alignment, slab // alignment * alignment)


class SlabGeometry:
    """Slab and slot arithmetic of a daemon's store, which adds a class per slot size and owner.

    `BlockIndex` calls the methods that change it, under the lock of the store.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int, alignment: int) -> None:
        if slab_bytes % alignment or slab_bytes <= 0:
            raise ValueError(
                f"slab_bytes must be a positive multiple of {alignment}, got {slab_bytes}"
            )
        if capacity_bytes < slab_bytes:
            raise ValueError(
                f"a capacity of {capacity_bytes} bytes cannot hold one slab of {slab_bytes} bytes"
            )
        self.capacity_bytes = capacity_bytes
        self.slab_bytes = slab_bytes
        self.alignment = alignment
        self.num_slabs = capacity_bytes // slab_bytes
        self.slots_per_slab = slab_bytes // alignment
        self.slot_bytes: list[int] = []

    def add_class(self, block_bytes: int) -> int:
        """Adds a class for blocks of this length, which must fit into a slab."""
        if not 0 < block_bytes <= self.slab_bytes:
            raise ValueError(
                f"a block of {block_bytes} bytes does not fit into a slab of {self.slab_bytes}"
            )
        self.slot_bytes.append(aligned(block_bytes, self.alignment))
        return len(self.slot_bytes) - 1

    def change_class(self, size_class: int, block_bytes: int) -> None:
        """Reassigns a class that owns no slab to blocks of another length."""
        self.slot_bytes[size_class] = aligned(block_bytes, self.alignment)

    def slots_in_slab(self, size_class: int) -> int:
        return self.slab_bytes // self.slot_bytes[size_class]

    def offset(self, slot: int, size_class: int) -> int:
        return self.offsets([slot], size_class)[0]

    def offsets(self, slots: Iterable[int], size_class: int) -> list[int]:
        """Returns the byte offsets in the arena of slots of one class."""
        per_slab, slab_bytes = self.slots_per_slab, self.slab_bytes
        slot_bytes = self.slot_bytes[size_class]
        return [slot // per_slab * slab_bytes + slot % per_slab * slot_bytes for slot in slots]


Geometry: TypeAlias = ArenaGeometry | SlabGeometry
