"""`get_num_new_matched_tokens`: asked at any time, any number of times, or for nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.contract_engine import ContractEngine
from tests.engine.toy_asking import seeded_prompt
from vllm_tiered_kv.metrics import names


@pytest.mark.usefixtures("step_loads")
def test_asking_changes_nothing(tiny_model: Path) -> None:
    """Two engines live the same life, but one is asked over and over: they evict alike."""
    survivors = []
    for polls in (0, 7):
        engine = ContractEngine(tiny_model, cpu_blocks=40)
        for seed in range(4):
            engine.ask(seeded_prompt(seed, 30))
        engine.drop_gpu_cache()
        request_id = engine.add(seeded_prompt(0, 30), 4)
        request, half = engine.requests[request_id], engine.half
        before = _look(engine)
        for number in range(polls):
            tokens, _ = engine.scheduler.connector.get_num_new_matched_tokens(
                request, 8 if number % 2 else 0
            )
            assert tokens == (20 if number % 2 else 28)
            assert _look(engine) == before
        engine.abort(request_id)
        engine.run()
        assert not half.ledger._loads
        engine.ask(seeded_prompt(9, 60))  # pushes out the blocks unused for longest
        engine.assert_conforms()
        survivors.append({use.key for use in half.index.slots() if use.is_visible})
        assert half.recorder.total(names.EVICTED_BLOCKS)
    assert survivors[0] == survivors[1]


def _look(engine: ContractEngine) -> Any:
    half = engine.half
    return (
        sorted(use.slot for use in half.index.slots()),
        half.index.used_bytes,
        half.index.pinned_slots(),
        list(half.ledger._loads),
        half._next,
        half.has_pending_push_work(),
        half.recorder.total(names.HIT_TOKENS),
        half.recorder.total(names.MISS_TOKENS),
    )


@pytest.mark.usefixtures("step_loads")
def test_prompt_of_any_length_leaves_a_token_to_compute(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """At least the last token is left to compute, whichever way the load goes; and every whole
    block before it is found."""
    engine = ContractEngine(tiny_model, async_scheduling, cpu_blocks=64)
    ids = seeded_prompt(1, 24)
    engine.ask(ids, 1)
    for length in range(1, 25):
        engine.drop_gpu_cache()
        request_id = engine.ask(ids[:length], 1)
        answers = [tokens for name, tokens, _ in engine.calls.asked if name == request_id]
        assert answers[-1] == (length - 1) // 4 * 4, length
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_blocks_on_the_gpu_are_not_offered_again(tiny_model: Path, async_scheduling: bool) -> None:
    """The answer counts from the tokens vLLM has itself, and reaches just as far."""
    engine = ContractEngine(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=64)
    ids = seeded_prompt(1, 61)
    engine.ask(ids, 1)
    for known in (0, 4, 20, 60):
        engine.drop_gpu_cache()
        if known:
            engine.ask(ids[: known + 1], 1)  # brings its whole blocks back to the GPU
        request_id = engine.ask(ids, 1)
        answers = [tokens for name, tokens, _ in engine.calls.asked if name == request_id]
        assert answers[-1] == 60 - known
    engine.assert_conforms()


def test_request_that_must_not_read_the_cache_is_not_offered_any(tiny_model: Path) -> None:
    """vLLM marks requests whose prompt logprobs are wanted: all of the prompt is computed."""
    engine = ContractEngine(tiny_model)
    ids = seeded_prompt(1, 41)
    engine.ask(ids)
    engine.drop_gpu_cache()
    request_id = engine.add(ids, 4)
    engine.requests[request_id].skip_reading_prefix_cache = True
    engine.run()
    assert engine.calls.loads_of(request_id) == 0
    engine.assert_said(request_id, ids, 4)
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_prefix_with_a_hole_ends_at_the_hole(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ContractEngine(tiny_model, async_scheduling)
    rng = random.Random(4)
    ids = seeded_prompt(1, 41)
    first = engine.ask(ids)
    keys = engine.half._key_maker.keys_for(engine.requests[first])
    keys.extend(engine.requests[first], 40)
    for hole in rng.sample(range(10), 4):
        engine.drop_gpu_cache()
        engine.half.index.remove(keys.of_group[0][hole])
        request_id = engine.ask(ids)  # computes and stores what is missing
        answers = [tokens for name, tokens, _ in engine.calls.asked if name == request_id]
        assert answers[-1] == 4 * hole
    engine.assert_conforms()
