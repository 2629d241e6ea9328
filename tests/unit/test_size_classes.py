"""Size classes of an index are reused as owners come and go; slots of their slabs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from vllm_tiered_kv.cache.durable_index import SlotPool
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry, SlabGeometry
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES

PAGE = 4096
SLABS = 8
PER_SLAB = 16


def make(
    eviction: str = "lru", quota_of: Callable[[bytes], int | None] | None = None
) -> BlockIndex:
    slab = PER_SLAB * PAGE
    return BlockIndex(SlabGeometry(SLABS * slab, slab, PAGE), eviction, quota_of=quota_of)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def store(index: BlockIndex, number: int, owner: bytes, nbytes: int = PAGE) -> int | None:
    slot = index.reserve(name(number), None, index.class_for(nbytes, owner))
    if slot is not None:
        assert index.commit(slot)
    return slot


def classes(index: BlockIndex) -> int:
    assert len(index._classes) <= len(index._class_names) == len(index.geometry.slot_bytes)
    return len(index.geometry.slot_bytes)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_classes_of_thousands_of_owners_are_reused(eviction: str) -> None:
    index = make(eviction)
    for number in range(3000):
        nbytes = PAGE * (1 + number % 3)
        for block in range(number % 20):
            assert store(index, number * 100 + block, name(number), nbytes) is not None
        if number % 50 == 0:
            index.check()
    assert classes(index) <= SLABS + 1  # classes with blocks, and one for the next owner
    index.check()


def test_classes_of_owners_without_room_are_reused() -> None:
    index = make()
    for number in range(SLABS * PER_SLAB):
        store(index, number, b"large")
    pinned = index.pin([name(number) for number in range(SLABS * PER_SLAB)])
    before = classes(index)
    for number in range(1000, 2000):
        assert store(index, number, name(number)) is None
    assert classes(index) == before + 1
    index.unpin(pinned)
    index.check()


def test_class_with_slot_in_use_is_not_reused() -> None:
    index = make()
    store(index, 0, b"first")
    [slot] = index.pin([name(0)])
    index.remove(name(0))  # it is still pinned
    mine = index.class_for(PAGE, b"first")
    for number in range(1, 20):
        assert index.class_for(2 * PAGE, name(number)) != mine
    assert index.class_for(PAGE, b"first") == mine
    index.unpin([slot])
    index.check()
    store(index, 1, b"second", 3 * PAGE)
    assert index.class_for(3 * PAGE, b"second") == mine
    assert index.class_for(PAGE, b"first") != mine


def test_reused_class_keeps_nothing_of_old_one() -> None:
    index = make("s3fifo")
    index.set_quota(b"first", PER_SLAB * PAGE)
    for number in range(2 * PER_SLAB):
        store(index, number, b"first")
    assert len(index) == PER_SLAB
    number = index.class_for(PAGE, b"first")
    index.clear()
    assert index.class_for(2 * PAGE, b"second") == number
    slots = [store(index, 100 + n, b"second", 2 * PAGE) for n in range(PER_SLAB)]
    assert slots == [*range(PER_SLAB // 2), *range(PER_SLAB, PER_SLAB + PER_SLAB // 2)]
    assert index.used_bytes == PER_SLAB * 2 * PAGE
    index.check()


def with_quotas() -> BlockIndex:
    return make(quota_of=lambda owner: None if owner == b"free" else PER_SLAB * PAGE)


def test_quota_lasts_as_long_as_classes_of_owner() -> None:
    index = with_quotas()
    for number in range(3000):
        nbytes = PAGE * (1 + number % 3)
        for block in range(number % 40):
            assert store(index, number * 100 + block, name(number), nbytes) is not None
        assert index._native.quotas <= SLABS + 1
    index.check()


def test_quota_of_returning_owner_is_restored() -> None:
    index = with_quotas()
    for _ in range(2):
        for number in range(2 * PER_SLAB):
            store(index, number, b"first")
        assert len(index) == PER_SLAB
        index.clear()
        for owner in (b"free", b""):
            for number in range(2 * PER_SLAB):
                store(index, number, owner, 3 * PAGE)
            assert len(index) == 2 * PER_SLAB
            index.clear()
        assert index._native.quotas == 0
    index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_evict_slab_keeps_block_pinned_by_hook(eviction: str) -> None:
    """The coldest block of a class is evictable at first, but its parent is in a colder slab. When
    the hook is called again for that slab, it pins the block, which must then keep its slot."""
    asked: list[bytes] = []
    taken: list[int] = []

    def may_evict(key: bytes) -> bool:
        asked.append(key)
        if key == b"tail" and asked.count(key) == 2:
            taken.extend(index.pin([key]))
            return False
        return True

    index = BlockIndex(SlabGeometry(2 * 4 * PAGE, 4 * PAGE, PAGE), eviction, may_evict=may_evict)

    def put(key: bytes, nbytes: int, parent: bytes | None = None) -> None:
        slot = index.reserve(key, parent, index.class_for(nbytes, b""))
        assert slot is not None
        assert index.commit(slot)

    put(b"head", 2 * PAGE)
    put(b"cold", 2 * PAGE)
    put(b"tail", PAGE, b"head")
    for number in range(3):
        put(name(number), PAGE)
    put(b"new", PAGE)
    assert asked.count(b"tail") == 2
    assert index.lookup(b"tail") is Lookup.HIT
    assert index.lookup(name(0)) is Lookup.MISS
    index.unpin(taken)
    index.check()


def test_fixed_geometry_refuses_new_classes() -> None:
    index = BlockIndex(ArenaGeometry(640, (64, 128)), "lru")
    with pytest.raises(InvariantError):
        index.class_for(64, b"")


def test_slot_pool_allocates_lowest_slot_first() -> None:
    """Compares with sets of free slots, while slabs move between classes."""
    geometry = SlabGeometry(SLABS * PER_SLAB * PAGE, PER_SLAB * PAGE, PAGE)
    for pages in (1, 2, 5, PER_SLAB):
        geometry.add_class(pages * PAGE)
    pool = SlotPool(geometry)
    rng = random.Random(1)
    used: list[tuple[int, int]] = []  # slot and class
    slabs: list[tuple[int, set[int]] | None] = [None] * SLABS  # class and free slots
    for _ in range(20_000):
        if used and rng.random() < 0.5:
            slot, size_class = used.pop(rng.randrange(len(used)))
            pool.release(slot)
            slab = slot // PER_SLAB
            owned = slabs[slab]
            assert owned is not None
            owned[1].add(slot)
            if len(owned[1]) == geometry.slots_in_slab(size_class):
                slabs[slab] = None
            continue
        size_class = rng.randrange(4)
        free = [min(slab[1]) for slab in slabs if slab and slab[0] == size_class and slab[1]]
        expected = min(free, default=None)
        if expected is None and None in slabs:
            slab = slabs.index(None)
            first = slab * PER_SLAB
            slabs[slab] = size_class, set(range(first, first + geometry.slots_in_slab(size_class)))
            expected = first
        assert pool.allocate(size_class) == expected
        if expected is not None:
            owned = slabs[expected // PER_SLAB]
            assert owned is not None
            owned[1].remove(expected)
            used.append((expected, size_class))
