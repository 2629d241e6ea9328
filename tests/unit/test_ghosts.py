"""Ghosts: what a tier knows of blocks it does not hold, against larger tiers that hold them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from vllm_tiered_kv.cache.ghosts import FACTORS, Ghosts
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.metrics.names import DropReason

BYTES = 64


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little") + b"\0")


class Tier:
    """An index that stores what it misses, with its ghosts."""

    def __init__(self, slots: int) -> None:
        self.ghosts = Ghosts(slots * BYTES, BYTES)
        geometry = ArenaGeometry(slots * BYTES, (BYTES,))
        self.index = BlockIndex(geometry, "lru", ghosts=self.ghosts)

    def store(self, keys: list[BlockKey]) -> None:
        self.index.touch(keys)
        plan = self.index.reserve_missing(keys, 0, len(keys), 0)
        self.index.commit_all(plan.slots)

    def ask(self, keys: list[BlockKey]) -> tuple[int, list[int]]:
        """Returns the blocks that are hit, and the distances of the evicted ones behind them."""
        hit = self.index.match_prefix(keys)
        run = self.ghosts.evicted_run(keys, hit, len(keys))
        self.store(keys)
        return hit, run


def test_ghosts_know_what_was_evicted_and_how_much_since() -> None:
    tier = Tier(4)
    for number in range(6):
        tier.store([key(number)])
    assert len(tier.ghosts) == 2
    assert tier.ghosts.find(key(9)) is None
    first, second = tier.ghosts.find(key(0)), tier.ghosts.find(key(1))
    assert first is not None
    assert second is not None
    assert (first.distance, second.distance) == (2 * BYTES, BYTES)
    assert first.reason is None
    assert 0 <= first.seconds_ago < 60
    assert tier.ghosts.evicted_run([key(0), key(1), key(2)], 0, 3) == [2 * BYTES, BYTES]


def test_ghosts_forget_a_block_that_comes_back() -> None:
    tier = Tier(4)
    for number in range(6):
        tier.store([key(number)])
    tier.store([key(1)])  # evicts the third
    assert tier.ghosts.find(key(1)) is None
    first = tier.ghosts.find(key(0))
    assert first is not None
    assert first.distance == 2 * BYTES  # itself and the third


def test_ghosts_reserved_slot_is_no_return_until_its_commit() -> None:
    tier = Tier(2)
    for number in range(3):
        tier.store([key(number)])
    slot = tier.index.reserve(key(0), None, 0)
    assert slot is not None
    assert tier.ghosts.find(key(0)) is not None
    tier.index.abort(slot)
    assert tier.ghosts.find(key(0)) is not None


def test_ghosts_clear_with_their_index() -> None:
    tier = Tier(2)
    for number in range(4):
        tier.store([key(number)])
    tier.ghosts.dropped(key(9), DropReason.RESET)
    tier.index.clear()
    assert len(tier.ghosts) == 0
    assert tier.ghosts.find(key(0)) is tier.ghosts.find(key(9)) is None


def test_ghosts_of_dropped_blocks_keep_the_reason_and_end_a_run() -> None:
    tier = Tier(2)
    for number in range(4):
        tier.store([key(number)])
    tier.ghosts.dropped(key(1), DropReason.TIER_FULL)
    found = tier.ghosts.find(key(1))
    assert found is not None
    assert (found.reason, found.distance) == (DropReason.TIER_FULL, 0)
    assert tier.ghosts.evicted_run([key(0), key(1)], 0, 2) == [BYTES]


def test_ghosts_know_whether_a_lower_tier_had_the_block() -> None:
    tier = Tier(2)
    tier.store([key(0)])
    tier.index.mark_sent([tier.index.slot_of(key(0))])
    for number in range(1, 5):
        tier.store([key(number)])
    first, second = tier.ghosts.find(key(0)), tier.ghosts.find(key(1))
    assert first is not None
    assert second is not None
    assert (first.was_sent, second.was_sent) == (True, False)
    assert (first.distance, first.reason) == (3 * BYTES, None)
    assert tier.ghosts.evicted_run([key(0), key(1)], 0, 2) == [3 * BYTES, 2 * BYTES]


def test_ghosts_are_bounded_and_forget_the_oldest() -> None:
    tier = Tier(4)
    for number in range(1000):
        tier.store([key(number)])
    assert len(tier.ghosts) == tier.ghosts.max == 2 * (FACTORS[-1] - 1) * 4
    assert tier.ghosts.find(key(1000 - 4 - tier.ghosts.max - 1)) is None
    oldest = tier.ghosts.find(key(1000 - 4 - tier.ghosts.max))
    assert oldest is not None
    assert oldest.distance == tier.ghosts.max * BYTES


@pytest.mark.parametrize("seed", range(3))
def test_ghosts_distance_counts_each_evicted_block_once(seed: int) -> None:
    """Against sets: what was evicted since, without what has come back."""
    rng = random.Random(seed)
    tier = Tier(8)
    gone: list[tuple[int, int]] = []  # blocks and the numbers of their last evictions, in order
    held: set[int] = set()
    evictions = 0
    for _ in range(2000):
        number = rng.randrange(40)
        tier.store([key(number)])
        now = {n for n in range(40) if tier.index.match_prefix([key(n)])}
        for n in (held | {number}) - now:
            evictions += 1
            gone.append((n, evictions))
        gone = [(n, at) for n, at in gone if n not in now and at > evictions - tier.ghosts.max]
        held = now
        for place, (n, _) in enumerate(gone):
            found = tier.ghosts.find(key(n))
            assert found is not None
            assert found.distance == (len(gone) - place) * BYTES
    assert len(gone) > 20


def conversations(seed: int, requests: int) -> Iterator[list[BlockKey]]:
    """Prompts of users who come back more or less often; each turn adds blocks to the last one."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    talks = [[key(0), *(key(next(fresh)) for _ in range(rng.randint(2, 20)))] for _ in range(150)]
    for _ in range(requests):
        talk = talks[min(int(rng.paretovariate(0.7)), len(talks)) - 1]
        if len(talk) > 60:
            del talk[1:]
        talk += (key(next(fresh)) for _ in range(rng.randint(0, 6)))
        yield list(talk)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("seed", range(3))
def test_ghosts_estimate_is_what_a_larger_tier_hits(seed: int, factor: int) -> None:
    slots = 200
    small, large = Tier(slots), Tier(factor * slots)
    extra = (factor - 1) * slots * BYTES
    estimated = hit_by_large = hit_by_small = 0
    for prompt in conversations(seed, 3000):
        hit, run = small.ask(prompt)
        saved = next((n for n, distance in enumerate(run) if distance > extra), len(run))
        hit_by_small += hit
        estimated += hit + saved
        hit_by_large += large.ask(prompt)[0]
    assert hit_by_large > 1.1 * hit_by_small, "the trace tells nothing"
    gain = hit_by_large - hit_by_small
    assert estimated - hit_by_small == pytest.approx(gain, rel=0.02)
