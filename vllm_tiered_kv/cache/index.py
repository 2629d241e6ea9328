"""The index of a tier: which key lies in which slot, who uses it, what may leave.

The typed face of `csrc/index/block_index.h`, which says how it works. A slot goes free -> reserved
-> committed -> free; only committed blocks are visible to lookups; a pinned slot cannot be reused;
a block with followers in its chain never leaves before them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from vllm_tiered_kv.core.arena_geometry import Geometry, SlabGeometry, aligned
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.native import _cpu

NOWHERE = -1
"""The slot of a block that got none."""

_MAX_UNTOLD_USES = 64
_TO_THE_END = -1
_LOOKUPS = (Lookup.MISS, Lookup.PENDING, Lookup.HIT)


class SlotUse(NamedTuple):
    """A slot in use."""

    slot: int
    key: bytes
    is_visible: bool  # readable or being written; False: removed, and somebody still uses it
    pins: int
    used: int  # time of last use


class Reservations(NamedTuple):
    """Slots for these positions of a sequence, and how many blocks from there on found no room."""

    positions: list[int]
    slots: list[int]
    dropped: int


class Hooks:
    """Keeps an index's callbacks for the compiled part, which refers to this weakly: they mostly
    belong to the owner of the index, and the garbage collector cannot look into compiled parts."""

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        self._hooks = hooks

    def call(self, name: str) -> Callable[..., Any] | None:
        if self._hooks[name] is None:
            return None
        weak = weakref.ref(self)

        def call(*arguments: object) -> Any:
            hooks = weak()
            assert hooks is not None, "an index is used that is gone"
            return hooks._hooks[name](*arguments)  # type: ignore[misc]

        return call


class BlockIndex:
    """Decides which block lies where. Moves no bytes and is used from one thread at a time."""

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None = None,
        may_evict: Callable[[bytes], bool] | None = None,
        is_below: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`may_evict` is asked of a block that is about to leave; it may pin it and refuse.
        `is_below`: whether a slower tier has a block, so that what follows is of use without it.
        All three run while the index changes: they may pin and unpin, and nothing else."""
        hooks = Hooks(on_evict=on_evict, may_evict=may_evict, is_below=is_below)
        self._open(
            geometry,
            hooks,
            _cpu.BlockIndex(
                *dimensions(geometry),
                eviction,
                hooks.call("on_evict"),
                hooks.call("may_evict"),
                hooks.call("is_below"),
            ),
        )

    def _open(self, geometry: Geometry, hooks: Hooks, native: _cpu.BlockIndex) -> None:
        self.geometry = geometry
        self._hooks = hooks
        self._native = native
        self._uses: list[Sequence[bytes]] = []  # prefixes used, not yet told to the policies
        self._classes: dict[tuple[bytes, int], int] = {}  # by owner and slot bytes
        self._class_names: list[tuple[bytes, int]] = []  # the same the other way round
        self.quota_of: Callable[[bytes], int | None] | None = None
        """Asked for the quota of an owner that gets a class, which is forgotten with its last one:
        there may be any number of owners over time."""
        for size in geometry.slot_bytes:
            native.add_class(size, b"")
            self._class_names.append((b"", size))

    def add_class(self, block_bytes: int, owner: bytes) -> int:
        """A new class for this owner's blocks of one length; for geometries that grow."""
        if not isinstance(self.geometry, SlabGeometry):
            raise InvariantError("the size classes of this index are fixed")
        size_class = self.geometry.add_class(block_bytes)
        slot_bytes = self.geometry.slot_bytes[size_class]
        self._native.add_class(slot_bytes, owner)
        self._class_names.append((owner, slot_bytes))
        self._classes[owner, slot_bytes] = size_class
        return size_class

    def class_for(self, block_bytes: int, owner: bytes) -> int:
        """The class of this owner's blocks of one length. While it has no block its number may be
        given to another: to be asked for at each `reserve`."""
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
            before = self._class_names[size_class]
            if self._classes.get(before) == size_class:
                del self._classes[before]
            self._class_names[size_class] = owner, slot_bytes
            self._classes[owner, slot_bytes] = size_class
            if self.quota_of is not None and not self._has_class(before[0]):
                self._native.forget_quota(before[0])
        if owner and self.quota_of is not None and (quota := self.quota_of(owner)) is not None:
            self.set_quota(owner, quota)
        return size_class

    def set_quota(self, owner: bytes, quota_bytes: int) -> None:
        """The most this owner's classes may hold, in whole slabs and at least one."""
        if self.quota_of is None or self._has_class(owner):
            self.tell_uses()
            self._native.set_quota(owner, quota_bytes)

    def _has_class(self, owner: bytes) -> bool:
        return any(name == owner for name, _ in self._class_names)

    # ---- questions: no side effects ---------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._native.used_bytes

    @property
    def held(self) -> int:
        """Blocks that are readable or being written."""
        return self._native.held

    def __len__(self) -> int:
        """Readable blocks."""
        return self._native.readable

    def lookup(self, key: bytes) -> Lookup:
        return _LOOKUPS[self._native.lookup(key)]

    def match_prefix(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        """How many keys from `start` on are readable without a gap."""
        return self._native.match_prefix(keys, start, _TO_THE_END if stop is None else stop)

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]:
        return self._native.are_readable(keys)

    def are_missing(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is a miss: neither readable nor being written."""
        return self._native.are_missing(keys)

    def first_missing(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The first position from `start` on whose key is a miss; `stop` if there is none."""
        return start + self._native.match_known(keys, start, stop)

    def slot_of(self, key: bytes) -> int:
        """Where a block is that is readable or being written."""
        slot = self._native.slot_of(key)
        if slot is None:
            raise KeyError(key)
        return slot

    def block_in(self, slot: int) -> tuple[bytes, bytes | None]:
        """Key of the block in a slot, and of the block it follows."""
        return self._native.block_in(slot)

    def blocks_in(self, slots: Sequence[int]) -> list[tuple[bytes, bytes | None]]:
        """As `block_in`, of each."""
        return self._native.blocks_in(slots)

    def slots(self) -> list[SlotUse]:
        """All that are in use, in no order."""
        return [SlotUse(*use) for use in self._native.slots()]

    def pinned_slots(self) -> set[int]:
        return {use.slot for use in self.slots() if use.pins}

    def limit(self, usable_bytes: int) -> None:
        """How much of the arena every worker can use so far; what lies beyond is not handed out."""
        self._native.limit(usable_bytes)

    # ---- use ----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks a prefix as used. Only noted for now: the order matters when something has to
        leave, and a request that waits should not pay for it."""
        self._uses.append(keys)
        if len(self._uses) >= _MAX_UNTOLD_USES:
            self.tell_uses()

    @property
    def has_untold_uses(self) -> bool:
        return bool(self._uses)

    def tell_uses(self) -> None:
        """Tells the policies what was used, to be called when nobody waits."""
        if self._uses:
            uses, self._uses = self._uses, []
            for keys in uses:
                self._native.touch(keys)

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of readable blocks, kept in place until `unpin`: all of them, or an error."""
        return self._native.pin(keys)

    def pin_slots(self, slots: Iterable[int]) -> None:
        """As `pin`, of blocks whose slots are known."""
        self._native.pin_slots(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        self._native.unpin(slots)

    # ---- write: reserve -> commit | abort -----------------------------------------------------

    def reserve(
        self, key: bytes, parent_key: bytes | None, size_class: int, more: int = 0
    ) -> int | None:
        """A slot to write `key` into, evicting if needed; None when nothing can leave.

        The key must be a miss. The block it follows is protected from this very eviction. So many
        `more` will be reserved at once: looking for what may leave is done for all of them.
        """
        self.tell_uses()
        return self._native.reserve(key, parent_key, size_class, more)

    def reserve_missing(
        self,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        size_class: int,
        skip: range = range(0),
    ) -> Reservations:
        """Slots for the misses among `keys[start:stop]`, each of which follows the one before it,
        but not for `skip`. Where room ends, the rest is dropped, never the head."""
        self.tell_uses()
        found = self._native.reserve_missing(keys, start, stop, skip.start, skip.stop, size_class)
        return Reservations(*found)

    def reserve_all(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None], size_class: int
    ) -> list[int]:
        """Slots for these blocks in chain order until one finds no room, with which the list ends.
        Of a block that is here already: NOWHERE."""
        self.tell_uses()
        return self._native.reserve_all(keys, parents, size_class)

    def commit(self, slot: int) -> bool:
        """Makes the block readable; False when it was removed while being written."""
        self.tell_uses()  # in the order it happened
        return self._native.commit(slot)

    def commit_all(self, slots: Sequence[int]) -> list[bool]:
        """As `commit`, of each."""
        self.tell_uses()
        return self._native.commit_all(slots)

    def commit_each(self, slots: Sequence[int]) -> list[bool | str]:
        """As `commit`, of each: for one that cannot be, what is wrong. It takes no other with
        it."""
        self.tell_uses()
        return self._native.commit_each(slots)

    def abort(self, slot: int) -> None:
        """Gives a reserved slot back. Its followers, if any, await it."""
        self._native.abort(slot)

    # ---- removal ------------------------------------------------------------------------------

    def remove(self, key: bytes, in_slot: int | None = None) -> bool:
        """Forgets a block at once (it turned out bad); its slot returns when nobody uses it.

        With `in_slot`, only what lies there: it may have been replaced by a good one meanwhile.
        """
        return self._native.remove(key, in_slot)

    def clear(self) -> None:
        """Forgets every block. Copies under way keep their slots until they report."""
        self._native.clear()

    def take_evicted(self) -> tuple[int, int]:
        """Blocks that had to leave for others since the last call, and their bytes."""
        return self._native.take_evicted()

    def check(self) -> None:
        """Raises InvariantError unless every rule of the index holds."""
        self._native.check()


def dimensions(geometry: Geometry) -> tuple[int, int, int, int]:
    """What the compiled part is told of an arena."""
    return (
        geometry.capacity_bytes,
        geometry.slab_bytes,
        geometry.num_slabs,
        geometry.slots_per_slab,
    )
