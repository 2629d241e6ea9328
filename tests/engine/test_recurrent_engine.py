"""A real engine with recurrent layers beside full attention (Qwen3-Next's kind of layers).

What the tier serves must be what vLLM's own cache serves: the same number of tokens found, then the
same tokens and logprobs, bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.engine import window_models
from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.real_engine import RealEngine, real_engine
from vllm_tiered_kv.cache.planner import Group
from vllm_tiered_kv.metrics import names

pytestmark = [pytest.mark.engine, WITH_RECURRENT_STATES]

COUNT = 4


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in (200, 500, 900)]


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    model = window_models.write(tmp_path_factory.mktemp("model"), window_models.QWEN3_NEXT)
    options = {"cpu_memory": "64MiB", "verify_fraction": 1e-12}  # verifies if a test says so
    with real_engine(model, options, dtype="bfloat16") as running:
        assert [group.is_recurrent for group in running.half._groups].count(True) == 3
        assert len({group.block_size for group in running.half._groups}) == 1
        running.assert_bytes_as_computed_from(model)
        yield running


@pytest.fixture(scope="module")
def block(engine: RealEngine) -> int:
    """vLLM chooses it so that a block of attention is as large as a state, whose size depends on
    the instructions that the CPU has."""
    size = engine.half._groups[0].block_size
    assert 32 < size < min(len(ids) for ids in PROMPTS)
    return size


def end_of_hit(tokens: int, block: int) -> int:
    return (tokens - 1) // block * block


@pytest.fixture
def fresh(engine: RealEngine) -> RealEngine:
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_each_prompt_is_found_as_by_vllm_itself(fresh: RealEngine, block: int) -> None:
    loaded = fresh.total(names.LOADED_BLOCKS)
    for ids in PROMPTS:
        (cold,) = fresh.ask([ids], COUNT)
        (right,) = fresh.ask([ids], COUNT)
        assert (cold.cached, right.cached) == (0, end_of_hit(len(ids), block))
        fresh.drop_gpu_cache()
        (answer,) = fresh.ask([ids], COUNT)
        assert answer == right
        assert answer.tokens == cold.tokens
        loaded += right.cached // block + 3  # a state of each recurrent layer
        assert fresh.total(names.LOADED_BLOCKS) == loaded
    fresh.assert_at_rest()


def test_prefix_that_prompts_share_is_found_by_the_third(fresh: RealEngine, block: int) -> None:
    stem, rng = PROMPTS[2][:500], random.Random(6)
    hits = []
    for _ in range(3):
        ids = stem + [rng.randrange(3, 1000) for _ in range(200)]
        (answer,) = fresh.ask([ids], COUNT)
        hits.append(answer.cached)
        fresh.drop_gpu_cache()
    assert hits == [0, 0, end_of_hit(len(stem) + 1, block)]
    assert fresh.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    (cold,) = fresh.ask([ids], COUNT)
    assert cold.tokens == answer.tokens
    fresh.assert_at_rest()


def test_all_at_once(fresh: RealEngine, block: int) -> None:
    cold = fresh.ask(PROMPTS, COUNT, together=True)
    fresh.drop_gpu_cache()
    warm = fresh.ask(PROMPTS, COUNT, together=True)
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert [answer.cached for answer in warm] == [end_of_hit(len(ids), block) for ids in PROMPTS]
    fresh.assert_at_rest()


def test_planted_corruption_of_a_state_is_seen(fresh: RealEngine) -> None:
    """Of one layer's state at a time; what attention reads stays right."""
    ids = PROMPTS[1]
    fresh.ask([ids], COUNT)
    (right,) = fresh.ask([ids], COUNT)
    for group in fresh.half._groups:
        if not group.is_recurrent:
            continue
        state = state_in_tier(fresh, group, ids[: right.cached])
        state[:] ^= 0x15
        fresh.drop_gpu_cache()
        (answer,) = fresh.ask([ids], COUNT)
        assert answer.cached == right.cached
        assert answer.logprobs != right.logprobs
        state[:] ^= 0x15
    fresh.drop_gpu_cache()
    assert fresh.ask([ids], COUNT) == [right]


def test_verification_compares_states(
    fresh: RealEngine, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = PROMPTS[1]
    hit = end_of_hit(len(ids), block)
    count = hit // block + 3  # blocks of attention, and the states of three layers
    fresh.ask([ids], COUNT)
    verification = fresh.half.verification
    monkeypatch.setattr(verification, "selects", lambda state: not state.verification.has_begun)
    counted = [names.VERIFIED_BLOCKS, names.DIFFERING_BLOCKS, names.UNVERIFIED_BLOCKS]

    def verified() -> list[float]:
        before = [fresh.total(each) for each in counted]
        fresh.drop_gpu_cache()
        fresh.ask([ids], COUNT)
        fresh.settle()
        return [fresh.total(each) - was for each, was in zip(counted, before, strict=True)]

    assert verified() == [count, 0, 0]
    (group, *_) = (group for group in fresh.half._groups if group.is_recurrent)
    state_in_tier(fresh, group, ids[:hit])[:] ^= 0x15
    assert verified() == [count, 1, 0]
    assert verified() == [0, 0, 0]  # without it there is no hit
    assert verified() == [count, 0, 0]  # it was stored again
    fresh.assert_at_rest()


def state_in_tier(engine: RealEngine, group: Group, ids: list[int]) -> np.ndarray:
    """The bytes of a recurrent layer's state in the CPU tier, after these tokens without those that
    draft layers read ahead."""
    half = engine.half
    request = Request("probe", ids, SamplingParams(max_tokens=1), None)
    keys = half._key_maker.keys_for(request)
    keys.extend(request, len(ids))
    slot = half.index.slot_of(keys.of_group[group.group_id][-1])
    (offset,) = half.index.geometry.offsets(np.array([slot]), group.size_class)
    return engine.worker_half.arena.bytes_at(int(offset), group.block_bytes)
