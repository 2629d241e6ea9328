"""Recurrent layers with speculative decoding under vLLM's real schedulers, in "align" mode.

A step computes one state for each draft before it is known which drafts are accepted. The tier must
store only the state after a block of accepted tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.test_recurrent import blocks_of_hit, found_on_gpu, states_in_tier
from tests.engine.toy_asking import ask, assert_tier_is_right, keys_of, prompt, total, workload
from tests.engine.toy_engine import play
from tests.engine.toy_groups import EXPORTED_STATE, STATE, WrongRead
from tests.engine.toy_speculation import DraftingToyEngine, SpeculatingToyEngine
from tests.patience import in_turn
from vllm_tiered_kv.metrics import names

pytestmark = WITH_RECURRENT_STATES

ENGINES = {"ngram": SpeculatingToyEngine, "eagle": DraftingToyEngine}
EVERY_ENGINE = pytest.mark.parametrize("make", ENGINES.values(), ids=list(ENGINES))
SHAPES: dict[str, dict[str, Any]] = {
    "hybrid": {"windows": (None, STATE)},
    "state_first": {"windows": (STATE, STATE, None)},
    "with_a_window": {"windows": (None, 10, STATE)},
    "exported": {"windows": (None, EXPORTED_STATE)},
    "fine_hashes": {"windows": (None, STATE), "hash_size": 2},
    "fine_and_exported": {"windows": (None, EXPORTED_STATE), "hash_size": 2},
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
"""All have attention: vLLM keeps no states of drafts in models without."""


def drops_last_block(engine: SpeculatingToyEngine) -> bool:
    return engine.scheduler.use_eagle_block_drop


def states_on_gpu(engine: SpeculatingToyEngine, request_id: str) -> list[int]:
    """The numbers of tokens after which vLLM's own cache holds the state."""
    hashes = engine.requests[request_id].block_hashes
    pool = engine.scheduler.kv_cache_manager.block_pool
    return [4 * n for n, each in enumerate(hashes, 1) if pool.get_cached_block(each, [1])]


@EVERY_ENGINE
@EVERY_SHAPE
def test_repeated_prompt_is_found_as_by_vllm_itself(
    tiny_model: Path, async_scheduling: bool, make: type[SpeculatingToyEngine], shape: dict
) -> None:
    engine = make(tiny_model, async_scheduling, cpu_blocks=128, retention=0, **shape)
    ids = prompt(random.Random(1), 75)
    first = ask(engine, ids)
    states = states_in_tier(engine, first)
    found = found_on_gpu(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids)
    limit = 72 - 4 * drops_last_block(engine)
    end = max((end for end in states if end <= limit), default=0)
    assert total(engine, names.HIT_TOKENS) == end
    assert total(engine, names.LOADED_BLOCKS) == (blocks_of_hit(engine, end) if end else 0)
    if "hash_size" not in shape:
        # Otherwise vLLM keeps the only state within a block, or a hash unit before the last one.
        assert end == found == limit
    engine.assert_at_rest()


@EVERY_ENGINE
@pytest.mark.parametrize("retention", [0, 8, None], ids=["few", "some", "all"])
def test_next_turn_is_found(
    tiny_model: Path,
    async_scheduling: bool,
    make: type[SpeculatingToyEngine],
    retention: int | None,
) -> None:
    """The states of answers come from steps with drafts."""
    windows = (None, STATE)
    engine = make(
        tiny_model, async_scheduling, windows=windows, cpu_blocks=256, retention=retention
    )
    ids = prompt(random.Random(3), 21)
    dropped = 4 * drops_last_block(engine)
    request = ask(engine, ids, 60)
    assert engine.accepted > 0
    assert engine.rejected > 0
    states = states_in_tier(engine, request)
    # The blocks of the last steps are not stored if vLLM clears blocks.
    last = 80 - (8 if async_scheduling else dropped)
    assert {end for end in states_on_gpu(engine, request) if end <= last} <= set(states)
    if retention != 0:
        assert sum(end > 21 for end in states) > 30 / (retention or 4)
    engine.drop_gpu_cache()
    ids += [*play(ids, 60)[0], 7, 8]
    ask(engine, ids, 2)
    # By default vLLM keeps no state of an answer.
    hit = total(engine, names.HIT_TOKENS)
    assert hit == max(end for end in states if end <= 80 - dropped)
    assert hit >= last - dropped - 4 if retention != 0 else hit == 20 - dropped
    engine.drop_gpu_cache()
    ask(engine, ids, 2)
    assert total(engine, names.HIT_TOKENS) == hit + 80 - dropped
    engine.assert_at_rest()


@EVERY_ENGINE
def test_prefix_that_prompts_share_is_found_by_the_third(
    tiny_model: Path, async_scheduling: bool, make: type[SpeculatingToyEngine]
) -> None:
    """On the GPU and in the tier alike: the state is kept where vLLM's own hit can end."""
    engine = make(tiny_model, async_scheduling, windows=(None, STATE), cpu_blocks=256, retention=0)
    rng = random.Random(2)
    stem = prompt(rng, 38)
    end = 36 - 4 * drops_last_block(engine)
    hits = []
    for _ in range(3):
        ids = stem + prompt(rng, 30)
        before = total(engine, names.HIT_TOKENS)
        request = ask(engine, ids)
        hits.append(total(engine, names.HIT_TOKENS) - before)
        if len(hits) < 3:
            on_gpu = found_on_gpu(engine, stem + prompt(rng, 30))
            assert on_gpu == (end if len(hits) == 2 else 0)
        engine.drop_gpu_cache()
    assert hits == [0, 0, end]
    assert end in states_in_tier(engine, request)
    engine.assert_at_rest()


OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "slow_on_v2": {"store_delay": 4},
    "lazy": {"store": "lazy", "lazy_window": 48},
}


@EVERY_ENGINE
@pytest.mark.parametrize(("shape", "options"), in_turn(SHAPES, OPTIONS))
def test_random_clients(
    tiny_model: Path,
    async_scheduling: bool,
    make: type[SpeculatingToyEngine],
    shape: dict,
    options: dict,
) -> None:
    """Preemptions, aborts, resets, failed loads and late copies: no state is read or stored that
    is another draft's, or that vLLM has overwritten or cleared."""
    options = dict(options)
    store_delay = options.pop("store_delay", None)
    groups = len(shape["windows"])
    engine = make(
        tiny_model,
        async_scheduling,
        second_runner=store_delay is not None,
        store_delay=store_delay,
        gpu_blocks=20 + 8 * groups,  # forces preemption
        cpu_blocks=30 * groups,  # forces eviction
        retention=[0, 8, None][len(options) % 3],
        prefix_caching=True,
        extra_config=options,
        **shape,
    )
    engine.copier.fail_every = 0.05
    engine.copier.drop_stores = 0.1
    workload(engine, 5, 60)
    engine.assert_at_rest()
    if make is SpeculatingToyEngine:
        assert assert_tier_is_right(engine)
    assert min(engine.accepted, engine.rejected, total(engine, names.LOADED_BLOCKS)) > 0
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0


@EVERY_ENGINE
def test_checks_above_can_fail(tiny_model: Path, make: type[SpeculatingToyEngine]) -> None:
    """Any flipped bit of a loaded state is a wrong read."""
    engine = make(tiny_model, cpu_blocks=128, windows=(None, STATE))
    ids = prompt(random.Random(1), 75)
    request = ask(engine, ids)
    end = max(end for end in states_in_tier(engine, request) if end < 75)
    engine.arena[engine.half.index.slot_of(keys_of(engine, request)[1][end // 4 - 1]), 1, 2] ^= 1
    engine.drop_gpu_cache()
    with pytest.raises(WrongRead, match="reads a wrong state"):
        ask(engine, ids)
