"""One contract for every policy, and what each promises beyond it."""

from __future__ import annotations

import random

import pytest

from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.eviction.base import EvictionPolicy
from vllm_tiered_kv.eviction.catalog import POLICIES, make_policy

ALL = sorted(POLICIES)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(17, "little"))


def evict_one(policy: EvictionPolicy, pinned: frozenset[int] = frozenset()) -> int | None:
    for slot in policy.candidates():
        if slot not in pinned:
            policy.forget(slot, key(slot), evicted=True)
            return slot
    return None


@pytest.mark.parametrize("name", ALL)
def test_every_leaf_is_offered_once_and_pins_are_passed_over(name: str) -> None:
    policy = make_policy(name, 20)
    for slot in range(10):
        policy.admit(slot, key(slot))
    assert sorted(policy.candidates()) == list(range(10))
    assert policy.leaves() == policy.slots() == set(range(10))
    pinned = frozenset({0, 1, 9})
    left = [evict_one(policy, pinned) for _ in range(8)]
    assert left[-1] is None
    assert set(left[:-1]) == set(range(2, 9))
    assert policy.slots() == set(pinned)


@pytest.mark.parametrize("name", ALL)
def test_shielded_slots_are_not_offered_until_they_are_leaves_again(name: str) -> None:
    policy = make_policy(name, 20)
    for slot in range(4):
        policy.admit(slot, key(slot))
        if slot:
            policy.shield(slot - 1)
    assert list(policy.candidates()) == [3]
    order = []
    for expected in (3, 2, 1, 0):
        order.append(evict_one(policy))
        if expected:
            policy.unshield(expected - 1)
    assert order == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ALL)
def test_random_use_never_loses_or_invents_a_slot(name: str) -> None:
    rng = random.Random(7)
    policy = make_policy(name, 50)
    present: set[int] = set()
    shielded: set[int] = set()
    for _ in range(5000):
        action = rng.random()
        if action < 0.3 and len(present) < 50:
            slot = rng.choice([s for s in range(50) if s not in present])
            policy.admit(slot, key(slot))
            present.add(slot)
        elif action < 0.6 and present:
            policy.touch(rng.choice(sorted(present)))
        elif action < 0.7 and present - shielded:
            slot = rng.choice(sorted(present - shielded))
            policy.shield(slot)
            shielded.add(slot)
        elif action < 0.8 and shielded:
            slot = shielded.pop()
            policy.unshield(slot)
        elif action < 0.9 and present:
            slot = rng.choice(sorted(present))
            policy.forget(slot, key(slot), evicted=False)
            present.discard(slot)
            shielded.discard(slot)
        else:
            gone = evict_one(policy, frozenset(rng.sample(range(50), 5)))
            if gone is not None:
                assert gone in present - shielded
                present.discard(gone)
        assert policy.slots() == present
        assert policy.leaves() == present - shielded


def test_lru_evicts_the_least_recently_used() -> None:
    policy = make_policy("lru", 10)
    for slot in range(5):
        policy.admit(slot, key(slot))
    policy.touch(0)
    policy.touch(2)
    assert [evict_one(policy) for _ in range(5)] == [1, 3, 4, 0, 2]


def test_lru_puts_a_new_leaf_where_its_last_use_belongs() -> None:
    policy = make_policy("lru", 10)
    for slot in range(4):
        policy.admit(slot, key(slot))
    policy.shield(0)
    policy.touch(0)  # used after 1, 2 and 3, while shielded
    policy.unshield(0)
    assert [evict_one(policy) for _ in range(4)] == [1, 2, 3, 0]


def hit_rate(name: str, requests: list[int], capacity: int) -> float:
    policy = make_policy(name, capacity)
    slot_of: dict[int, int] = {}
    item_in: dict[int, int] = {}
    free = list(range(capacity))
    hits = 0
    for item in requests:
        if item in slot_of:
            hits += 1
            policy.touch(slot_of[item])
            continue
        if not free:
            for slot in policy.candidates():
                policy.forget(slot, key(item_in[slot]), evicted=True)
                del slot_of[item_in.pop(slot)]
                free.append(slot)
                break
        slot = free.pop()
        policy.admit(slot, key(item))
        slot_of[item], item_in[slot] = slot, item
    return hits / len(requests)


def test_s3fifo_keeps_its_working_set_through_scans() -> None:
    rng = random.Random(3)
    requests: list[int] = []
    fresh = 10_000
    for _ in range(40):
        requests += [rng.randrange(60) for _ in range(200)]  # what is used again and again
        requests += range(fresh, fresh + 300)  # a scan of one-time prompts
        fresh += 300
    assert hit_rate("s3fifo", requests, 100) > hit_rate("lru", requests, 100) + 0.03
