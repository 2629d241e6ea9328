"""Recurrent layers (Mamba, linear attention) under vLLM's real schedulers, in "align" mode.

The toy model's recurrent layers keep one state: each step reads the state after the token before
its own, and checks it. vLLM keeps states at few boundaries, uses other blocks as scratch, and
clears or copies blocks before the forward; the toy model does the same.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.toy_asking import ask, assert_tier_is_right, keys_of, prompt, total, workload
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import EXPORTED_STATE, STATE, WrongRead
from tests.patience import in_turn
from vllm_tiered_kv.cache.planner import STATE_WINDOW
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import names

pytestmark = WITH_RECURRENT_STATES

SHAPES = {
    "hybrid": {"windows": (None, STATE)},
    "state_first": {"windows": (STATE, STATE, None)},
    "states_alone": {"windows": (STATE,)},
    "with_a_window": {"windows": (None, 10, STATE)},
    "exported": {"windows": (None, EXPORTED_STATE)},
    "fine_hashes": {"windows": (None, STATE), "hash_size": 2},
    "fine_and_exported": {"windows": (None, EXPORTED_STATE), "hash_size": 2},
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
# States alone tell nothing about a prefix that prompts share.
WITH_ATTENTION = pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=name) for name, shape in SHAPES.items() if None in shape["windows"]],
)
EVERY_RETENTION = pytest.mark.parametrize("retention", [0, 8, None], ids=["few", "some", "all"])


def found_on_gpu(engine: ToyEngine, ids: list[int]) -> int:
    """Tokens that vLLM's own prefix cache finds of a prompt."""
    params = SamplingParams(max_tokens=1)
    probe = Request("probe", list(ids), params, None, block_hasher=engine._hasher)
    return engine.scheduler.kv_cache_manager.get_computed_blocks(probe)[1]


def states_in_tier(engine: ToyEngine, request_id: str) -> list[int]:
    """The numbers of tokens after which the tier holds the state, of the first recurrent group."""
    group = next(group for group in engine.groups if group.is_recurrent)
    keys = keys_of(engine, request_id)[group.group_id]
    is_held = [engine.half.index.lookup(key) is Lookup.HIT for key in keys]
    return [(n + 1) * group.block_size for n, held in enumerate(is_held) if held]


def blocks_of_hit(engine: ToyEngine, end: int) -> int:
    """Blocks that a hit needs which ends there."""
    windows = [STATE_WINDOW if group.is_recurrent else group.window for group in engine.groups]
    first = [0 if window is None else max(0, end - window + 1) // 4 for window in windows]
    return sum(end // 4 - start for start in first)


@EVERY_SHAPE
def test_repeated_prompt_is_found_as_by_vllm_itself(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    retention = None if async_scheduling else 0
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=128, retention=retention, **shape)
    ids = prompt(random.Random(1), 75)
    first = ask(engine, ids)
    states = states_in_tier(engine, first)
    found = found_on_gpu(engine, ids)
    assert 72 <= found < 75
    engine.drop_gpu_cache()
    ask(engine, ids)
    end = max((end for end in states if end < 75), default=0)
    assert total(engine, names.HIT_TOKENS) == end
    assert total(engine, names.LOADED_BLOCKS) == (blocks_of_hit(engine, end) if end else 0)
    if "hash_size" not in shape or shape["windows"][-1] == STATE:
        assert end == 72
    # Otherwise vLLM keeps only the state after the last 74 tokens, within a block.
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@WITH_ATTENTION
def test_prefix_that_prompts_share_is_found_by_the_third(
    tiny_model: Path, async_scheduling: bool, shape: dict
) -> None:
    """The second prompt finds the blocks of full attention, but no state where it diverges: vLLM
    then keeps the state there, although its own cache holds nothing of the prefix."""
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=256, retention=0, **shape)
    rng = random.Random(2)
    stem = prompt(rng, 38)
    hits = []
    for _ in range(3):
        ids = stem + prompt(rng, 30)
        before = total(engine, names.HIT_TOKENS)
        request = ask(engine, ids)
        hits.append(total(engine, names.HIT_TOKENS) - before)
        engine.drop_gpu_cache()
    assert hits == [0, 0, 36]
    assert 36 in states_in_tier(engine, request)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@EVERY_RETENTION
def test_next_turn_is_found(
    tiny_model: Path, async_scheduling: bool, retention: int | None
) -> None:
    windows = (None, STATE)
    engine = ToyEngine(
        tiny_model, async_scheduling, windows=windows, cpu_blocks=256, retention=retention
    )
    ids = prompt(random.Random(3), 21)
    ask(engine, ids, 30)
    engine.drop_gpu_cache()
    ids += [*play(ids, 30)[0], 7, 8, 9]
    ask(engine, ids, 2)
    # By default vLLM keeps no state of an answer.
    assert total(engine, names.HIT_TOKENS) == {0: 20, 8: 48, None: 48}[retention]
    engine.drop_gpu_cache()
    ask(engine, ids, 2)
    assert total(engine, names.HIT_TOKENS) == {0: 20, 8: 48, None: 48}[retention] + 52
    engine.assert_at_rest()


def test_state_that_only_the_gpu_has_is_stored_again(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, windows=(None, STATE), cpu_blocks=128, retention=0
    )
    ids = prompt(random.Random(1), 75)
    request = ask(engine, ids)
    for key in keys_of(engine, request)[1]:
        engine.half.index.remove(key)
    assert not states_in_tier(engine, request)
    ask(engine, ids)
    assert states_in_tier(engine, request) == [72]
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) == 72
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def test_state_that_is_being_stored_is_waited_for(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most blocks of attention were stored before it, so that it alone is missing."""
    windows = (None, STATE)
    engine = ToyEngine(tiny_model, async_scheduling, windows=windows, cpu_blocks=128, retention=0)
    ids = prompt(random.Random(1), 75)
    first = engine.add(ids, 1)
    while engine.requests[first].num_computed_tokens < 64:
        engine.step()
    # The first chunks are stored by now, and the next ones are slow.
    polls = iter(range(20))
    monkeypatch.setattr(engine.copier, "_due", lambda queue: next(polls, None) is None)
    while first not in engine.finished:
        engine.step()
    assert engine.half.ledger.has_open_stores
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    assert total(engine, names.HIT_TOKENS) == 72
    engine.assert_at_rest()


def test_failed_load_starts_over(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, windows=(None, STATE), cpu_blocks=128, retention=0
    )
    ids = prompt(random.Random(1), 75)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.copier.fail_every = 1.0
    ask(engine, ids)
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.copier.fail_every = 0.0
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) >= 72
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "slow_on_v2": {"store_delay": 4},
    "lazy": {"store": "lazy", "lazy_window": 48},
    "verified": {"verify_fraction": 0.3},
}


@pytest.mark.parametrize(("shape", "options"), in_turn(SHAPES, OPTIONS))
def test_random_clients(
    tiny_model: Path, async_scheduling: bool, shape: dict, options: dict
) -> None:
    """Preemptions, aborts, resets, failed loads and late copies: no state is read that vLLM has
    overwritten, cleared, or never completed."""
    options = dict(options)
    store_delay = options.pop("store_delay", None)
    groups = len(shape["windows"])
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        second_runner=store_delay is not None,
        store_delay=store_delay,
        gpu_blocks=12 + 6 * groups if groups > 1 else 7,  # forces preemption
        cpu_blocks=30 * groups,  # forces eviction
        retention=[0, 8, None][len(options) % 3],
        extra_config=options,
        **shape,
    )
    engine.copier.fail_every = 0.05
    engine.copier.drop_stores = 0.1
    workload(engine, 5, 60)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert total(engine, names.LOADED_BLOCKS) > 0
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0


@EVERY_SHAPE
def test_checks_above_can_fail(tiny_model: Path, shape: dict) -> None:
    """Any flipped bit of a loaded state is a wrong read."""
    engine = ToyEngine(tiny_model, cpu_blocks=128, **shape)
    ids = prompt(random.Random(1), 75)
    request = ask(engine, ids)
    end = max(end for end in states_in_tier(engine, request) if end < 75)
    for group, keys in zip(engine.groups, keys_of(engine, request), strict=True):
        if group.is_recurrent:
            engine.arena[engine.half.index.slot_of(keys[end // 4 - 1]), 1, 2] ^= 1
    engine.drop_gpu_cache()
    with pytest.raises(WrongRead, match="reads a wrong state"):
        ask(engine, ids)
