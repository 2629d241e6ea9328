"""The index of a tier that outlives its process: slots wait in quarantine before they are reused.

The disk learns of a block's removal later than the index does. Were the slot written again before
that, a crash in between would leave the old key pointing at the new block's bytes. So the slot of
a block that left is *quarantined*: `reserve` never evicts, `make_room` does, ahead of need; the
owner takes the quarantined slots, makes their removal durable, and then releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.index_entry import Entry, State
from vllm_tiered_kv.core.arena_geometry import Geometry
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.errors import InvariantError


class DurableIndex(BlockIndex):
    """A `BlockIndex` whose slots pass through quarantine."""

    def __init__(
        self,
        geometry: Geometry,
        eviction: str,
        on_evict: Callable[[bytes, int], None] = lambda key, nbytes: None,
        on_leave: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """`on_leave` is told the slot of every readable block that leaves, before it is taken."""
        super().__init__(geometry, eviction, on_evict)
        self._on_leave = on_leave
        self._quarantined: list[int] = []

    @property
    def held(self) -> int:
        """Blocks that are readable or being written."""
        return len(self._slot_of)

    def slot_of(self, key: bytes) -> int:
        """Where a block is that is readable or being written."""
        return self._slot_of[key]

    @property
    def has_quarantined(self) -> bool:
        return bool(self._quarantined)

    def free_slots(self, size_class: int) -> int:
        """Slots of the class that `reserve` can still hand out."""
        may_grow = not self._at_quota(self._owner_of[size_class])
        return self._pool.free_slots(size_class, may_grow)

    def owned_slots(self, size_class: int) -> int:
        """Slots of the class, in use or not, in the slabs it has now."""
        return self._pool.slabs_of(size_class) * self.geometry.slots_in_slab(size_class)

    def coldest_first(self) -> list[int]:
        """Slots of all readable blocks, in the order of their last use."""
        self.tell_uses()
        readable = [(e.used, s) for s, e in self._entries.items() if e.state is State.COMMITTED]
        readable.sort()
        return [slot for _, slot in readable]

    def set_quota(self, owner: bytes, quota_bytes: int) -> None:
        """As a BlockIndex; what was recovered beyond the quota leaves, a slab at a time."""
        before = self._quota_slabs.get(owner)
        super().set_quota(owner, quota_bytes)
        quota = self._quota_slabs[owner]
        if quota == before:
            return
        classes = [number for number, other in enumerate(self._owner_of) if other == owner]
        for _ in range(sum(map(self._pool.slabs_of, classes)) - quota):
            coldest = [slot for c in classes if (slot := self._coldest(c)) is not None]
            coldest.sort(key=lambda slot: self._entries[slot].used)
            if not any(map(self._evict_slab_of, coldest)):
                break  # all in use: the owner cannot grow, and what leaves is not replaced

    # ---- room ---------------------------------------------------------------------------------

    def make_room(self, size_class: int, slots: int, parent_key: bytes | None = None) -> int:
        """Evicts until so many slots of the class will come free; how many will.

        The block `parent_key` names stays. 0: everything is in use.
        """
        freed = 0
        with self._kept(parent_key):
            while freed < slots:
                more = self._evict_for(size_class)
                if not more:
                    break
                freed += more
        return freed

    def evict_coldest(self, parent_key: bytes | None = None) -> bool:
        """Lets the coldest block of all classes leave; False when everything is in use."""
        with self._kept(parent_key):
            coldest = (self._coldest(size_class) for size_class in range(len(self._policies)))
            victims = [slot for slot in coldest if slot is not None]
            if not victims:
                return False
            self._evict(min(victims, key=lambda slot: self._entries[slot].used))
            return True

    # ---- quarantine ---------------------------------------------------------------------------

    def take_quarantined(self) -> list[int]:
        """Slots nobody uses any more, each given once; the caller owes their `release`."""
        slots, self._quarantined = self._quarantined, []
        return slots

    def quarantine_again(self, slots: Iterable[int]) -> None:
        """Takes back slots whose removal did not become durable."""
        self._quarantined.extend(slots)

    def release(self, slots: Iterable[int]) -> None:
        """The removal of these slots' blocks is durable: they may be handed out again."""
        for slot in slots:
            if self._entries[slot].state is not State.QUARANTINED:
                raise InvariantError(f"slot {slot} is released and not in quarantine")
            super()._free(slot)

    def retire(self, slot: int) -> None:
        """Aborts a reservation whose slot cannot be written; it is never handed out again."""
        self.abort(slot)
        self._quarantined.remove(slot)
        self._entries[slot].state = State.RETIRED

    # ---- recovery -----------------------------------------------------------------------------

    def restore(
        self,
        keys: Sequence[bytes],
        parent_keys: Sequence[bytes | None],
        slots: Sequence[int],
        size_classes: Sequence[int],
    ) -> None:
        """Fills an empty index, coldest block first: `reserve` and `commit` of all, but faster."""
        if self._entries:
            raise InvariantError("only an empty index can be restored")
        self._pool.adopt(np.array(slots, np.int64), np.array(size_classes, np.int64))
        self._slot_of = dict(zip(keys, slots, strict=True))
        self._readable = set(keys)
        rows = dict(zip(keys, range(len(keys)), strict=True))
        nowhere = len(keys)
        parents = [rows.get(key, nowhere) for key in parent_keys]  # type: ignore[arg-type]
        in_circle = _rows_in_circles(np.array(parents, np.int64))
        entries = [
            Entry(key, size_class, parent_key, state=State.COMMITTED, used=used)
            for used, (key, size_class, parent_key) in enumerate(
                zip(keys, size_classes, parent_keys, strict=True), self._clock + 1
            )
        ]
        self._clock += len(entries)
        self._entries = dict(zip(slots, entries, strict=True))
        for row in in_circle:
            entries[row].parent_key, parents[row] = None, nowhere
        for slot, entry, parent in zip(slots, entries, parents, strict=True):
            if parent != nowhere:
                entry.parent = slots[parent]
                entries[parent].followers.add(slot)
            elif entry.parent_key is not None:
                self._orphans.setdefault(entry.parent_key, set()).add(slot)
        for slot, entry in zip(slots, entries, strict=True):
            self._policies[entry.size_class].admit(slot, entry.key, bool(entry.followers))

    # ---- inside -------------------------------------------------------------------------------

    def _make_free(self, size_class: int, wanted: int) -> int | None:
        return None  # a slot comes free when the disk says so; see `make_room`

    def _detach(self, slot: int, evicted: bool) -> None:
        if self._entries[slot].state is State.COMMITTED:
            self._on_leave(slot)
        super()._detach(slot, evicted)

    def _free(self, slot: int) -> None:
        self._entries[slot].state = State.QUARANTINED
        self._quarantined.append(slot)


def _rows_in_circles(parents: Int64Array) -> list[int]:
    """Rows from which no way up leads out; blocks in a circle could never leave."""
    nowhere = len(parents)
    above = np.append(parents, nowhere)
    for _ in range(nowhere.bit_length()):  # twice as far with each round
        above = above[above]
    rows: list[int] = np.flatnonzero(above[:-1] != nowhere).tolist()
    return rows
