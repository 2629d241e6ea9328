"""One engine, everything fits: what is served, and that the oracle can fail."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.oracle import BLOCK, BLOCK_BYTES, COUNT, PROMPTS, Truth, assert_same
from tests.engine.real_engine import Answer, RealEngine, real_engine
from vllm_tiered_kv.metrics import names


def test_oracle_depends_on_the_cache(truth: Truth) -> None:
    answers, _ = truth
    assert len({answer.tokens for answer in answers}) == len(PROMPTS)
    assert np.std([lp for answer in answers for lp in answer.logprobs]) > 0.1


@pytest.fixture(scope="module")
def roomy(tiny_model: Path):
    """One engine for the tests that need nothing special: everything fits."""
    with real_engine(tiny_model, {"cpu_memory": "64MiB"}) as engine:
        yield engine


@pytest.fixture
def fresh(roomy: RealEngine) -> RealEngine:
    assert roomy.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    roomy.kv_bytes.clear()
    return roomy


def test_each_prompt_is_served_to_its_last_full_block(fresh: RealEngine, truth: Truth) -> None:
    for ids in PROMPTS:
        fresh.ask([ids], COUNT)
        fresh.drop_gpu_cache()
    for ids, expected in zip(PROMPTS, truth[0], strict=True):
        (answer,) = fresh.ask([ids], COUNT)
        assert answer.cached == (len(ids) - 1) // BLOCK * BLOCK
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
        fresh.drop_gpu_cache()
    assert fresh.total(names.DROPPED_BLOCKS) == 0
    fresh.assert_at_rest()


def test_planted_corruption_makes_the_comparison_fail(fresh: RealEngine, truth: Truth) -> None:
    ids, number = PROMPTS[0], 0
    fresh.ask([ids], COUNT)
    fresh.drop_gpu_cache()
    expected = ([truth[0][number]], truth[1])
    assert_same(fresh.ask([ids], COUNT), fresh, expected)
    fresh.drop_gpu_cache()
    (slot, *_), arena = (
        sorted(use.slot for use in fresh.half.index.slots()),
        fresh.worker_half.arena,
    )
    arena.bytes_at(slot * BLOCK_BYTES, BLOCK_BYTES)[:] ^= 0x55
    answers = fresh.ask([ids], COUNT)
    with pytest.raises(AssertionError, match="KV bytes"):
        assert_same([Answer(expected[0][0].tokens, expected[0][0].logprobs, 0)], fresh, expected)
    with pytest.raises(AssertionError, match=r"tokens of|logprobs of"):
        assert_same(answers, fresh, expected)


def test_next_turn_of_a_chat_finds_the_answer(fresh: RealEngine) -> None:
    (first,) = fresh.ask([PROMPTS[3]], 70)
    turn = [*PROMPTS[3], *first.tokens, 5, 6, 7]
    fresh.drop_gpu_cache()
    (second,) = fresh.ask([turn], COUNT)
    assert second.cached == (len(PROMPTS[3]) + 70 - 1) // BLOCK * BLOCK
    fresh.assert_at_rest()


def test_everything_at_once(fresh: RealEngine) -> None:
    cold = fresh.ask(PROMPTS, COUNT, together=True)
    fresh.drop_gpu_cache()
    loaded, early = fresh.total(names.LOADED_BLOCKS), fresh.total(names.EARLY_LOADS)
    warm = fresh.ask(PROMPTS, COUNT, together=True)
    assert [a.tokens for a in warm] == [a.tokens for a in cold]
    assert fresh.total(names.LOADED_BLOCKS) > loaded
    assert fresh.total(names.EARLY_LOADS) > early, "scheduler and worker share this process"
    fresh.assert_at_rest()


def test_batch_is_stored_without_steps_after_its_last_output(fresh: RealEngine) -> None:
    """`LLM.generate` in the engine's own process: prompts of several chunks, all at once."""
    prompts = [[3 + (7 * n + 11 * i * i) % 40 for i in range(608 + n)] for n in range(8)]
    cold = fresh.ask(prompts, 2, together=True)
    fresh.drop_gpu_cache()
    warm = fresh.ask(prompts, 2, together=True)
    assert [answer.cached for answer in warm] == [
        (len(ids) - 1) // BLOCK * BLOCK for ids in prompts
    ]
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    assert fresh.total(names.DROPPED_BLOCKS) == 0


def test_shared_prefix_is_computed_once(fresh: RealEngine, monkeypatch) -> None:
    """Prompts that take a part of each step, with `compute_once` in the requests' parameters."""
    prompts = [[3 + (13 * i * i) % 900 for i in range(600)] + [n, 5, 6] for n in range(100, 108)]
    monkeypatch.setattr(fresh.scheduler.scheduler_config, "long_prefill_token_threshold", 64)
    tokens, computed = {}, {}
    for is_on in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=COUNT,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"tiered_kv": {"compute_once": is_on}}},
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = fresh.llm.generate(inputs, params, use_tqdm=False)
        tokens[is_on] = [tuple(o.outputs[0].token_ids) for o in outputs]
        computed[is_on] = sum(len(ids) for ids in prompts) - sum(
            o.num_cached_tokens for o in outputs
        )
        assert fresh.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    assert tokens[True] == tokens[False]
    assert len(set(tokens[True])) > 1
    assert computed[True] <= len(prompts[0]) + len(prompts) * BLOCK * 2
    assert computed[False] > 2 * computed[True]
    assert fresh.total(names.SHARED_PREFIX_WAITS, "served") == len(prompts) - 1
    fresh.assert_at_rest()


def test_salts_are_kept_apart(fresh: RealEngine) -> None:
    before = fresh.total(names.HIT_TOKENS)
    for salt in ("alice", "bob"):
        fresh.ask([PROMPTS[5]], cache_salt=salt)
        fresh.drop_gpu_cache()
    assert fresh.total(names.HIT_TOKENS) == before
    fresh.ask([PROMPTS[5]], cache_salt="alice")
    assert fresh.total(names.HIT_TOKENS) == before + (len(PROMPTS[5]) - 1) // BLOCK * BLOCK


def test_controls_narrow_what_is_stored_and_loaded(fresh: RealEngine, truth: Truth) -> None:
    ids, expected = PROMPTS[0], truth[0][0]
    # Each step: what the request asks for, and the tokens that it finds in the tier.
    script: list[tuple[dict[str, object], int]] = [
        ({"store": False}, 0),
        ({"max_store_tokens": 3 * BLOCK + 5}, 0),
        ({"load": False, "store": False}, 0),
        ({"max_load_tokens": 2 * BLOCK + 1, "store": False}, 2 * BLOCK),
        ({"tiers": ["remote"], "store": False, "unknown": 1}, 0),
        ({}, 3 * BLOCK),
    ]
    for control, found in script:
        (answer,) = fresh.ask([ids], COUNT, control=control)
        assert answer.cached == found, control
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
        fresh.drop_gpu_cache()
    (answer,) = fresh.ask([ids], COUNT, control={"pin_seconds": 0.01, "session": "a"})
    assert answer.cached == (len(ids) - 1) // BLOCK * BLOCK
    time.sleep(0.02)
    fresh.ask([ids], COUNT, control={"session": "a", "session_ended": True})
    assert fresh.total(names.ENDED_BLOCKS) == (len(ids) + COUNT - 1) // BLOCK
    fresh.assert_at_rest()


def test_load_that_fails_is_recomputed(fresh: RealEngine, truth: Truth, monkeypatch) -> None:
    from vllm_tiered_kv.native import cpu as native

    def broken(*args, **kwargs):
        raise OSError("planted")

    fresh.ask([PROMPTS[0]], COUNT)
    fresh.drop_gpu_cache()
    failures = fresh.total(names.LOAD_FAILURES)
    with monkeypatch.context() as patch:
        patch.setattr(native, "scatter", broken)
        (answer,) = fresh.ask([PROMPTS[0]], COUNT)
    assert (answer.tokens, answer.logprobs) == (truth[0][0].tokens, truth[0][0].logprobs)
    assert fresh.total(names.LOAD_FAILURES) == failures + 1
    fresh.drop_gpu_cache()
    (answer,) = fresh.ask([PROMPTS[0]], COUNT)  # stored anew
    assert answer.cached == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK
    fresh.assert_at_rest()


def test_reset_of_the_connector_forgets_all(fresh: RealEngine) -> None:
    fresh.ask([PROMPTS[0]], COUNT)
    assert fresh.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    assert fresh.half.index.used_bytes == 0
    (answer,) = fresh.ask([PROMPTS[0]], COUNT)
    assert answer.cached == 0


def test_metrics_are_on_vllms_own_page(fresh: RealEngine) -> None:
    fresh.ask([PROMPTS[0]], COUNT)
    fresh.drop_gpu_cache()
    fresh.ask([PROMPTS[0]], COUNT)
    shown = {
        (metric.name, metric.labels.get("tier")): getattr(metric, "value", metric)
        for metric in fresh.llm.get_metrics()
        if metric.name.startswith("vllm:tiered_kv_")
    }
    for metric in (names.HIT_TOKENS, names.STORED_BLOCKS, names.LOADED_BYTES, names.USED_BYTES):
        assert shown[(metric.exposed_name, "cpu")] == fresh.total(metric)
    assert fresh.total(names.HIT_TOKENS) > 0
    assert shown[(names.LOAD_FAILURES.exposed_name, "remote")] == 0, "absent until first used"
    assert shown[(names.LOAD_SECONDS.exposed_name, "cpu")].count > 0
