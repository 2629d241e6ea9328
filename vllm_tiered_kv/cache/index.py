"""The index of a tier: which key lies in which slot, who uses it, what may leave.

A slot goes free -> reserved -> committed -> free, or reserved -> free on abort. Only committed
blocks are visible to lookups. A pinned slot is being read by a copy and cannot be reused. A block
that is removed while pinned (or while still being written) becomes *detached*: no lookup finds it
any more, and its slot returns when the last user lets go.

Blocks of a chain are linked to the block before them. A block with followers never leaves before
them, so what remains of a prefix is always its useful end: the head. Only over a slower tier that
has it, and where nothing else can leave, one does.

Size classes may belong to owners with a quota. An owner at its quota makes room among its own
blocks; others cannot be pushed out by it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, KeysView, Sequence
from contextlib import closing, contextmanager
from itertools import islice

from vllm_tiered_kv.cache.chain_cut import MOST_TAILS, block_to_cut_at
from vllm_tiered_kv.cache.index_entry import Entry, State
from vllm_tiered_kv.cache.slots import SlotPool
from vllm_tiered_kv.core.arena_geometry import Geometry, SlabGeometry
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.eviction.base import EvictionPolicy
from vllm_tiered_kv.eviction.catalog import make_policy

_MAX_UNTOLD_USES = 64


class BlockIndex:
    """Decides which block lies where. Moves no bytes and is used from one thread."""

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] = lambda key, nbytes: None,
        may_evict: Callable[[bytes], bool] = lambda key: True,
        is_below: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`may_evict` is asked of a block that is about to leave; it may pin it and refuse.
        `is_below`: whether a slower tier has a block, so that what follows is of use without it."""
        self.geometry = geometry
        self._pool = SlotPool(geometry)
        self._eviction = eviction
        self._policies: list[EvictionPolicy] = []
        self._owner_of: list[bytes] = []  # per class
        self._quota_slabs: dict[bytes, int] = {}
        for size in geometry.slot_bytes:
            self._add_policy(size, b"")
        self._on_evict = on_evict
        self._may_evict = may_evict
        self._is_below = is_below
        self._clock = 0
        self._slot_of: dict[bytes, int] = {}
        self._readable: set[bytes] = set()  # the committed ones: a long prefix is asked about often
        self._uses: list[Sequence[bytes]] = []  # prefixes used, not yet told to the policies
        self._entries: dict[int, Entry] = {}
        # Blocks that arrived before the block they follow: adopted when it comes.
        self._orphans: dict[bytes, set[int]] = {}

    def add_class(self, block_bytes: int, owner: bytes) -> int:
        """A class for this owner's blocks of one length; for geometries that grow."""
        if not isinstance(self.geometry, SlabGeometry):
            raise InvariantError("the size classes of this index are fixed")
        size_class = self.geometry.add_class(block_bytes)
        self._pool.add_class()
        self._add_policy(self.geometry.slot_bytes[size_class], owner)
        return size_class

    def set_quota(self, owner: bytes, quota_bytes: int) -> None:
        """The most this owner's classes may hold, in whole slabs and at least one."""
        self._quota_slabs[owner] = max(1, quota_bytes // self.geometry.slab_bytes)

    # ---- questions: no side effects ---------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def __len__(self) -> int:
        """Readable blocks."""
        return len(self._readable)

    def lookup(self, key: bytes) -> Lookup:
        if key in self._readable:
            return Lookup.HIT
        return Lookup.PENDING if key in self._slot_of else Lookup.MISS

    def known_keys(self) -> KeysView[bytes]:
        """All that are no misses, readable or being written; the view changes with the index."""
        return self._slot_of.keys()

    def match_prefix(self, keys: Sequence[bytes], start: int = 0, stop: int | None = None) -> int:
        """How many keys from `start` on are readable without a gap."""
        count = 0
        for is_readable in map(self._readable.__contains__, islice(keys, start, stop)):
            if not is_readable:
                break
            count += 1
        return count

    def are_readable(self, keys: Sequence[bytes]) -> list[bool]:
        return list(map(self._readable.__contains__, keys))

    def first_missing(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The first position from `start` on whose key is a miss; `stop` if there is none."""
        for is_known in map(self._slot_of.__contains__, islice(keys, start, stop)):
            if not is_known:
                break
            start += 1
        return start

    def block_in(self, slot: int) -> tuple[bytes, bytes | None]:
        """Key of the block in a slot, and of the block it follows."""
        entry = self._entries[slot]
        return entry.key, entry.parent_key

    def limit(self, usable_bytes: int) -> None:
        """How much of the arena every worker can use so far; what lies beyond is not handed out."""
        self._pool.limit(usable_bytes)

    def pinned_slots(self) -> set[int]:
        return {slot for slot, entry in self._entries.items() if entry.pins}

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
        uses, self._uses = self._uses, []
        for keys in uses:
            # From the tail to the head, so that the head stays warmest.
            for key in reversed(keys):
                if key in self._readable:
                    self._mark_used(self._slot_of[key])

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of readable blocks, kept in place until `unpin`."""
        slots = list(map(self._slot_of.__getitem__, keys))
        self.pin_slots(slots)
        return slots

    def pin_slots(self, slots: Iterable[int]) -> None:
        """As `pin`, of blocks whose slots are known."""
        committed = State.COMMITTED
        for entry in map(self._entries.__getitem__, slots):
            if entry.state is not committed:
                raise InvariantError("a block is pinned before it is committed")
            entry.pins += 1

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            entry = self._entries[slot]
            if entry.pins <= 0:
                raise InvariantError(f"slot {slot} is unpinned more often than pinned")
            entry.pins -= 1
            if not entry.pins and entry.state is State.DETACHED:
                self._free(slot)

    # ---- write: reserve -> commit | abort -----------------------------------------------------

    def reserve(
        self, key: bytes, parent_key: bytes | None, size_class: int, more: int = 0
    ) -> int | None:
        """A slot to write `key` into, evicting if needed; None when nothing can leave.

        The key must be a miss. The block it follows is protected from this very eviction. So many
        `more` will be reserved at once: looking for what may leave is done for all of them.
        """
        if key in self._slot_of:
            raise InvariantError("a key that is already here cannot be reserved")
        slot = self._take_free(size_class)
        if slot is None:
            with self._kept(parent_key):
                slot = self._make_free(size_class, 1 + more)
            if slot is None and self._cut_chain(size_class, parent_key):
                slot = self._pool.allocate(size_class)
            if slot is None:
                return None
        self._enter(slot, Entry(key, size_class, parent_key))
        return slot

    def commit(self, slot: int) -> bool:
        """Makes the block readable; False when it was removed while being written."""
        entry = self._entries[slot]
        if entry.state is State.DETACHED:
            self._free(slot)
            return False
        if entry.state is not State.RESERVED:
            raise InvariantError(f"slot {slot} is committed twice")
        self.tell_uses()  # in the order it happened
        entry.state = State.COMMITTED
        self._readable.add(entry.key)
        self._clock += 1
        entry.used = self._clock
        self._policies[entry.size_class].admit(slot, entry.key, bool(entry.followers))
        return True

    def abort(self, slot: int) -> None:
        """Gives a reserved slot back. Its followers, if any, stay as orphans."""
        entry = self._entries[slot]
        if entry.state is State.COMMITTED:
            raise InvariantError(f"slot {slot} is aborted after its commit")
        if entry.state is State.RESERVED:
            self._detach(slot, evicted=False)
        self._free(slot)

    # ---- removal ------------------------------------------------------------------------------

    def remove(self, key: bytes, in_slot: int | None = None) -> bool:
        """Forgets a block at once (it turned out bad); its slot returns when nobody uses it.

        With `in_slot`, only what lies there: it may have been replaced by a good one meanwhile.
        """
        slot = self._slot_of.get(key)
        if slot is None or in_slot not in (None, slot):
            return False
        self._remove_slot(slot)
        return True

    def clear(self) -> None:
        """Forgets every block. Copies under way keep their slots until they report."""
        for slot in list(self._slot_of.values()):
            self._remove_slot(slot)

    # ---- inside -------------------------------------------------------------------------------

    @contextmanager
    def _kept(self, key: bytes | None) -> Iterator[None]:
        """Protects the block from eviction for a while."""
        slot = self._slot_of.get(key) if key is not None else None
        if slot is None:
            yield
            return
        self._entries[slot].pins += 1
        try:
            yield
        finally:
            self._entries[slot].pins -= 1

    def _enter(self, slot: int, entry: Entry) -> None:
        """Makes the block known, and links it to those before and behind it."""
        self._entries[slot] = entry
        if entry.parent_key is not None:
            parent = self._slot_of.get(entry.parent_key)
            if parent is not None:
                self._link(slot, parent)
            else:
                self._orphans.setdefault(entry.parent_key, set()).add(slot)
        self._slot_of[entry.key] = slot
        for orphan in self._orphans.pop(entry.key, ()):
            if self._is_before(orphan, slot):  # blocks in a circle could never leave
                self._entries[orphan].parent_key = None
            else:
                self._link(orphan, slot)

    def _is_before(self, slot: int, other: int) -> bool:
        """Whether `slot` is `other`, or comes before it in its chain."""
        above: int | None = other
        while above is not None and above != slot:
            above = self._entries[above].parent
        return above is not None

    def _mark_used(self, slot: int) -> None:
        entry = self._entries[slot]
        self._clock += 1
        entry.used = self._clock
        self._policies[entry.size_class].touch(slot)

    def _link(self, slot: int, parent: int) -> None:
        self._entries[slot].parent = parent
        above = self._entries[parent]
        above.followers.add(slot)
        if len(above.followers) == 1 and above.state is State.COMMITTED:
            self._policies[above.size_class].shield(parent)

    def _unlink(self, slot: int) -> None:
        entry = self._entries[slot]
        if entry.parent is not None:
            above = self._entries[entry.parent]
            above.followers.discard(slot)
            if not above.followers and above.state is State.COMMITTED:
                self._policies[above.size_class].unshield(entry.parent)
            entry.parent = None
        elif entry.parent_key is not None:
            waiting = self._orphans.get(entry.parent_key)
            if waiting is not None:
                waiting.discard(slot)
                if not waiting:
                    del self._orphans[entry.parent_key]

    def _detach(self, slot: int, evicted: bool) -> None:
        """Takes the block out of every lookup and link; the slot itself stays in use."""
        entry = self._entries[slot]
        self._unlink(slot)
        if entry.followers:
            for follower in entry.followers:
                self._entries[follower].parent = None
                self._orphans.setdefault(entry.key, set()).add(follower)
            entry.followers.clear()
        if entry.state is State.COMMITTED:
            self._policies[entry.size_class].forget(slot, entry.key, evicted)
        del self._slot_of[entry.key]
        self._readable.discard(entry.key)
        entry.state = State.DETACHED

    def _remove_slot(self, slot: int) -> None:
        entry = self._entries[slot]
        being_written = entry.state is State.RESERVED
        self._detach(slot, evicted=False)
        if not being_written and not entry.pins:
            self._free(slot)

    def _free(self, slot: int) -> None:
        del self._entries[slot]
        self._pool.release(slot)

    def _evict(self, slot: int) -> None:
        entry = self._entries[slot]
        self._detach(slot, evicted=True)
        self._free(slot)
        self._on_evict(entry.key, self.geometry.slot_bytes[entry.size_class])

    def _add_policy(self, slot_bytes: int, owner: bytes) -> None:
        capacity = self.geometry.capacity_bytes // slot_bytes
        self._policies.append(make_policy(self._eviction, capacity))
        self._owner_of.append(owner)

    def _at_quota(self, owner: bytes) -> bool:
        quota = self._quota_slabs.get(owner)
        if quota is None:
            return False
        classes = (c for c, other in enumerate(self._owner_of) if other == owner)
        return sum(self._pool.slabs_of(c) for c in classes) >= quota

    def _take_free(self, size_class: int) -> int | None:
        may_grow = not self._quota_slabs or not self._at_quota(self._owner_of[size_class])
        return self._pool.allocate(size_class, may_grow)

    def _make_free(self, size_class: int, wanted: int) -> int | None:
        return self._pool.allocate(size_class) if self._evict_for(size_class, wanted) else None

    def _evict_for(self, size_class: int, wanted: int = 1) -> int:
        """Evicts what is coldest, at most `wanted` blocks and often fewer; how many slots of the
        class come free, 0 if nothing can leave."""
        if len(self._policies) == 1:
            return self._evict_coldest_of(size_class, wanted)
        owner = self._owner_of[size_class]
        at_quota = self._at_quota(owner)
        own = self._coldest(size_class)
        others = [
            victim
            for other in range(len(self._policies))
            if other != size_class
            and (not at_quota or self._owner_of[other] == owner)
            and (victim := self._coldest(other)) is not None
        ]
        # Memory moves between classes when the other class holds the colder block.
        for victim in sorted(others, key=lambda s: self._entries[s].used):
            if own is not None and self._entries[own].used <= self._entries[victim].used:
                break
            if self._evict_slab_of(victim):
                return self.geometry.slots_in_slab(size_class)
        if own is None:
            return 0
        self._evict(own)
        return 1

    def _evict_coldest_of(self, size_class: int, wanted: int) -> int:
        count = 0
        with closing(self._leaving(size_class)) as victims:
            for slot in islice(victims, wanted):
                self._evict(slot)
                count += 1
        return count

    def _cut_chain(self, size_class: int, parent_key: bytes | None) -> bool:
        """Where every leaf is in use: see `chain_cut`."""
        if self._is_below is None:
            return False
        with closing(self._policies[size_class].candidates()) as leaves:
            tails = list(islice(leaves, MOST_TAILS))
        if parent_key in self._slot_of:
            tails.insert(0, self._slot_of[parent_key])
        slot = block_to_cut_at(self._entries, tails, size_class, self._is_below, self._may_evict)
        if slot is not None:
            self._evict(slot)
        return slot is not None

    def _coldest(self, size_class: int) -> int | None:
        with closing(self._leaving(size_class)) as victims:
            return next(victims, None)

    def _leaving(self, size_class: int) -> Generator[int, None, None]:
        """Slots of blocks that may leave, coldest first; each may be evicted when it is given."""
        self.tell_uses()
        with closing(self._policies[size_class].candidates()) as candidates:
            for slot in candidates:
                entry = self._entries[slot]
                if not entry.pins and not entry.followers and self._may_evict(entry.key):
                    yield slot

    def _evict_slab_of(self, victim: int) -> bool:
        """Empties the victim's slab, followers first; False when something in it is in use."""
        doomed: list[int] = []
        seen: set[int] = set()
        pending = [(slot, False) for slot in self._pool.slots_of_slab(self._pool.slab_of(victim))]
        while pending:
            slot, expanded = pending.pop()
            entry = self._entries[slot]
            if expanded:
                doomed.append(slot)
                continue
            if slot in seen or entry.state is State.QUARANTINED:
                continue
            if entry.pins or entry.state is not State.COMMITTED:
                return False
            seen.add(slot)
            pending.append((slot, True))
            pending.extend((follower, False) for follower in entry.followers)
        if not all(self._may_evict(self._entries[slot].key) for slot in doomed):
            return False
        for slot in doomed:
            self._evict(slot)
        return True

    def check(self) -> None:
        """Raises InvariantError unless every rule of this file holds."""
        from vllm_tiered_kv.cache.index_check import check_index

        check_index(self)
