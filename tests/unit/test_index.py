"""The block index: single rules, and random operations with a check of all invariants."""

from __future__ import annotations

import random

import pytest

from vllm_tiered_kv.cache.index import NOWHERE, BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry, SlabGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError, NativeError
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES


def key(*path: int) -> BlockKey:
    return BlockKey(bytes(path).ljust(17, b"\xff"))


def make(slots: int = 8, eviction: str = "lru", sizes: tuple[int, ...] = (64,)) -> BlockIndex:
    return BlockIndex(ArenaGeometry(slots * max(sizes), sizes), eviction)


def store(index: BlockIndex, *path: int, size_class: int = 0) -> int | None:
    """Stores the last block of a path; its parent is the block before it in the path."""
    parent = key(*path[:-1]) if len(path) > 1 else None
    slot = index.reserve(key(*path), parent, size_class)
    if slot is not None:
        assert index.commit(slot)
    index.check()
    return slot


def test_index_block_is_visible_from_commit_to_removal() -> None:
    index = make()
    slot = index.reserve(key(1), None, 0)
    assert slot is not None
    assert index.lookup(key(1)) is Lookup.PENDING
    assert index.are_missing([key(1), key(2)]) == [False, True]
    assert index.match_prefix([key(1)]) == 0
    index.commit(slot)
    assert index.lookup(key(1)) is Lookup.HIT
    assert index.match_prefix([key(1), key(1, 2)]) == 1
    assert index.remove(key(1))
    assert index.lookup(key(1)) is Lookup.MISS
    assert not index.remove(key(1))
    assert index.used_bytes == 0
    index.check()


def test_reserve_all_stops_at_first_block_without_room() -> None:
    index = make(slots=3)
    pinned = store(index, 1)
    index.pin([key(1)])
    slots = index.reserve_all(
        [key(1), key(1, 1), key(1, 1), key(2), key(3), key(1)],
        [None, key(1), key(1), None, None, None],
        0,
    )
    assert slots[0] == slots[2] == NOWHERE  # already present; duplicate in this list
    assert len(slots) == 4  # no room for the fifth; the last is not tried
    assert len({pinned, slots[1], slots[3]}) == 3
    assert index.block_in(slots[1]) == (key(1, 1), key(1))
    assert index.lookup(key(3)) is Lookup.MISS
    assert index.commit_each([slots[1], slots[3]]) == [True, True]
    index.check()


def test_reserve_all_failing_midway_reserves_nothing() -> None:
    def refuse(block: bytes) -> bool:
        raise ValueError("not now")

    index = BlockIndex(ArenaGeometry(2 * 64, (64,)), "lru", may_evict=refuse)
    store(index, 1)
    with pytest.raises(ValueError, match="not now"):
        index.reserve_all([key(2), key(3)], [None, None], 0)
    assert [index.lookup(key(n)) for n in (1, 2, 3)] == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
    index.check()


def test_commit_each_invalid_slot_does_not_affect_others() -> None:
    index = make()
    slots = index.reserve_all([key(n) for n in range(3)], [None] * 3, 0)
    index.remove(key(0))
    index.commit(slots[1])
    removed, twice, fine = index.commit_each(slots)
    assert removed is False
    assert isinstance(twice, str)
    assert fine is True
    index.check()


def test_abort_frees_reserved_slot() -> None:
    index = make()
    slot = index.reserve(key(1), None, 0)
    index.abort(slot)
    assert index.lookup(key(1)) is Lookup.MISS
    assert index.used_bytes == 0
    index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_index_evicts_tails_before_heads(eviction: str) -> None:
    index = make(4, eviction)
    for depth in range(1, 5):
        store(index, *range(depth))
    store(index, 100)
    chain = [key(*range(depth)) for depth in range(1, 5)]
    assert index.match_prefix(chain) == 3
    store(index, 101)
    store(index, 102)
    assert index.match_prefix(chain) == 1 or eviction == "s3fifo"
    for position, block in enumerate(chain):  # the remaining blocks have no gap
        if index.lookup(block) is Lookup.HIT:
            assert index.match_prefix(chain) >= position + 1


def test_reserve_does_not_evict_parent() -> None:
    index = make(2)
    store(index, 1)
    store(index, 2)
    index.touch([key(2)])
    assert store(index, 1, 1) is not None  # (1) was coldest, but (2) is evicted
    assert index.lookup(key(1)) is Lookup.HIT
    assert index.lookup(key(2)) is Lookup.MISS


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_index_chain_longer_than_tier_passes_through(eviction: str) -> None:
    """Unused heads can be evicted if a lower tier holds them."""
    below: set[bytes] = set()
    offered: list[bytes] = []
    gone: list[bytes] = []

    def may_evict(name: bytes) -> bool:
        if name not in below:
            offered.append(name)
        return name in below

    geometry = ArenaGeometry(8 * 64, (64,))
    index = BlockIndex(
        geometry, eviction, lambda name, _: gone.append(name), may_evict, below.__contains__
    )
    chain = [tuple(range(depth)) for depth in range(1, 21)]
    for path in chain[:8]:
        assert store(index, *path) is not None
    assert store(index, *chain[8]) is None, "none of them is anywhere else"
    assert set(offered) == {key(*path) for path in chain[:8]}, "but all of them may be soon"
    below.update(key(*path) for path in chain[:8])
    used = index.pin([key(*chain[0]), key(*chain[7])])
    assert store(index, *chain[8]) is not None
    assert gone == [key(*chain[6])], "the nearest that is not in use"
    index.unpin(used)
    for path in chain[9:]:
        below.add(key(*path[:-1]))
        assert store(index, *path) is not None
    assert index.lookup(key(*chain[-1])) is Lookup.HIT
    assert below.issuperset(gone)


def test_index_pinned_and_reserved_slots_are_not_reused() -> None:
    index = make(3)
    store(index, 1)
    slots = index.pin([key(1)])
    reserved = index.reserve(key(2), None, 0)
    store(index, 3)
    assert store(index, 4) is not None  # evicts (3)
    assert index.lookup(key(3)) is Lookup.MISS
    assert index.lookup(key(1)) is Lookup.HIT
    index.pin([key(4)])
    assert index.reserve(key(5), None, 0) is None  # nothing can be evicted
    index.commit(reserved)
    index.unpin(slots)
    assert store(index, 5) is not None
    index.check()


def test_remove_pinned_block_keeps_slot_until_unpin() -> None:
    index = make(1)
    store(index, 1)
    slots = index.pin([key(1)])
    index.remove(key(1))
    index.check()
    assert index.lookup(key(1)) is Lookup.MISS
    assert index.reserve(key(2), None, 0) is None
    index.unpin(slots)
    assert store(index, 2) is not None


def test_remove_block_being_written_is_never_visible() -> None:
    index = make(2)
    slot = index.reserve(key(1), None, 0)
    index.clear()
    index.check()
    assert index.commit(slot) is False
    assert index.lookup(key(1)) is Lookup.MISS
    assert index.used_bytes == 0


def test_index_links_block_stored_before_its_parent() -> None:
    index = make(3)
    store(index, 1, 1)
    store(index, 1)  # becomes its parent
    store(index, 2)
    index.touch([key(1, 1)])
    index.touch([key(2)])
    store(index, 3)  # (1) is coldest but has a successor now: evicts (1, 1)
    assert index.lookup(key(1)) is Lookup.HIT
    assert index.lookup(key(1, 1)) is Lookup.MISS


def test_index_size_classes_share_memory_within_capacity() -> None:
    index = make(8, sizes=(64, 192))
    count = 0
    while len(index) == count:
        store(index, 1, count, size_class=0)
        count += 1
    assert index.used_bytes <= index.geometry.capacity_bytes
    for number in range(40):
        assert store(index, 2, number, size_class=1) is not None
        assert index.used_bytes <= index.geometry.capacity_bytes
    assert store(index, 3, size_class=0) is not None


def test_index_limit_restricts_usable_slots() -> None:
    index = make(8)
    slab = index.geometry.slab_bytes
    per_slab = index.geometry.slots_per_slab
    index.limit(2 * slab + slab // 2)  # only half of the third slab is pinned
    slots = {store(index, n) for n in range(6)}
    assert {slot // per_slab for slot in slots if slot is not None} == {0, 1}
    index.limit(8 * slab)
    for n in range(6, 20):
        store(index, n)
    warm = [n for n in range(20) if index.lookup(key(n)) is Lookup.HIT]
    assert len(warm) == 8
    index.limit(2 * slab)  # a worker lost a part of its memory
    beyond = next(n for n in warm if index.pin([key(n)])[0] // per_slab >= 2)
    index.unpin(index.pinned_slots())
    index.remove(key(beyond))
    for n in range(20, 24):
        slot = store(index, n)
        assert slot is None or slot // per_slab < 2


def test_index_misuse_is_invariant_error() -> None:
    index = make()
    slot = store(index, 1)
    for misuse in (
        lambda: index.reserve(key(1), None, 0),
        lambda: index.commit(slot),
        lambda: index.abort(slot),
        lambda: index.unpin([slot]),
    ):
        with pytest.raises(InvariantError):
            misuse()
    index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("sizes", [(64,), (64, 128), (64, 320, 576)])
@pytest.mark.parametrize("seed", range(4))
def test_index_random_operations_keep_invariants(
    eviction: str, sizes: tuple[int, ...], seed: int
) -> None:
    rng = random.Random(seed)
    # In every second run most heads can be evicted.
    is_below = (lambda name: name[1] != 0) if seed % 2 else None
    index = BlockIndex(ArenaGeometry(24 * max(sizes), sizes), eviction, is_below=is_below)
    reserved: list[int] = []
    pinned: list[list[int]] = []
    for _ in range(1500):
        size_class = rng.randrange(len(sizes))
        path = (size_class, *(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        name = key(*path)
        action = rng.random()
        if action < 0.45:
            if index.lookup(name) is Lookup.MISS:
                parent = key(*path[:-1]) if len(path) > 2 else None
                slot = index.reserve(name, parent, size_class, rng.choice((0, 0, 1, 5)))
                if slot is not None:
                    reserved.append(slot)
        elif action < 0.65 and reserved:
            index.commit(reserved.pop(rng.randrange(len(reserved))))
        elif action < 0.7 and reserved:
            index.abort(reserved.pop(rng.randrange(len(reserved))))
        elif action < 0.8:
            index.touch([key(*path[:depth]) for depth in range(2, len(path) + 1)])
        elif action < 0.88:
            if index.lookup(name) is Lookup.HIT and len(pinned) < 4:
                pinned.append(index.pin([name]))
        elif action < 0.96 and pinned:
            index.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif action < 0.98:
            index.remove(name)
        elif action < 0.99:
            chain = [key(*path[:depth]) for depth in range(2, len(path) + 1)]
            index.expect_again(chain, rng.choice((0.0, 1e9)))
        elif action > 0.998:
            index.clear()
        index.check()
    for slot in reserved:
        index.commit(slot)
    for slots in pinned:
        index.unpin(slots)
    index.clear()
    index.check()
    assert index.used_bytes == 0


def test_reserve_with_more_evicts_same_blocks_as_one_by_one() -> None:
    """The same blocks are evicted in the same order, and the parent of the new ones is not."""
    left: list[list[bytes]] = [[], []]
    geometry = ArenaGeometry(24 * 64, (64,))
    indexes = [
        BlockIndex(geometry, "lru", lambda name, _, gone=gone: gone.append(name)) for gone in left
    ]
    rng = random.Random(4)
    for _ in range(400):
        root = rng.randrange(6)
        paths = [(root, *range(depth)) for depth in range(rng.randrange(1, 9))]
        for hints, index in enumerate(indexes):
            new = [path for path in paths if index.lookup(key(*path)) is Lookup.MISS]
            slots = [
                index.reserve(
                    key(*path),
                    key(*path[:-1]) if len(path) > 1 else None,
                    0,
                    hints * (len(new) - 1 - number),
                )
                for number, path in enumerate(new)
            ]
            for slot in slots:
                assert slot is not None
                index.commit(slot)
            index.touch([key(*path) for path in paths[: len(paths) // 2]])
            index.check()
    assert left[0] == left[1]
    assert len(left[0]) > 500


def growing(slabs: int, slab_bytes: int = 4096 * 4) -> BlockIndex:
    return BlockIndex(SlabGeometry(slabs * slab_bytes, slab_bytes, 4096), "lru")


def test_index_added_classes_share_slabs() -> None:
    index = growing(3)
    small, large = index.add_class(4000, b"a"), index.add_class(8000, b"a")
    for number in range(6):
        assert store(index, number, size_class=small) is not None
    assert store(index, 100, size_class=large) is not None
    assert index.used_bytes == 6 * 4096 + 8192
    for number in range(101, 106):  # takes slabs of the colder class
        assert store(index, number, size_class=large) is not None
    assert index.used_bytes <= index.geometry.capacity_bytes
    assert index.lookup(key(105)) is Lookup.HIT


def test_index_owner_at_quota_evicts_only_own_blocks() -> None:
    index = growing(4)
    mine, other = index.add_class(4096, b"mine"), index.add_class(4096, b"other")
    index.set_quota(b"mine", 2 * index.geometry.slab_bytes)
    for number in range(4):
        assert store(index, 200 + number, size_class=other) is not None
    for number in range(20):
        assert store(index, number, size_class=mine) is not None
    assert all(index.lookup(key(200 + number)) is Lookup.HIT for number in range(4))
    assert [number for number in range(20) if index.lookup(key(number)) is Lookup.HIT] == list(
        range(12, 20)
    )
    for number in range(20, 40):  # the other owner has no quota and takes the free slab, then more
        assert store(index, 200 + number, size_class=other) is not None
    assert index.used_bytes <= index.geometry.capacity_bytes


def test_index_vetoed_block_is_not_evicted() -> None:
    refused: list[bytes] = []

    def may_evict(block: bytes) -> bool:
        refused.append(block)
        return block != key(0)

    index = BlockIndex(ArenaGeometry(3 * 64, (64,)), "lru", may_evict=may_evict)
    for number in range(3):
        store(index, number)
    store(index, 3)
    assert index.lookup(key(0)) is Lookup.HIT
    assert index.lookup(key(1)) is Lookup.MISS
    assert refused == [key(0), key(1)]


def test_index_failing_hook_changes_nothing() -> None:
    def may_evict(block: bytes) -> bool:
        raise OSError("the disk is gone")

    index = BlockIndex(ArenaGeometry(3 * 64, (64,)), "lru", may_evict=may_evict)
    for number in range(3):
        store(index, number)
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            index.reserve(key(9), key(1), 0)
        index.check()
    assert len(index) == 3
    assert not index.pinned_slots()


def test_index_hook_may_change_list_of_keys() -> None:
    keys = [key(*range(depth)) for depth in range(1, 9)]
    names = list(keys)

    def may_evict(block: bytes) -> int:
        names.clear()
        return 1  # truthy

    index = BlockIndex(ArenaGeometry(4 * 64, (64,)), "lru", may_evict=may_evict)
    for number in range(4):
        store(index, 100 + number)
    plan = index.reserve_missing(names, 0, 8, 0)
    assert (plan.positions, plan.dropped) == ([0, 1, 2, 3], 4)
    index.check()


def test_index_bad_arguments_change_nothing() -> None:
    index = make(2)
    store(index, 1)
    store(index, 2)
    for misuse in (
        lambda: index.reserve(b"k" * 256, None, 0),
        lambda: index.reserve(key(3), b"k" * 256, 0),
        lambda: index.reserve(key(3), None, 7),
        lambda: index.reserve("text", None, 0),  # type: ignore[arg-type]
        lambda: index.match_prefix(7),  # type: ignore[arg-type]
        lambda: index.are_readable([7]),  # type: ignore[list-item]
    ):
        with pytest.raises(NativeError):
            misuse()
    for slot in (-1, 99, 1 << 62):
        with pytest.raises(InvariantError):
            index.unpin([slot])
    with pytest.raises(InvariantError):
        index.pin([key(1), key(9)])
    index.check()
    assert not index.pinned_slots()
    assert index.reserve(key(3), None, 0, (1 << 63) - 1) is not None, "room for one is enough"


def test_index_cyclic_parents_can_be_evicted() -> None:
    """A hash chain has no cycle, but a client may send any parent."""
    index = make(3)
    circle = [key(1), key(2), key(3)]
    for number, name in enumerate(circle):
        slot = index.reserve(name, circle[number - 1], 0)
        assert slot is not None
        index.commit(slot)
        index.check()
    for number in range(4, 7):
        assert store(index, number) is not None
    assert not any(index.are_readable(circle))
