"""The guarantees of each eviction policy, tested through an index; LRU against a naive model."""

from __future__ import annotations

import random
import time

import pytest

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.config import Eviction
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry, SlabGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import EVICTION_POLICIES


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(17, "little"))


class Tier:
    """An index with a number of slots, and the list of evicted blocks."""

    def __init__(self, eviction: str, slots: int) -> None:
        self.left: list[int] = []
        self.seconds = 0.0
        self.index = BlockIndex(
            ArenaGeometry(slots * 64, (64,)),
            eviction,
            on_evict=lambda name, _: self.left.append(int.from_bytes(name, "little")),
            now=lambda: int(self.seconds * 1e9),
        )

    def store(self, number: int, parent: int | None = None) -> bool:
        slot = self.index.reserve(key(number), None if parent is None else key(parent), 0)
        if slot is not None:
            self.index.commit(slot)
        self.index.check()
        return slot is not None

    def has(self, number: int) -> bool:
        return self.index.lookup(key(number)) is Lookup.HIT

    def use(self, number: int) -> None:
        self.index.touch([key(number)])


def test_eviction_option_lists_all_policies() -> None:
    assert sorted(choice.value for choice in Eviction) == sorted(EVICTION_POLICIES)
    with pytest.raises(NativeError, match="unknown policy 'mru'"):
        BlockIndex(ArenaGeometry(64, (64,)), "mru")


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_evicts_each_leaf_once_and_skips_pinned(eviction: str) -> None:
    tier = Tier(eviction, 10)
    for number in range(10):
        assert tier.store(number)
    pinned = tier.index.pin([key(number) for number in (0, 1, 9)])
    for number in range(10, 17):
        assert tier.store(number)
        tier.index.pin([key(number)])
    assert sorted(tier.left) == list(range(2, 9))
    assert not tier.store(17), "all are in use"
    tier.index.unpin(pinned)
    assert tier.store(17)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_evicts_chain_from_tail(eviction: str) -> None:
    tier = Tier(eviction, 4)
    for number in range(4):
        tier.store(number, number - 1 if number else None)
    for number in range(10, 14):
        tier.store(number)
        tier.index.pin([key(number)])
    assert tier.left == [3, 2, 1, 0]


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_evicts_dead_sequence_first_and_from_its_tail(eviction: str) -> None:
    tier = Tier(eviction, 8)
    for number in range(6):
        tier.store(number)
    tier.store(10)
    tier.store(11, parent=10)
    for _ in range(2):
        for number in (*range(6), 11, 10):
            tier.use(number)
    tier.index.mark_dead([key(10), key(11), key(12)])  # the last one is not there
    tier.index.check()
    for number in range(20, 23):
        tier.store(number)
    assert tier.left[:2] == [11, 10]
    assert len(tier.left) == 3, "then the others"


def test_mark_dead_spares_what_another_sequence_continues() -> None:
    tier = Tier("lru", 5)
    for number, parent in ((0, None), (1, 0), (2, 1), (3, 1)):  # 2 and 3 both continue 1
        tier.store(number, parent)
    tier.store(9)
    tier.use(3)
    tier.index.mark_dead([key(0), key(1), key(2)])
    for number in (20, 21):
        tier.store(number)
    assert tier.left == [2, 9]
    assert tier.has(3)
    assert tier.has(1)


def test_mark_dead_counts_blocks_that_are_being_written() -> None:
    tier = Tier("lru", 3)
    slot = tier.index.reserve(key(0), None, 0)
    assert slot is not None
    tier.index.mark_dead([key(0)])
    tier.store(1)
    tier.store(2)
    tier.index.commit(slot)
    tier.store(3)
    assert tier.left == [0]


def test_blocks_that_die_twice_leave_in_the_order_of_their_last_death() -> None:
    tier = Tier("lru", 4)
    for number in range(4):
        tier.store(number)
    for number in (0, 1, 2, 0):
        tier.index.mark_dead([key(number)])
        tier.index.check()
    for number in range(20, 23):
        tier.store(number)
    assert tier.left == [1, 2, 0]


def test_dead_block_that_is_used_again_is_ordinary() -> None:
    tier = Tier("lru", 3)
    for number in range(3):
        tier.store(number)
    tier.index.mark_dead([key(2)])
    tier.use(2)
    tier.store(3)
    assert tier.left == [0]


def test_sequence_expected_later_than_others_are_evicted_goes_first() -> None:
    tier = Tier("lru", 3)
    for number in range(3):
        tier.seconds += 10
        tier.store(number)
    tier.index.expect_again([key(2)], 1000)
    tier.store(3)
    assert tier.left == [0], "nothing had been evicted, so that everything seemed to fit"
    tier.index.expect_again([key(2)], 15)  # the evicted block was kept for 20 seconds
    tier.store(4)
    assert tier.left == [0, 1]
    tier.index.expect_again([key(3)], 15)  # that one only for 10
    tier.store(5)
    assert tier.left == [0, 1, 3]


def test_dead_blocks_say_nothing_of_how_long_others_are_kept() -> None:
    tier = Tier("lru", 3)
    for number in range(3):
        tier.store(number)
    tier.seconds = 60
    tier.use(1)
    tier.index.mark_dead([key(1)])
    tier.store(3)
    tier.index.expect_again([key(3)], 30)
    tier.store(4)
    assert tier.left == [1, 0]


def test_time_that_stands_still_keeps_the_order_of_uses() -> None:
    tier = Tier("lru", 3)
    for number in range(3):
        tier.store(number)
    tier.use(0)
    for number in (3, 4, 5):
        tier.store(number)
    assert tier.left == [1, 2, 0]


_HANG_S = 10.0  # much more than needed, much less than one walk per block would take


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_evicts_dead_blocks_first_until_they_are_used(eviction: str) -> None:
    tier = Tier(eviction, 10)
    for number in range(10):
        assert tier.store(number)
    tier.use(6)
    tier.index.mark_dead([key(5), key(6), key(7), key(99)])
    tier.use(7)
    for number in range(10, 12):
        assert tier.store(number)
    assert sorted(tier.left) == [5, 6]
    assert tier.has(7)
    tier.index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_evicts_dead_chain_from_tail(eviction: str) -> None:
    tier = Tier(eviction, 6)
    assert tier.store(0)
    for number in range(1, 4):
        assert tier.store(number, number - 1)
    assert tier.store(10)
    assert tier.store(11)
    tier.index.mark_dead([key(number) for number in range(4)])
    for number in range(20, 23):
        assert tier.store(number)
    assert tier.left == [3, 2, 1]


def store_many(index: BlockIndex, numbers: range, size_class: int = 0) -> None:
    slots = index.reserve_all([key(n) for n in numbers], [None] * len(numbers), size_class)
    assert len(slots) == len(numbers)
    assert all(index.commit_all(slots))


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_policy_does_not_walk_pinned_blocks_repeatedly(eviction: str) -> None:
    index = BlockIndex(ArenaGeometry(60_000 * 64, (64,)), eviction)
    store_many(index, range(60_000))
    pinned = index.pin([key(n) for n in range(40_000)])
    begin = time.monotonic()
    store_many(index, range(60_000, 80_000))
    assert time.monotonic() - begin < _HANG_S
    index.check()
    assert all(index.are_readable([key(n) for n in range(40_000)]))
    index.unpin(pinned)
    index.check()
    store_many(index, range(80_000, 120_000))
    assert not any(index.are_readable([key(n) for n in range(40_000)])), "the coldest again"


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_index_does_not_search_slab_in_use_repeatedly(eviction: str) -> None:
    """The other class has the colder blocks, but one of them is pinned."""
    slab = 8192 * 64
    index = BlockIndex(SlabGeometry(2 * slab, slab, 64), eviction)
    other, own = index.add_class(64, b""), index.add_class(128, b"")
    store_many(index, range(8192), other)
    store_many(index, range(8192, 8192 + 4096), own)
    pinned = index.pin([key(0)])  # the last block that a search would reach
    begin = time.monotonic()
    for start in range(20_000, 60_000, 4096):
        store_many(index, range(start, start + 4096), own)
    assert time.monotonic() - begin < _HANG_S
    index.check()
    index.unpin(pinned)
    store_many(index, range(100_000, 100_000 + 8192), own)
    assert not any(index.are_readable([key(n) for n in range(8192)])), "the slab has moved"
    index.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_index_parked_block_keeps_place_in_chain(eviction: str) -> None:
    """The parked block gains and loses a successor, and is removed, outside of any policy."""
    tier = Tier(eviction, 3)
    for number in range(3):
        assert tier.store(number)
    pinned = tier.index.pin([key(0), key(1)])
    assert tier.store(3)  # walks past both
    assert tier.store(4, parent=0)
    tier.index.remove(key(4))
    tier.index.check()
    tier.index.remove(key(1))
    assert tier.store(5), "in the slot of the removed follower"
    tier.index.unpin(pinned)
    tier.index.check()
    assert tier.store(6), "in the slot that came back"
    assert tier.has(0)
    for number in (7, 8, 9):
        assert tier.store(number)
    assert not tier.has(0)


def test_lru_evicts_least_recently_used() -> None:
    tier = Tier("lru", 5)
    for number in range(5):
        tier.store(number)
    tier.use(0)
    tier.use(2)
    for number in range(10, 15):
        tier.store(number)
    assert tier.left == [1, 3, 4, 0, 2]


def test_lru_new_leaf_is_ordered_by_last_use() -> None:
    tier = Tier("lru", 5)
    for number in range(4):
        tier.store(number)
    tier.store(4, parent=0)
    tier.use(0)  # after 1, 2 and 3, while it has a successor
    tier.index.remove(key(4))
    for number in range(10, 15):
        tier.store(number)
    assert tier.left == [1, 2, 3, 0]


@pytest.mark.parametrize("seed", range(6))
def test_lru_matches_naive_model(seed: int) -> None:
    """The model evicts the least recently used of the unpinned blocks without successors."""
    rng = random.Random(seed)
    tier = Tier("lru", 16)
    parents: dict[int, int | None] = {}  # present blocks and their parents
    used: dict[int, int] = {}
    pins: dict[int, list[int]] = {}
    for now in range(3000):
        number = rng.randrange(60)
        action = rng.random()
        if action < 0.5 and number not in parents:
            parent = number // 3 if number >= 3 else None
            expected = None
            if len(parents) == 16:
                followed = {above for above in parents.values() if above in parents}
                leaving = [n for n in parents if n not in {*followed, *pins, parent}]
                expected = min(leaving, key=used.__getitem__, default=None)
                if expected is None:
                    assert not tier.store(number, parent)
                    continue
            tier.left.clear()
            assert tier.store(number, parent)
            assert tier.left == ([] if expected is None else [expected])
            if expected is not None:
                del parents[expected], used[expected]
            parents[number], used[number] = parent, now
        elif action < 0.75:
            tier.use(number)
            if number in parents:
                used[number] = now
        elif action < 0.85 and number in parents and number not in pins and len(pins) < 6:
            pins[number] = tier.index.pin([key(number)])
        elif action < 0.93 and pins:
            tier.index.unpin(pins.pop(rng.choice(sorted(pins))))
        elif action < 0.97:
            tier.index.mark_dead([key(number)])
            if number in parents and number not in parents.values():
                used[number] = now - 10_000  # before all uses
        elif number in parents and number not in pins:
            assert tier.index.remove(key(number))
            del parents[number], used[number]
        assert {n for n in range(60) if tier.has(n)} == set(parents)


def hit_rate(eviction: str, requests: list[int], capacity: int) -> float:
    tier = Tier(eviction, capacity)
    hits = 0
    for item in requests:
        if tier.has(item):
            hits += 1
            tier.use(item)
        else:
            tier.store(item)
    return hits / len(requests)


def test_s3fifo_keeps_working_set_during_scans() -> None:
    rng = random.Random(3)
    requests: list[int] = []
    fresh = 10_000
    for _ in range(40):
        requests += [rng.randrange(60) for _ in range(200)]  # the working set
        requests += range(fresh, fresh + 300)  # a scan of one-time prompts
        fresh += 300
    assert hit_rate("s3fifo", requests, 100) > hit_rate("lru", requests, 100) + 0.03


def test_s3fifo_ghost_enters_main_queue() -> None:
    """A block that returns soon after its eviction enters the main queue directly."""
    tier = Tier("s3fifo", 20)
    for number in range(21):
        tier.store(number)
    assert tier.left == [0]
    tier.store(0)
    for number in range(100, 130):
        tier.store(number)
    assert tier.has(0)
    assert not any(tier.has(number) for number in range(1, 21))
