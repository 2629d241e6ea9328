"""The index of a tier: maps keys to slots, counts pins, and selects blocks to evict.

It is the typed interface of `csrc/index/block_index.h`, which describes the implementation. The
states of a slot are free -> reserved -> committed -> free. Only committed blocks are visible to
lookups, a pinned slot cannot be reused, and a block is never evicted before its successors in the
chain.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vllm_tiered_kv.cache.ghosts import Ghosts
from vllm_tiered_kv.core.arena_geometry import Geometry, SlabGeometry, aligned
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.native import _cpu

NOWHERE = -1
"""Slot number of a block for which no slot was reserved."""

_MAX_PENDING_TOUCHES = 64
_TO_THE_END = -1
_LOOKUPS = (Lookup.MISS, Lookup.PENDING, Lookup.HIT)


class SlotUse(NamedTuple):
    """A slot in use, as `BlockIndex.slots` returns it."""

    slot: int
    key: bytes
    is_visible: bool  # readable or being written; False: removed, but still pinned or written
    pins: int
    used: int  # logical time of the last use


class Reservations(NamedTuple):
    """Reserved slots, their positions in the sequence, and the number of blocks without a slot."""

    positions: list[int]
    slots: list[int]
    dropped: int


class Hooks:
    """Holds the callbacks of an index; the native index refers to them weakly.

    The callbacks usually belong to the owner of the index. The garbage collector cannot traverse
    native objects, so strong references from there would leak the owner.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        self._hooks = hooks

    def call(self, name: str) -> Callable[..., Any] | None:
        if self._hooks[name] is None:
            return None
        weak = weakref.ref(self)

        def call(*arguments: object) -> Any:
            hooks = weak()
            assert hooks is not None, "the index of this callback no longer exists"
            return hooks._hooks[name](*arguments)  # type: ignore[misc]

        return call


class BlockIndex:
    """Decides which block is in which slot. It moves no bytes.

    The scheduler half owns one for the CPU tier, and each store of a daemon owns one. It is not
    thread-safe: the owner calls it from one thread at a time.
    """

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None = None,
        may_evict: Callable[[bytes], bool] | None = None,
        is_below: Callable[[bytes], bool] | None = None,
        now: Callable[[], int] | None = None,
        ghosts: Ghosts | None = None,
        quota_of: Callable[[bytes], int | None] | None = None,
        on_removed: Callable[[bytes], None] | None = None,
    ) -> None:
        """`on_evict(key, nbytes)` is called for every evicted block. `may_evict(key)` can veto an
        eviction and may pin the block. `is_below(key)` returns whether a lower tier holds the
        block, in which case its successors are useful without it. All three run while the index is
        changing, so they may only pin and unpin. `now()` returns the time in nanoseconds; the
        default is the system's. `ghosts` remembers what is evicted. `quota_of(owner)` returns the
        quota of an owner when the owner gets a class. The index forgets the quota with the owner's
        last class, because the number of owners over time is unlimited. `on_removed(key)` is called
        for blocks that `remove` has removed."""
        hooks = Hooks(on_evict=on_evict, may_evict=may_evict, is_below=is_below, now=now)
        self._open(
            geometry,
            hooks,
            _cpu.BlockIndex(
                *dimensions(geometry),
                eviction,
                hooks.call("on_evict"),
                hooks.call("may_evict"),
                hooks.call("is_below"),
                hooks.call("now"),
                ghosts.native if ghosts is not None else None,
            ),
            quota_of,
            on_removed,
        )

    def _open(
        self,
        geometry: Geometry,
        hooks: Hooks,
        native: _cpu.BlockIndex,
        quota_of: Callable[[bytes], int | None] | None,
        on_removed: Callable[[bytes], None] | None = None,
    ) -> None:
        self.geometry = geometry
        self._quota_of = quota_of
        self._hooks = hooks
        self._native = native
        self._on_removed = on_removed
        self._touched: list[Sequence[bytes]] = []  # prefixes not yet reported to the policies
        self._classes: dict[tuple[bytes, int], int] = {}  # (owner, slot bytes) -> class
        self._class_names: list[tuple[bytes, int]] = []  # class -> (owner, slot bytes)
        for size in geometry.slot_bytes:
            native.add_class(size, b"")
            self._class_names.append((b"", size))

    def add_class(self, block_bytes: int, owner: bytes) -> int:
        """Adds a class for this owner's blocks of one length. Requires a `SlabGeometry`."""
        if not isinstance(self.geometry, SlabGeometry):
            raise InvariantError("the size classes of this index are fixed")
        size_class = self.geometry.add_class(block_bytes)
        slot_bytes = self.geometry.slot_bytes[size_class]
        self._native.add_class(slot_bytes, owner)
        self._class_names.append((owner, slot_bytes))
        self._classes[owner, slot_bytes] = size_class
        return size_class

    def class_for(self, block_bytes: int, owner: bytes) -> int:
        """Returns the class of this owner's blocks of one length.

        A class without blocks may be reassigned, so call this before each `reserve`.
        """
        if not isinstance(self.geometry, SlabGeometry):
            raise InvariantError("the size classes of this index are fixed")
        slot_bytes = aligned(block_bytes, self.geometry.alignment)
        size_class = self._classes.get((owner, slot_bytes))
        if size_class is not None:
            return size_class
        size_class = self._native.reuse_class(slot_bytes, owner)
        if size_class is None:
            size_class = self.add_class(block_bytes, owner)
        else:
            self.geometry.change_class(size_class, block_bytes)
            previous = self._class_names[size_class]
            if self._classes.get(previous) == size_class:
                del self._classes[previous]
            self._class_names[size_class] = owner, slot_bytes
            self._classes[owner, slot_bytes] = size_class
            has_class = any(name == previous[0] for name, _ in self._class_names)
            if self._quota_of is not None and not has_class:
                self._native.forget_quota(previous[0])
        if owner:
            self._apply_quota(owner)
        return size_class

    def apply_quotas(self) -> None:
        """Limits the owners of all classes, after a recovery."""
        for owner in {owner for owner, _ in self._class_names if owner}:
            self._apply_quota(owner)

    def _apply_quota(self, owner: bytes) -> None:
        if self._quota_of is not None and (quota := self._quota_of(owner)) is not None:
            self.set_quota(owner, quota)

    def set_quota(self, owner: bytes, quota_bytes: int) -> None:
        """Limits the bytes of this owner's classes, in whole slabs and at least one slab."""
        self.flush_recency()
        self._native.set_quota(owner, quota_bytes)

    # ---- queries: no side effects -----------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._native.used_bytes

    @property
    def held(self) -> int:
        """Number of blocks that are readable or being written."""
        return self._native.held

    def __len__(self) -> int:
        """Number of readable blocks."""
        return self._native.readable

    def lookup(self, key: bytes) -> Lookup:
        return _LOOKUPS[self._native.lookup(key)]

    def match_prefix(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        """Returns how many keys from `start` on are readable without a gap."""
        return self._native.match_prefix(keys, start, _TO_THE_END if stop is None else stop)

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]:
        return self._native.are_readable(keys)

    def are_missing(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns whether each key is a miss: neither readable nor being written."""
        return self._native.are_missing(keys)

    def first_missing(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """Returns the first position from `start` on whose key is a miss; `stop` if none is."""
        return start + self._native.match_known(keys, start, stop)

    def slot_of(self, key: bytes) -> int:
        """Returns the slot of a block that is readable or being written; KeyError if missing."""
        slot = self._native.slot_of(key)
        if slot is None:
            raise KeyError(key)
        return slot

    def block_in(self, slot: int) -> tuple[bytes, bytes | None]:
        """Returns the key of the block in a slot, and the key of its parent."""
        return self._native.block_in(slot)

    def blocks_in(self, slots: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
        """Like `block_in`, for several slots."""
        return self._native.blocks_in(slots)

    def slots(self) -> list[SlotUse]:
        """Returns all slots in use, in no particular order."""
        return [SlotUse(*use) for use in self._native.slots()]

    def pinned_slots(self) -> set[int]:
        return {use.slot for use in self.slots() if use.pins}

    def limit(self, usable_bytes: int) -> None:
        """Allows slots only in the first `usable_bytes` of the arena, which all workers pinned."""
        self._native.limit(usable_bytes)

    # ---- use ----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks a prefix as used.

        The eviction policies are updated later: they need the order only to evict, and a waiting
        request should not pay for the update.
        """
        self._touched.append(keys)
        if len(self._touched) >= _MAX_PENDING_TOUCHES:
            self.flush_recency()

    @property
    def has_unflushed_recency(self) -> bool:
        return bool(self._touched)

    def flush_recency(self) -> None:
        """Reports pending touches to the eviction policies. Call it while no request waits."""
        if self._touched:
            touched, self._touched = self._touched, []
            for keys in touched:
                self._native.touch(keys)

    def mark_dead(self, keys: Sequence[bytes]) -> None:
        """Makes blocks, in chain order, the first to be evicted, tail first: its caller expects no
        further request for them, for example because the session has ended.

        Blocks that other sequences continue stay as they are. A later use makes a block ordinary
        again.
        """
        self.flush_recency()  # earlier touches must not undo it
        self._native.mark_dead(keys)

    def expect_again(self, keys: Sequence[bytes], seconds: float) -> None:
        """Tells when the next request for a sequence is expected, for example after a tool call.

        If other blocks are evicted earlier than that after their last use, the sequence counts as
        dead: it would take their room and be evicted too before it is asked for.
        """
        self.flush_recency()
        self._native.expect_again(keys, seconds)

    def mark_sent(self, slots: Sequence[int]) -> None:
        """A lower tier has received the blocks in these slots. The ghosts will know."""
        self._native.mark_sent(slots)

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Pins readable blocks until `unpin` and returns their slots. Pins all or raises."""
        return self._native.pin(keys)

    def pin_slots(self, slots: Iterable[int]) -> None:
        """Like `pin`, for blocks whose slots are known."""
        self._native.pin_slots(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        self._native.unpin(slots)

    # ---- write: reserve -> commit | abort -----------------------------------------------------

    def reserve(
        self, key: bytes, parent_key: bytes | None, size_class: int, more: int = 0
    ) -> int | None:
        """Reserves a slot for `key`, evicting if needed; None if nothing can be evicted.

        The key must be a miss. Its parent is not evicted by this call. `more` announces how many
        further blocks the caller reserves next, so that one search finds victims for all of them.
        """
        self.flush_recency()
        return self._native.reserve(key, parent_key, size_class, more)

    def reserve_missing(
        self,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        size_class: int,
        skip: range = range(0),
    ) -> Reservations:
        """Reserves slots for the misses among `keys[start:stop]`, except the positions in `skip`.

        Each key is the parent of the next one. If room runs out, the tail is dropped, never the
        head.
        """
        self.flush_recency()
        found = self._native.reserve_missing(keys, start, stop, skip.start, skip.stop, size_class)
        return Reservations(*found)

    def reserve_all(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None], size_class: int
    ) -> list[int]:
        """Reserves slots for these blocks, which are in chain order.

        The list ends before the first block that finds no room. A block that is already present has
        the slot NOWHERE.
        """
        self.flush_recency()
        return self._native.reserve_all(keys, parents, size_class)

    def commit(self, slot: int) -> bool:
        """Makes the block readable; False if it was removed while being written."""
        self.flush_recency()  # earlier touches come first in the eviction order
        return self._native.commit(slot)

    def commit_all(self, slots: Sequence[int]) -> list[bool]:
        """Like `commit`, for several slots."""
        self.flush_recency()
        return self._native.commit_all(slots)

    def commit_each(self, slots: Sequence[int]) -> list[bool | str]:
        """Like `commit_all`, but an invalid slot yields an error text and does not affect the
        others."""
        self.flush_recency()
        return self._native.commit_each(slots)

    def abort(self, slot: int) -> None:
        """Releases a reserved slot. Successors of its block stay until the block is put again."""
        self._native.abort(slot)

    # ---- removal ------------------------------------------------------------------------------

    def remove(self, key: bytes, in_slot: int | None = None) -> bool:
        """Removes a block, for example a damaged one; its slot becomes free when it is unused.

        With `in_slot` the block is removed only if it is still in that slot: a good copy may have
        replaced it meanwhile.
        """
        is_removed = self._native.remove(key, in_slot)
        if is_removed and self._on_removed is not None:
            self._on_removed(key)
        return is_removed

    def clear(self) -> None:
        """Removes every block. Running copies keep their slots until they report."""
        self._native.clear()

    def take_evicted(self) -> tuple[int, int]:
        """Returns the number and the bytes of blocks evicted since the last call."""
        return self._native.take_evicted()

    def check(self) -> None:
        """Raises InvariantError if an invariant of the index is violated."""
        self._native.check()


def dimensions(geometry: Geometry) -> tuple[int, int, int, int]:
    """Returns the constructor arguments of the native index that describe an arena."""
    return (
        geometry.capacity_bytes,
        geometry.slab_bytes,
        geometry.num_slabs,
        geometry.slots_per_slab,
    )
