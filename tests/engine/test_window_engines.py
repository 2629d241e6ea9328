"""Real engines with sliding windows and chunks: Mistral's, Gemma 3's, gpt-oss's and Llama 4's kinds
of layers.

What the tier serves must be what vLLM's own cache serves: the same number of tokens found, then the
same tokens and logprobs, bit by bit, since both compute the same rest of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine import window_models
from tests.engine.oracle import BLOCK, COUNT
from tests.engine.real_engine import RealEngine, real_engine
from tests.engine.window_oracle import (
    MODELS,
    PROMPTS,
    found_by_vllm,
    model_folder,
    needed_blocks,
)
from tests.patience import mostly_slow
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=mostly_slow(list(MODELS), 2))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    folder = model_folder(tmp_path_factory.mktemp("models"), request.param)
    with real_engine(folder, {"cpu_memory": "64MiB"}) as running:
        assert any(group.window == window_models.WINDOW for group in running.half._groups)
        running.assert_bytes_as_computed_from(folder)
        yield running


@pytest.fixture
def fresh(engine: RealEngine) -> RealEngine:
    assert engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    return engine


def test_each_prompt_is_found_as_by_vllm_itself(fresh: RealEngine) -> None:
    expected = found_by_vllm(fresh)
    assert len({answer.tokens for answer in expected}) == len(PROMPTS)
    loaded = fresh.total(names.LOADED_BLOCKS)
    for ids, right in zip(PROMPTS, expected, strict=True):
        (answer,) = fresh.ask([ids], COUNT)
        assert answer == right
        assert answer.cached == (len(ids) - 1) // BLOCK * BLOCK
        loaded += needed_blocks(fresh, answer.cached)
        assert fresh.total(names.LOADED_BLOCKS) == loaded
        fresh.drop_gpu_cache()
    fresh.assert_at_rest()


def test_prefix_is_found_wherever_prompts_part(fresh: RealEngine) -> None:
    """The window at that point was passed long before the first prompt ended."""
    long = PROMPTS[-1]
    fresh.ask([long], COUNT)
    for shared in (140, 500):
        ids = long[:shared] + PROMPTS[0][:50]
        fresh.drop_gpu_cache()
        fresh.ask([long], COUNT)
        (right,) = fresh.ask([ids], COUNT)  # parts from what the GPU has
        fresh.drop_gpu_cache()
        before = fresh.total(names.HIT_TOKENS)
        (answer,) = fresh.ask([ids], COUNT)
        assert fresh.total(names.HIT_TOKENS) - before >= shared // BLOCK * BLOCK
        assert answer.tokens == right.tokens
    fresh.assert_at_rest()


def test_next_turn_finds_the_answer(fresh: RealEngine) -> None:
    (first,) = fresh.ask([PROMPTS[1]], 70)
    fresh.drop_gpu_cache()
    (second,) = fresh.ask([[*PROMPTS[1], *first.tokens, 5, 6, 7]], COUNT)
    assert second.cached == (len(PROMPTS[1]) + 70 - 1) // BLOCK * BLOCK
    fresh.assert_at_rest()


def test_all_at_once(fresh: RealEngine) -> None:
    cold = fresh.ask(PROMPTS, COUNT, together=True)
    fresh.drop_gpu_cache()
    warm = fresh.ask(PROMPTS, COUNT, together=True)
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    fresh.assert_at_rest()


def test_planted_corruption_is_seen(fresh: RealEngine) -> None:
    expected = found_by_vllm(fresh)
    arena = fresh.worker_half.arena
    arena.bytes_at(0, arena.nbytes)[:] ^= 0x15
    for ids, right in zip(PROMPTS, expected, strict=True):
        (answer,) = fresh.ask([ids], COUNT)
        assert answer.cached == right.cached
        assert answer.logprobs != right.logprobs
        fresh.drop_gpu_cache()
