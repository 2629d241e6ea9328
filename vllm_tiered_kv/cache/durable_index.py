"""The index of a persistent tier: freed slots stay in quarantine before they are reused.

It is the typed interface of `csrc/index/durable_index.h`. A slot may be overwritten only after the
removal of its old block is durable on disk. Otherwise the store would serve the new bytes under the
old key after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.cache.index import BlockIndex, Hooks, dimensions
from vllm_tiered_kv.core.arena_geometry import Geometry
from vllm_tiered_kv.native import _cpu


class BlockRows(NamedTuple):
    """Columns of a table of blocks. A key of length 0 means no key."""

    keys: NDArray[np.uint8]  # a row per block, of a fixed width
    key_bytes: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    parent_bytes: NDArray[np.uint8]
    slots: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]


class DurableIndex(BlockIndex):
    """A `BlockIndex` with quarantine and recovery, for the SSD store.

    Like `BlockIndex` it is not thread-safe; the store calls it under its lock.
    """

    _native: _cpu.DurableIndex

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None = None,
        on_leave: Callable[[int], None] | None = None,
        quota_of: Callable[[bytes], int | None] | None = None,
    ) -> None:
        """`on_evict(key, nbytes)` is called for every evicted block, `on_leave(slot)` for every
        readable block that is removed, before it is removed; `quota_of` as for `BlockIndex`."""
        hooks = Hooks(on_evict=on_evict, on_leave=on_leave)
        self._open(
            geometry,
            hooks,
            _cpu.DurableIndex(
                *dimensions(geometry), eviction, hooks.call("on_evict"), hooks.call("on_leave")
            ),
            quota_of,
        )

    @property
    def has_quarantined(self) -> bool:
        return self._native.has_quarantined

    def free_slots(self, size_class: int) -> int:
        """Returns how many slots of the class `reserve` can still allocate without eviction."""
        return self._native.free_slots(size_class)

    def owned_slots(self, size_class: int) -> int:
        """Returns how many slots, used or free, the class has in its slabs."""
        return self._native.owned_slots(size_class)

    def coldest_first(self) -> list[int]:
        """Returns the slots of all readable blocks, least recently used first."""
        self.flush_recency()
        return self._native.coldest_first()

    # ---- metadata of a block --------------------------------------------------------------------

    def set_facts(self, slot: int, length: int, checksum: int) -> None:
        """Records length and checksum of the block in a slot, which its reads need."""
        self._native.set_facts(slot, length, checksum)

    def facts_in(self, slot: int) -> tuple[int, int]:
        return self._native.facts_in(slot)

    def rows(self, width: int) -> BlockRows:
        """Returns all readable blocks, least recently used first, with keys padded to `width`."""
        self.flush_recency()
        return BlockRows(*self._native.rows(width))

    # ---- room ---------------------------------------------------------------------------------

    def make_room(self, size_class: int, slots: int, parent_key: bytes | None = None) -> int:
        """Evicts blocks until `slots` slots of the class become free; returns how many will.

        The block `parent_key` is not evicted. The result is 0 if all blocks are in use.
        """
        self.flush_recency()
        return self._native.make_room(size_class, slots, parent_key)

    def evict_coldest(self, parent_key: bytes | None = None) -> bool:
        """Evicts the coldest block of all classes; False if all blocks are in use."""
        self.flush_recency()
        return self._native.evict_coldest(parent_key)

    # ---- quarantine ---------------------------------------------------------------------------

    def take_quarantined(self) -> list[int]:
        """Returns unused slots in quarantine, each of them once; the caller must `release` them."""
        return self._native.take_quarantined()

    def quarantine_again(self, slots: Iterable[int]) -> None:
        """Returns slots to quarantine because their removal did not become durable."""
        self._native.quarantine_again(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Makes slots available again after the removal of their blocks became durable."""
        self._native.release(slots)

    def retire(self, slot: int) -> None:
        """Aborts a reservation whose slot cannot be written; the slot is never used again."""
        self._native.retire(slot)

    # ---- recovery -----------------------------------------------------------------------------

    def restore(
        self,
        keys: Sequence[bytes],
        parent_keys: Sequence[bytes | None],
        slots: Sequence[int],
        size_classes: Sequence[int],
    ) -> None:
        """Fills an empty index, coldest block first.

        Blocks whose parents form a cycle get no parent, because they could never be evicted.
        """
        self._native.restore(keys, parent_keys, slots, size_classes)

    def restore_rows(self, rows: BlockRows, size_classes: NDArray[np.int64]) -> None:
        """Like `restore`, with the lengths and checksums of the blocks."""
        self._native.restore_rows(
            rows.keys,
            rows.key_bytes,
            rows.parents,
            rows.parent_bytes,
            rows.slots,
            size_classes,
            rows.lengths,
            rows.checksums,
        )


class SlotPool:
    """Allocates slots without an index, lowest first: the typed interface of
    `csrc/index/slot_pool.h`. It is not thread-safe."""

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
