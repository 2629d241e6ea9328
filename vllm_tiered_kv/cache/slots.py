"""Slots of an arena: which are free, and which size class owns which slab.

Classes take slabs from a common pool when they need one and give a slab back as soon as its last
slot is free, so the capacity is shared exactly and never exceeded.
"""

from __future__ import annotations

import heapq

import numpy as np

from vllm_tiered_kv.core.arena_geometry import Geometry
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.errors import InvariantError

_NO_CLASS = -1


class SlotPool:
    """Hands out slot ids, lowest first: the part of the arena pinned first is used first."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._per_slab = geometry.slots_per_slab
        self._usable_slabs = geometry.num_slabs
        self._next_fresh_slab = 0
        self._returned_slabs: list[int] = []
        self._slab_class: dict[int, int] = {}
        self._slab_used: dict[int, int] = {}
        # Per class: a heap of free slots; entries of slabs that were given back are stale.
        self._free: list[list[int]] = []
        self._is_free: set[int] = set()
        self._used_slots: list[int] = []
        self._slabs_of: list[int] = []  # per class, how many
        for _ in geometry.slot_bytes:
            self.add_class()

    def add_class(self) -> None:
        """The geometry has a new class."""
        self._free.append([])
        self._used_slots.append(0)
        self._slabs_of.append(0)

    @property
    def used_bytes(self) -> int:
        return sum(
            used * size
            for used, size in zip(self._used_slots, self.geometry.slot_bytes, strict=True)
        )

    def limit(self, usable_bytes: int) -> None:
        """Only slabs wholly within the first `usable_bytes` are handed out from now on."""
        usable = usable_bytes // self.geometry.slab_bytes
        self._usable_slabs = min(usable, self.geometry.num_slabs)

    def slabs_of(self, size_class: int) -> int:
        """Slabs the class owns."""
        return self._slabs_of[size_class]

    def class_of(self, slot: int) -> int:
        return self._slab_class[slot // self._per_slab]

    def slab_of(self, slot: int) -> int:
        return slot // self._per_slab

    def slots_of_slab(self, slab: int) -> list[int]:
        """Slots in use in a slab."""
        first = slab * self.geometry.slots_per_slab
        count = self.geometry.slots_in_slab(self._slab_class[slab])
        return [slot for slot in range(first, first + count) if slot not in self._is_free]

    def allocate(self, size_class: int, may_grow: bool = True) -> int | None:
        """A free slot of the class, or None when neither it nor a free slab is left.

        A class that may not grow takes no further slab.
        """
        heap = self._free[size_class]
        while heap:
            slot = heapq.heappop(heap)
            slab = slot // self._per_slab
            if slot in self._is_free and self._slab_class[slab] == size_class:
                self._is_free.discard(slot)
                self._slab_used[slab] += 1
                break
        else:
            fresh = self._take_slab() if may_grow else None
            if fresh is None:
                return None
            slot = self._open_slab(fresh, size_class)
        self._used_slots[size_class] += 1
        return slot

    def free_slots(self, size_class: int, may_grow: bool = True) -> int:
        """How many slots of the class can still be handed out."""
        per_slab = self.geometry.slots_in_slab(size_class)
        free = self._slabs_of[size_class] * per_slab - self._used_slots[size_class]
        if may_grow:
            returned = sum(slab < self._usable_slabs for slab in self._returned_slabs)
            free += (returned + max(0, self._usable_slabs - self._next_fresh_slab)) * per_slab
        return free

    def adopt(self, slots: Int64Array, size_classes: Int64Array) -> None:
        """Takes exactly these slots out of a fresh pool; a slab has slots of one class."""
        if not len(slots):
            return
        numbers, positions = np.divmod(slots, self.geometry.slots_per_slab)
        slabs, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        class_of_slab = size_classes[first]
        if not np.array_equal(class_of_slab[inverse], size_classes):
            raise InvariantError("a slab is claimed by two size classes")
        by_slab = np.split(
            positions[np.argsort(inverse, kind="stable")], np.cumsum(np.bincount(inverse))[:-1]
        )
        for slab, size_class, taken in zip(
            slabs.tolist(), class_of_slab.tolist(), by_slab, strict=True
        ):
            count = self.geometry.slots_in_slab(size_class)
            is_taken = np.zeros(count, bool)
            if slab >= self.geometry.num_slabs or taken.max() >= count:
                raise InvariantError(f"slab {slab} does not have these slots of its class")
            is_taken[taken] = True
            free = (np.flatnonzero(~is_taken) + slab * self.geometry.slots_per_slab).tolist()
            self._is_free.update(free)
            self._free[size_class].extend(free)
            self._slab_class[slab] = size_class
            self._slab_used[slab] = len(taken)
            self._slabs_of[size_class] += 1
            self._used_slots[size_class] += len(taken)
        for heap in self._free:
            heapq.heapify(heap)
        self._next_fresh_slab = max(self._slab_class, default=-1) + 1
        self._returned_slabs = [
            slab for slab in range(self._next_fresh_slab) if slab not in self._slab_class
        ]

    def release(self, slot: int) -> None:
        slab = slot // self._per_slab
        size_class = self._slab_class[slab]
        self._used_slots[size_class] -= 1
        used = self._slab_used[slab] = self._slab_used[slab] - 1
        if used:
            self._is_free.add(slot)
            heapq.heappush(self._free[size_class], slot)
            return
        slots = self.geometry.slots_in_slab(size_class)
        if slots > 1:
            first = slab * self._per_slab
            self._is_free.difference_update(range(first, first + slots))
        del self._slab_class[slab], self._slab_used[slab]
        self._slabs_of[size_class] -= 1
        heapq.heappush(self._returned_slabs, slab)

    def _take_slab(self) -> int | None:
        if self._returned_slabs and self._returned_slabs[0] < self._usable_slabs:
            return heapq.heappop(self._returned_slabs)
        if self._next_fresh_slab >= self._usable_slabs:
            return None
        self._next_fresh_slab += 1
        return self._next_fresh_slab - 1

    def _open_slab(self, slab: int, size_class: int) -> int:
        """Gives the slab to the class, whose free slots have run out; its first slot is returned in
        use, the others become free."""
        self._slab_class[slab] = size_class
        self._slab_used[slab] = 1
        self._slabs_of[size_class] += 1
        first = slab * self._per_slab
        count = self.geometry.slots_in_slab(size_class)
        if count > 1:
            others = range(first + 1, first + count)
            self._is_free.update(others)
            self._free[size_class].extend(others)  # it was empty, and in order they are a heap
        return first

    def check(self, used: set[int]) -> None:
        """Raises unless exactly the slots `used` are in use and all sums agree."""
        seen: set[int] = set()
        for slab in self._slab_class:
            slots = self.slots_of_slab(slab)
            if len(slots) != self._slab_used[slab] or not slots:
                raise InvariantError(f"slab {slab} counts {self._slab_used[slab]} of {len(slots)}")
            seen.update(slots)
        if seen != used:
            raise InvariantError(f"slots in use differ from the index: {sorted(seen ^ used)[:8]}")
        open_slabs = len(self._slab_class) + len(self._returned_slabs)
        if open_slabs != self._next_fresh_slab or open_slabs > self.geometry.num_slabs:
            raise InvariantError(f"{open_slabs} slabs known, {self._next_fresh_slab} ever opened")
        if sum(self._slabs_of) != len(self._slab_class):
            raise InvariantError(f"classes own {self._slabs_of} of {len(self._slab_class)} slabs")
        if sum(self._used_slots) != len(used) or self.used_bytes > self.geometry.capacity_bytes:
            raise InvariantError(f"{self.used_bytes} bytes used of {self.geometry.capacity_bytes}")
        for slot in self._is_free:
            if self.slab_of(slot) not in self._slab_class:
                raise InvariantError(f"slot {slot} is free in a slab nobody owns")
