"""Which blocks of a shared directory are removed, and in which order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.gc import (
    Candidate,
    coldest_part,
    removal_order,
)


@given(st.integers(0, 2**32))
def test_removal_order_puts_descendants_first(seed: int) -> None:
    rng = random.Random(seed)
    keys = [StoreKey(bytes([at])) for at in range(rng.randint(1, 30))]
    parents = {key: rng.choice([None, *keys[:at]]) for at, key in enumerate(keys)}
    blocks = [Candidate(key, rng.randint(0, 5), 10, 1) for key in keys]
    rng.shuffle(blocks)
    order = removal_order(blocks, parents)
    place = {ranked.block.key: at for at, ranked in enumerate(order)}
    assert len(place) == len(keys)
    assert all(place[p] > place[key] for key, p in parents.items() if p is not None)
    recencies = [ranked.recency_ns for ranked in order]
    assert recencies == sorted(recencies)
    assert removal_order(sorted(blocks, key=lambda b: b.key), parents) == order


def test_removal_order_with_cycle_ends() -> None:
    keys = [StoreKey(bytes([at])) for at in range(6)]
    parents: dict[StoreKey, StoreKey | None] = {
        key: keys[(at + 1) % 6] for at, key in enumerate(keys)
    }
    parents[keys[3]] = keys[3]
    order = removal_order([Candidate(key, 1, 10, 1) for key in keys], parents)
    assert {ranked.block.key for ranked in order} == set(keys)


def test_coldest_part_covers_bytes_expiry_and_margin() -> None:
    blocks = [Candidate(StoreKey(bytes([at])), at * 10, 100, 1) for at in range(20)]

    def part(free: int, expire: int, margin: int) -> int:
        shuffled = random.Random(1).sample(blocks, 20)
        chosen = coldest_part(shuffled, free, expire, margin)
        assert chosen == blocks[: len(chosen)]
        return len(chosen)

    assert part(0, -1, 100) == 0
    assert part(500, -1, 0) == 5
    assert part(401, -1, 0) == 5
    assert part(500, -1, 30) == 8
    assert part(0, 70, 0) == 7
    assert part(500, 70, 0) == 7
    assert part(10**6, -1, 0) == 20
