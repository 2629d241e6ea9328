"""The index of a tier that outlives its process: slots wait in quarantine before they are reused.

The typed face of `csrc/index/durable_index.h`, which says why: a slot that is written again before
the disk has forgotten its old key would be served under it after a crash.
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
    """Columns of a table of blocks. A key of no bytes is none."""

    keys: NDArray[np.uint8]  # a row each, of a fixed width
    key_bytes: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    parent_bytes: NDArray[np.uint8]
    slots: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    checksums: NDArray[np.uint64]


class DurableIndex(BlockIndex):
    """A `BlockIndex` whose slots pass through quarantine."""

    _native: _cpu.DurableIndex

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None = None,
        on_leave: Callable[[int], None] | None = None,
    ) -> None:
        """`on_leave` is told the slot of every readable block that leaves, before it is taken."""
        hooks = Hooks(on_evict=on_evict, on_leave=on_leave)
        self._open(
            geometry,
            hooks,
            _cpu.DurableIndex(
                *dimensions(geometry), eviction, hooks.call("on_evict"), hooks.call("on_leave")
            ),
        )

    @property
    def has_quarantined(self) -> bool:
        return self._native.has_quarantined

    def free_slots(self, size_class: int) -> int:
        """Slots of the class that `reserve` can still hand out."""
        return self._native.free_slots(size_class)

    def owned_slots(self, size_class: int) -> int:
        """Slots of the class, in use or not, in the slabs it has now."""
        return self._native.owned_slots(size_class)

    def coldest_first(self) -> list[int]:
        """Slots of all readable blocks, in the order of their last use."""
        self.tell_uses()
        return self._native.coldest_first()

    # ---- what the owner keeps with a block ------------------------------------------------------

    def set_facts(self, slot: int, length: int, checksum: int) -> None:
        """Length and checksum of the block in a slot, to be asked for when it is read."""
        self._native.set_facts(slot, length, checksum)

    def facts_in(self, slot: int) -> tuple[int, int]:
        return self._native.facts_in(slot)

    def rows(self, width: int) -> BlockRows:
        """All readable blocks in the order of their last use, keys in so many bytes."""
        self.tell_uses()
        return BlockRows(*self._native.rows(width))

    # ---- room ---------------------------------------------------------------------------------

    def make_room(self, size_class: int, slots: int, parent_key: bytes | None = None) -> int:
        """Evicts until so many slots of the class will come free; how many will.

        The block `parent_key` names stays. 0: everything is in use.
        """
        self.tell_uses()
        return self._native.make_room(size_class, slots, parent_key)

    def evict_coldest(self, parent_key: bytes | None = None) -> bool:
        """Lets the coldest block of all classes leave; False when everything is in use."""
        self.tell_uses()
        return self._native.evict_coldest(parent_key)

    # ---- quarantine ---------------------------------------------------------------------------

    def take_quarantined(self) -> list[int]:
        """Slots nobody uses any more, each given once; the caller owes their `release`."""
        return self._native.take_quarantined()

    def quarantine_again(self, slots: Iterable[int]) -> None:
        """Takes back slots whose removal did not become durable."""
        self._native.quarantine_again(slots)

    def release(self, slots: Iterable[int]) -> None:
        """The removal of these slots' blocks is durable: they may be handed out again."""
        self._native.release(slots)

    def retire(self, slot: int) -> None:
        """Aborts a reservation whose slot cannot be written; it is never handed out again."""
        self._native.retire(slot)

    # ---- recovery -----------------------------------------------------------------------------

    def restore(
        self,
        keys: Sequence[bytes],
        parent_keys: Sequence[bytes | None],
        slots: Sequence[int],
        size_classes: Sequence[int],
    ) -> None:
        """Fills an empty index, coldest block first. Blocks that follow each other in a circle
        follow nothing: they could never leave."""
        self._native.restore(keys, parent_keys, slots, size_classes)

    def restore_rows(self, rows: BlockRows, size_classes: NDArray[np.int64]) -> None:
        """As `restore`, with what is kept beside the blocks."""
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
