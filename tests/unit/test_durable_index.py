"""The index of a persistent tier reuses slots only after their removal is durable."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.unit.test_index import key, make, store
from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError, NativeError
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES


def make_durable(
    slots: int = 8, eviction: str = "lru", sizes: tuple[int, ...] = (64,)
) -> tuple[DurableIndex, list[int]]:
    """Returns an index, and a list that receives the slots of removed blocks."""
    left: list[int] = []
    index = DurableIndex(ArenaGeometry(slots * max(sizes), sizes), eviction, on_leave=left.append)
    return index, left


def test_durable_index_slot_is_not_reused_before_release() -> None:
    index, left = make_durable(2)
    for number in (1, 2):
        assert store(index, number) is not None
    assert store(index, 3) is None  # reserve does not evict
    assert index.lookup(key(1)) is Lookup.HIT
    assert index.make_room(0, 1) == 1
    assert left == [0]
    assert index.lookup(key(1)) is Lookup.MISS
    assert store(index, 3) is None
    slots = index.take_quarantined()
    assert slots == [0]
    assert not index.has_quarantined
    assert store(index, 3) is None  # taken, but not released yet
    index.quarantine_again(slots)
    assert index.take_quarantined() == slots
    index.release(slots)
    assert store(index, 3) == 0
    with pytest.raises(InvariantError):
        index.release([0])


def test_durable_index_pinned_block_enters_quarantine_on_unpin() -> None:
    index, left = make_durable(1)
    store(index, 1)
    slots = index.pin([key(1)])
    index.remove(key(1))
    assert left == [0]
    assert not index.has_quarantined
    index.unpin(slots)
    index.check()
    index.release(index.take_quarantined())
    assert store(index, 2) == 0


def test_make_room_evicts_coldest_but_not_parent() -> None:
    index, _ = make_durable(2)
    store(index, 1)
    store(index, 2)
    assert index.make_room(0, 1, key(1)) == 1
    assert index.lookup(key(1)) is Lookup.HIT
    assert index.lookup(key(2)) is Lookup.MISS
    assert index.make_room(0, 1, key(1)) == 0
    assert not index.evict_coldest(key(1))
    assert index.evict_coldest()
    assert len(index) == 0
    index.check()


def test_durable_index_retired_slot_is_never_reused() -> None:
    index, _ = make_durable(2)
    slot = index.reserve(key(1), None, 0)
    assert slot is not None
    index.retire(slot)
    index.check()
    assert index.take_quarantined() == []
    assert store(index, 1) == 1
    assert store(index, 2) is None
    assert index.make_room(0, 5) == 1
    index.release(index.take_quarantined())
    assert store(index, 2) == 1


def test_durable_index_self_parent_can_be_evicted() -> None:
    for index in (make(1), make_durable(1)[0]):
        slot = index.reserve(key(1), key(1), 0)
        assert slot is not None
        assert index.commit(slot)
        index.check()
        assert index.remove(key(1))
        index.check()


def test_restore_cycle_of_parents_can_be_evicted() -> None:
    index, _ = make_durable(8)
    names = [key(n) for n in range(6)]
    # 0 is its own parent; 1, 2 and 3 form a cycle; 4 descends from it; 5 has a missing parent.
    parents = [names[0], names[3], names[1], names[2], names[3], key(99)]
    index.restore(names, parents, [0, 1, 2, 3, 4, 5], [0] * 6)
    index.check()
    for _ in names:
        assert index.evict_coldest()
        index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_restore_reproduces_index(eviction: str, seed: int) -> None:
    rng = random.Random(seed)
    sizes = (64, 320)
    index, _ = make_durable(24, eviction, sizes)
    known: dict[bytes, tuple[bytes | None, int]] = {}
    for _ in range(60):
        size_class = rng.randrange(2)
        path = (size_class, *(rng.randrange(3) for _ in range(rng.randrange(1, 5))))
        if index.lookup(key(*path)) is Lookup.MISS:
            parent = key(*path[:-1]) if len(path) > 2 else None
            slot = index.reserve(key(*path), parent, size_class)
            if slot is not None:
                index.commit(slot)
                known[key(*path)] = (parent, size_class)
    index.touch(rng.sample(sorted(known), 10))
    by_slot = {index.slot_of(name): name for name in known}
    order = [by_slot[slot] for slot in index.coldest_first()]
    again, _ = make_durable(24, eviction, sizes)
    again.restore(
        order,
        [known[name][0] for name in order],
        [index.slot_of(name) for name in order],
        [known[name][1] for name in order],
    )
    again.check()
    assert again.coldest_first() == index.coldest_first()
    assert again.used_bytes == index.used_bytes
    assert [again.free_slots(c) for c in (0, 1)] == [index.free_slots(c) for c in (0, 1)]
    with pytest.raises(InvariantError):
        again.restore([], [], [], [])
    while again.evict_coldest():
        again.check()
    again.release(again.take_quarantined())
    again.check()
    assert again.used_bytes == 0


def test_restore_rows_reproduces_index() -> None:
    """Uses keys of all lengths, so that some do not fit where shorter keys were stored."""
    rng = random.Random(0)
    index, _ = make_durable(3000)
    names: list[bytes] = []
    facts: dict[bytes, tuple[int, int]] = {}
    for number in range(2500):
        name = number.to_bytes(2, "little") + bytes(rng.randrange(40))
        parent = rng.choice([None, b"nowhere", *names[-5:]])
        slot = index.reserve(name, parent, 0)
        assert slot is not None
        assert index.commit(slot)
        names.append(name)
        facts[name] = rng.randrange(1 << 32), rng.randrange(1 << 64)
        index.set_facts(slot, *facts[name])
    index.touch(rng.sample(names, 100))
    for name in rng.sample(names, 100):
        index.remove(name)
    index.check()
    rows = index.rows(64)
    again, _ = make_durable(3000)
    again.restore_rows(rows, np.zeros(len(rows.slots), np.int64))
    again.check()
    assert again.coldest_first() == index.coldest_first() == rows.slots.tolist()
    for slot in rows.slots.tolist():
        assert again.block_in(slot) == index.block_in(slot)
        assert again.facts_in(slot) == index.facts_in(slot) == facts[index.block_in(slot)[0]]
    with pytest.raises(NativeError, match="a key is longer"):
        index.rows(16)
    fresh, _ = make_durable(3000)
    with pytest.raises(NativeError, match="rows"):
        fresh.restore_rows(rows, np.zeros(1, np.int64))
    with pytest.raises(NativeError, match="longer than its column"):
        fresh.restore_rows(
            rows._replace(key_bytes=np.full_like(rows.key_bytes, 65)), rows.slots * 0
        )
    fresh.check()
    assert not fresh.slots()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("sizes", [(64,), (64, 320)])
@pytest.mark.parametrize("seed", range(3))
def test_durable_index_random_operations_keep_invariants(
    eviction: str, sizes: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    index, left = make_durable(24, eviction, sizes)
    reserved: list[int] = []
    pinned: list[list[int]] = []
    taken: list[int] = []
    locked: set[int] = set()  # slots of removed blocks that are not released yet
    for _ in range(1200):
        size_class = rng.randrange(len(sizes))
        path = (size_class, *(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        name = key(*path)
        action = rng.random()
        if action < 0.45:
            if index.lookup(name) is Lookup.MISS:
                parent = key(*path[:-1]) if len(path) > 2 else None
                slot = index.reserve(name, parent, size_class)
                if slot is None:
                    index.make_room(size_class, rng.randint(1, 3), parent)
                else:
                    assert slot not in locked
                    reserved.append(slot)
        elif action < 0.6 and reserved:
            index.commit(reserved.pop(rng.randrange(len(reserved))))
        elif action < 0.63 and reserved:
            index.abort(reserved.pop(rng.randrange(len(reserved))))
        elif action < 0.72:
            if index.lookup(name) is Lookup.HIT and len(pinned) < 4:
                pinned.append(index.pin([name]))
        elif action < 0.8 and pinned:
            index.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif action < 0.83:
            index.remove(name)
        elif action < 0.9:
            taken += index.take_quarantined()
        elif action < 0.97:
            index.release(taken)
            locked.difference_update(taken)
            taken = []
        locked.update(left)
        left.clear()
        index.check()


@pytest.mark.parametrize(
    ("keys", "parents", "slots"),
    [
        ([key(1), b"k" * 256], [None, None], [0, 1]),
        ([key(1), key(2)], [None, b"k" * 256], [0, 1]),
        ([key(1), key(2)], [None, None], [1, 1]),
        ([key(1), key(1)], [None, None], [0, 1]),
        ([key(1), key(2)], [None, None], [0, 99]),
        ([key(1), key(2)], [None, None], [0, -1]),
        ([key(1)], [None], [0, 1]),
    ],
)
def test_restore_invalid_rows_leaves_index_empty(
    keys: list[bytes], parents: list[bytes | None], slots: list[int]
) -> None:
    index, _ = make_durable(4)
    with pytest.raises((InvariantError, NativeError)):
        index.restore(keys, parents, slots, [0] * len(slots))
    index.check()
    assert not index.slots()
    with pytest.raises(InvariantError):
        index.block_in(1)
    assert store(index, 5) == 0


def test_make_room_unknown_class_is_error() -> None:
    index, _ = make_durable(1)
    store(index, 1)
    with pytest.raises((NativeError, IndexError)):
        index.make_room(7, 1)
    assert len(index) == 1
