"""One request computes what several share, under vLLM's real schedulers.

Two situations in which vLLM alone lets each of them compute it: a limit of tokens per prompt and
step, and a prefix that all of them load beside the steps before they compute the rest.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import STATE
from tests.patience import mostly_slow
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics import names

K = 16
LENGTH = 401
LOADED = 200
CHUNKS = {"long_prefill_token_threshold": 16}
HIT_SIZES = {(None,): 4, (None, 16): 4, (None, STATE): 16}
"""A follower continues at a full block; with recurrent layers, where a chunk ended."""


class CountingEngine(ToyEngine):
    """Counts the tokens that it computes. Answers have one token, which costs nothing more."""

    computed = 0

    def _execute(self, output: Any) -> Any:
        self.computed += output.total_num_scheduled_tokens
        return super()._execute(output)


def engine_of(model: Path, async_scheduling: bool, **facts: Any) -> CountingEngine:
    facts = {"gpu_blocks": 2400, "cpu_blocks": 1000, "max_tokens_per_step": 64, **facts}
    options = {"compute_once": True, **facts.pop("extra_config", {})}
    return CountingEngine(model, async_scheduling, max_seqs=32, extra_config=options, **facts)


def prompts(shared: int, own: int) -> list[list[int]]:
    rng = random.Random(1)
    stem = prompt(rng, shared)
    return [stem + prompt(rng, own) for _ in range(K)]


def ask_together(engine: ToyEngine, asked: list[list[int]]) -> list[str]:
    requests = [engine.add(ids, 1) for ids in asked]
    engine.run()
    for request, ids in zip(requests, asked, strict=True):
        assert engine.finished[request].tokens == play(ids, 1)[0]
    engine.assert_at_rest()
    return requests


def outcomes(engine: ToyEngine) -> dict[str, float]:
    samples = engine.half.recorder.samples(names.SHARED_PREFIX_WAITS)
    return {labels[0]: count for labels, count in samples.items()}


@pytest.mark.parametrize("own", [0, 30], ids=["identical", "suffixes"])
@pytest.mark.parametrize("windows", HIT_SIZES, ids=str)
def test_prompts_limited_per_step_are_computed_once(
    tiny_model: Path, async_scheduling: bool, windows: tuple[int | None, ...], own: int
) -> None:
    engine = engine_of(tiny_model, async_scheduling, windows=windows, engine_args=CHUNKS)
    ask_together(engine, prompts(LENGTH, own))
    # Every follower computes what comes after the last full block that it shares.
    assert engine.computed <= LENGTH + own + (K - 1) * (own + 1 + HIT_SIZES[windows])
    assert sum(outcomes(engine).values()) >= K - 2
    assert total(engine, names.SHARED_PREFIX_TOKENS) > 0.9 * (K - 2) * LENGTH


def test_last_part_of_a_prompt_is_computed_once(tiny_model: Path, async_scheduling: bool) -> None:
    """Followers find what vLLM has planned for the leader in the same step; the rest is as large as
    the leader's part of a step."""
    part, length = 64, 384
    chunks = {"long_prefill_token_threshold": part}
    steps = {"max_tokens_per_step": 4 * part, "engine_args": chunks}
    engine = engine_of(tiny_model, async_scheduling, **steps)
    ask_together(engine, prompts(length, 0))
    assert engine.computed <= length + (K - 1) * HIT_SIZES[None,]
    assert outcomes(engine) == {"served": K - 1}


@pytest.mark.parametrize("windows", [(None,), (None, 16)], ids=str)
def test_prompts_that_load_the_same_head_compute_the_rest_once(
    tiny_model: Path, async_scheduling: bool, windows: tuple[int | None, ...]
) -> None:
    computed = {}
    for is_on in (True, False):
        options = {"step_loads": "never", "compute_once": is_on}
        engine = engine_of(tiny_model, async_scheduling, windows=windows, extra_config=options)
        asked = prompts(LENGTH, 0)
        ask(engine, asked[0][: LOADED + 1], 1)
        engine.drop_gpu_cache()
        engine.computed = 0
        ask_together(engine, asked)
        computed[is_on] = engine.computed
    assert computed[True] == LENGTH - LOADED + K - 1
    assert computed[False] > (K - 1) * (LENGTH - LOADED)  # or the test shows nothing


def test_leader_aborted_in_mid_prefill_is_followed_by_one_other(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = engine_of(tiny_model, async_scheduling, engine_args=CHUNKS)
    ids = prompts(LENGTH, 0)[0]
    requests = [engine.add(ids, 1) for _ in range(K)]
    for _ in range(10):
        engine.step()
    engine.abort(requests[0])
    engine.run()
    assert engine.finished[requests[0]].status is RequestStatus.FINISHED_ABORTED
    assert all(engine.finished[r].tokens == play(ids, 1)[0] for r in requests[1:])
    assert engine.computed <= LENGTH + 2 * CHUNKS["long_prefill_token_threshold"] + 5 * K
    assert outcomes(engine)["leader_ended"] == 1
    engine.assert_at_rest()


def test_leader_preempted_in_mid_prefill_costs_no_token_twice(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = engine_of(tiny_model, async_scheduling, engine_args=CHUNKS)
    ids = prompts(LENGTH, 0)[0]
    requests = [engine.add(ids, 1) for _ in range(K)]
    for _ in range(10):
        engine.step()
    engine.land()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    done = engine.computed
    engine.run()
    assert all(engine.finished[r].tokens == play(ids, 1)[0] for r in requests)
    assert sum(r.num_preemptions for r in engine.requests.values()) >= 1
    assert engine.computed - done <= LENGTH + 3 * CHUNKS["long_prefill_token_threshold"] + 5 * K
    engine.assert_at_rest()


def test_leader_whose_load_fails_is_followed_by_one_other(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = engine_of(tiny_model, async_scheduling, extra_config={"step_loads": "never"})
    asked = prompts(LENGTH, 0)
    ask(engine, asked[0][: LOADED + 1], 1)
    engine.drop_gpu_cache()
    engine.computed = 0
    engine.copier.fail_every = 1.0
    ask_together(engine, asked)
    assert total(engine, names.LOAD_FAILURES) >= 1
    assert engine.computed <= 2 * LENGTH + 5 * K


def test_request_without_shared_prefix_does_not_wait(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = engine_of(tiny_model, async_scheduling, engine_args=CHUNKS)
    rng = random.Random(2)
    ask_together(engine, [prompt(rng, 100) for _ in range(K)])
    assert outcomes(engine) == {}


@pytest.mark.parametrize("is_on", [True, False])
def test_parameter_of_a_request_decides_whether_it_waits(tiny_model: Path, is_on: bool) -> None:
    engine = engine_of(
        tiny_model, False, engine_args=CHUNKS, extra_config={"compute_once": not is_on}
    )
    ids = prompts(LENGTH, 0)[0]
    for _ in range(4):
        engine.add(ids, 1, control={"compute_once": is_on})
    engine.run()
    assert bool(outcomes(engine)) is is_on


def test_option_without_prefix_caching_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="needs vLLM's prefix caching"):
        engine_of(tiny_model, False, prefix_caching=False)


@pytest.mark.parametrize("policy", mostly_slow(["priority", "fcfs"], 1))
def test_random_bursts_read_only_right_kv(
    tiny_model: Path, async_scheduling: bool, policy: str
) -> None:
    """Bursts with shared prefixes, aborts, preemptions, resets, failing loads and evictions."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        engine = ToyEngine(
            tiny_model,
            async_scheduling,
            gpu_blocks=50,  # forces preemption
            cpu_blocks=60,  # forces eviction
            max_tokens_per_step=24,
            extra_config={"compute_once": True, "step_loads": ["auto", "never"][seed % 2]},
            engine_args={"long_prefill_token_threshold": 8, "scheduling_policy": policy},
            seed=seed,
        )
        engine.copier.fail_every = 0.05
        engine.copier.drop_stores = 0.1
        asked = _random_bursts(engine, random.Random(seed))
        for request, (ids, count) in asked.items():
            tokens = engine.finished[request].tokens
            assert tokens == play(ids, count)[0][: len(tokens)]
            is_aborted = engine.finished[request].status is RequestStatus.FINISHED_ABORTED
            assert is_aborted or len(tokens) == count
        engine.assert_at_rest()
        assert_tier_is_right(engine)
        assert not engine.half.once._leaders
        assert not engine.half.once._waits
        seen.update(outcomes(engine))
        seen["preempted"] += sum(r.num_preemptions for r in engine.requests.values())
        seen["loaded"] += int(total(engine, names.LOADED_BLOCKS))
    assert seen.keys() >= {"served", "leader_ended", "aborted", "preempted", "loaded"}, seen


def _random_bursts(engine: ToyEngine, rng: random.Random) -> dict[str, tuple[list[int], int]]:
    asked: dict[str, tuple[list[int], int]] = {}
    for _ in range(12):
        stem = prompt(rng, rng.randrange(30, 100))
        for _ in range(rng.randrange(1, 7)):
            ids = stem[: rng.randrange(20, len(stem) + 1)] + prompt(rng, rng.randrange(1, 20))
            count = rng.randrange(1, 20)
            asked[engine.add(ids, count, priority=rng.randrange(3))] = ids, count
        for _ in range(rng.randrange(30)):
            engine.step()
            if rng.random() < 0.1:
                alive = [r for r in asked if not engine.requests[r].is_finished()]
                if alive:
                    engine.abort(rng.choice(alive))
            if rng.random() < 0.05:
                engine.scheduler.reset_prefix_cache()
            if rng.random() < 0.01:
                engine.scheduler.reset_connector_cache()
    engine.run()
    return asked
