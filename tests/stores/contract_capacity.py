"""The contract of a BlockStore with exact capacity: stay within it, and evict tails first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import mostly_slow
from tests.stores.contract import (
    KIB,
    MIB,
    StoreCase,
    assert_holds,
    assert_lacks,
    chain_items,
    chain_keys,
    item,
    store_key,
)
from vllm_tiered_kv.core.store import BlockStore, PutResult

BLOCK = 16 * KIB


class CapacityContract:
    """Like StoreContract; skipped for stores whose capacity is only a target."""

    @pytest.fixture
    def small(self, case: StoreCase, tmp_path: Path) -> Iterator[BlockStore]:
        """Room for 64 blocks, or somewhat less where a block needs more than its payload."""
        if not case.exact_capacity:
            pytest.skip("its capacity is a target, not a limit")
        with case.open(tmp_path, MIB) as opened:
            yield opened

    def test_full_store_evicts_tails_of_old_chains(self, small: BlockStore) -> None:
        chains = [chain_keys(f"chain {at}", 20) for at in range(12)]
        for at, keys in enumerate(chains):
            assert set(small.put(chain_items(keys, BLOCK))) == {PutResult.STORED}
            assert small.match(keys) == 20
            assert 0 < small.usage().used_bytes <= small.usage().capacity_bytes <= MIB
            for earlier in chains[:at]:
                assert small.match(earlier) == sum(small.contains(earlier))
        assert 20 <= small.usage().blocks <= 64

    def test_put_chain_longer_than_store_keeps_its_head(self, small: BlockStore) -> None:
        keys = chain_keys("long", 150)
        results = small.put(chain_items(keys, BLOCK))
        count = results.count(PutResult.STORED)
        assert 0 < count <= 64
        assert results == [PutResult.STORED] * count + [PutResult.DROPPED] * (150 - count)
        assert small.match(keys) == sum(small.contains(keys)) == count
        assert small.usage().used_bytes <= small.usage().capacity_bytes

    def test_put_block_larger_than_store_is_dropped(self, small: BlockStore) -> None:
        kept = store_key("kept")
        small.put([item(kept)])
        assert small.put([item(store_key("huge"), 2 * MIB)]) == [PutResult.DROPPED]
        assert_lacks(small, store_key("huge"), 2 * MIB)
        assert_holds(small, kept, 4 * KIB)

    def test_eviction_keeps_used_blocks(self, small: BlockStore) -> None:
        used = chain_keys("used", 10)
        small.put(chain_items(used, BLOCK))
        for at in range(30):
            buffers = [memoryview(bytearray(BLOCK)) for _ in used]
            assert small.get(used, buffers) == [True] * 10
            small.put(chain_items(chain_keys(f"once {at}", 10), BLOCK))

    @pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
    def test_eviction_leaves_no_block_without_its_head(self, small: BlockStore, seed: int) -> None:
        rng = random.Random(seed)
        stems = [chain_keys(f"stem {at}", 3) for at in range(8)]
        branches = [(at, chain_keys(f"branch {at} {b}", 4)) for at in range(8) for b in range(5)]
        chains = [[*stems[at], *keys] for at, keys in branches]
        for _ in range(60):
            keys = rng.choice(chains)
            nbytes = BLOCK if keys[0] in (stems[0][0], stems[1][0]) else 5000
            small.put(chain_items(keys, nbytes))
            usage = small.usage()
            assert usage.used_bytes <= usage.capacity_bytes <= MIB
            for chain in chains:
                assert small.match(chain) == sum(small.contains(chain))
            small.get(keys[:3], [memoryview(bytearray(nbytes)) for _ in range(3)])
