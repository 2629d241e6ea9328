"""Sliding windows and hybrids under vLLM's real schedulers: what is stored, found and loaded.

The toy model reads of each group what its window reaches and no more, and checks all of it. Blocks
of different groups share memory, as in vLLM, so a block of the wrong group is a wrong read.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.toy_asking import (
    ask,
    assert_tier_is_right,
    keys_of,
    prompt,
    total,
    workload,
)
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import WrongRead
from tests.engine.window_shapes import EVERY_SHAPE, SHAPES, window_blocks
from tests.patience import in_turn
from vllm_tiered_kv.cache.cost_model import Choice
from vllm_tiered_kv.metrics import names


@EVERY_SHAPE
def test_repeated_prompt_loads_what_its_windows_reach(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=128, **shape)
    ids = prompt(random.Random(1), 75)
    end = 74 // engine.alignment * engine.alignment
    ask(engine, ids)
    engine.drop_gpu_cache()
    request = ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == end
    assert total(engine, names.LOADED_BLOCKS) == window_blocks(engine, end)
    assert engine.reported_loads == [request]
    assert engine.copier.ahead_blocks == 0
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@EVERY_SHAPE
def test_shared_prefix_partly_on_the_gpu_is_found(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    """Prefixes of every length: each ends in another window, far inside what was stored."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=160, cpu_blocks=256, **shape)
    rng = random.Random(2)
    ids = prompt(rng, 75)
    ask(engine, ids)
    for length in range(1, 75, 7):
        engine.drop_gpu_cache()
        for shorter in (length // 2, length):
            before = total(engine, names.HIT_TOKENS), total(engine, names.LOADED_BLOCKS)
            ask(engine, ids[:shorter] + prompt(rng, 5))
            end = min(shorter + 4, 74) // engine.alignment * engine.alignment
            shared = shorter // engine.alignment * engine.alignment
            assert shared <= end
            if shorter == length // 2:
                assert total(engine, names.HIT_TOKENS) - before[0] == shared
                needed = window_blocks(engine, shared) if shared else 0
                assert total(engine, names.LOADED_BLOCKS) - before[1] == needed
        engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@EVERY_SHAPE
def test_next_turn_finds_what_was_generated(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    for count in (1, 2, 11, 24, 39):
        engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=128, **shape)
        ids = prompt(random.Random(count), 9)
        ask(engine, ids, count)
        engine.drop_gpu_cache()
        ask(engine, ids + play(ids, count)[0] + [7, 8, 9, 10, 11, 12, 13, 14, 15])
        end = (9 + count - 1) // engine.alignment * engine.alignment
        assert total(engine, names.HIT_TOKENS) == end, count
        engine.assert_at_rest()


def test_missing_window_ends_the_hit_before_it(tiny_model: Path) -> None:
    """The full group has everything; the hit ends where the last whole window does."""
    engine = ToyEngine(tiny_model, windows=(None, 10), cpu_blocks=128)
    ids = prompt(random.Random(1), 75)
    _, keys = keys_of(engine, ask(engine, ids, 1))
    for position in (17, 14, 9, 6):
        engine.half.index.remove(keys[position])
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    # Windows of three blocks: 15 and 16 are too few, 10 to 13 is where one fits.
    assert total(engine, names.HIT_TOKENS) == 56
    assert total(engine, names.LOADED_BLOCKS) == 14 + 3
    engine.assert_at_rest()


def test_load_that_is_cut_short_ends_in_another_window(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the rest would be faster: where the load then ends, a window must be whole."""
    engine = ToyEngine(tiny_model, windows=(None, 10), cpu_blocks=128)
    ids = prompt(random.Random(1), 75)
    _, keys = keys_of(engine, ask(engine, ids, 1))
    engine.half.index.remove(keys[9])
    engine.drop_gpu_cache()
    choose = engine.half.load_policy.choose

    def choose_less(*asked: object) -> Choice:
        return replace(choose(*asked), tokens=40)

    monkeypatch.setattr(engine.half.load_policy, "choose", choose_less)
    ask(engine, ids, 1)
    assert total(engine, names.HIT_TOKENS) == 36
    assert total(engine, names.LOADED_BLOCKS) == 9 + 3
    engine.assert_at_rest()


def test_failed_load_starts_over_from_what_the_gpu_has(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, windows=(None, 10), cpu_blocks=128)
    rng = random.Random(1)
    ids = prompt(rng, 75)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids[:30] + prompt(rng, 3))
    engine.copier.fail_every = 1.0
    ask(engine, ids)
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.copier.fail_every = 0.0
    engine.drop_gpu_cache()
    ask(engine, ids)  # stored anew by the recomputation
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_blocks_that_a_window_passes_before_they_are_read_are_stored(
    tiny_model: Path, async_scheduling: bool, policy: str
) -> None:
    """The window passes over blocks, and others are computed into them before they are read."""
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        windows=(None, 10),
        gpu_blocks=128,
        cpu_blocks=128,
        max_tokens_per_step=32,
        store_delay=12,
        extra_config={"store": policy, "lazy_window": 128},
    )
    ids = prompt(random.Random(1), 121)
    ask(engine, ids, 1)
    if policy == "lazy":  # stored only when the pool is about to reuse them
        for _ in range(8):
            ask(engine, prompt(random.Random(2), 20), 4)
    else:
        assert total(engine, names.STORED_BLOCKS) == 60
        assert total(engine, names.DROPPED_BLOCKS) == 0
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    assert total(engine, names.HIT_TOKENS) == 120
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


OPTIONS: dict[str, dict] = {
    "lru": {},
    "slow": {"store_delay": 4},
    "lazy": {"store": "lazy", "lazy_window": 48},
    "s3fifo": {"eviction": "s3fifo"},
}


@pytest.mark.parametrize(("shape", "options"), in_turn(SHAPES, OPTIONS))
def test_random_clients(
    tiny_model: Path, async_scheduling: bool, shape: dict, options: dict
) -> None:
    options = dict(options)
    groups = len(shape["windows"])
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        store_delay=options.pop("store_delay", None),
        gpu_blocks=18 * groups,  # forces preemption
        cpu_blocks=36 * groups,  # forces eviction
        extra_config=options,
        **shape,
    )
    engine.copier.fail_every = 0.05
    engine.copier.drop_stores = 0.1
    workload(engine, 5, 90)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert total(engine, names.LOADED_BLOCKS) > 0
    preempted = sum(r.num_preemptions for r in engine.requests.values())
    assert preempted > 0 or "max_tokens_per_step" in shape  # small steps hold few blocks


@EVERY_SHAPE
def test_random_clients_without_the_gpu_prefix_cache(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, gpu_blocks=120, cpu_blocks=60, prefix_caching=False, **shape
    )
    workload(engine, 3, 60)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert total(engine, names.LOADED_BLOCKS) > 0


def test_engines_with_other_windows_share_nothing(tiny_model: Path) -> None:
    namespaces = {
        ToyEngine(tiny_model, windows=windows).half._key_maker._namespace
        for windows in ((None,), (10,), (11,), (None, 10), (10, None))
    }
    assert len(namespaces) == 5


@EVERY_SHAPE
def test_checks_above_can_fail(tiny_model: Path, shape: dict) -> None:
    """Any flipped bit of what is loaded is a wrong read."""
    engine = ToyEngine(tiny_model, cpu_blocks=128, **shape)
    ids = prompt(random.Random(1), 75)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.arena[:, 1, 2] ^= 1
    with pytest.raises(WrongRead):
        ask(engine, ids)
