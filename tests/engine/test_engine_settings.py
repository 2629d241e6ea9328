"""An engine for every setting: eviction, tiny caches, lazy stores, other connectors, errors."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.oracle import BLOCK, BLOCK_BYTES, COUNT, PROMPTS, Truth, assert_same
from tests.engine.real_engine import real_engine
from tests.patience import mostly_slow
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics import names


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_rounds_with_a_tier_smaller_than_the_working_set(
    tiny_model: Path, truth: Truth, eviction: str
) -> None:
    blocks = len(truth[1])
    capacity = blocks * 2 // 3 * BLOCK_BYTES  # two thirds of the working set
    with real_engine(tiny_model, {"cpu_memory": capacity, "eviction": eviction}) as engine:
        assert engine.scheduler.vllm_config.scheduler_config.async_scheduling is False
        loaded_rounds = []
        for _ in range(4):
            before = engine.total(names.LOADED_BLOCKS)
            served = 0
            answers = []
            for ids in PROMPTS:
                hits = engine.total(names.HIT_TOKENS)
                (answer,) = engine.ask([ids], COUNT)
                hits = engine.total(names.HIT_TOKENS) - hits
                # vLLM's own count of cached tokens is ours: the GPU's was dropped.
                assert answer.cached == hits
                assert hits <= (len(ids) - 1) // BLOCK * BLOCK
                served += hits
                answers.append(answer)
                engine.drop_gpu_cache()
            assert_same(answers, engine, truth)
            loaded_rounds.append(engine.total(names.LOADED_BLOCKS) - before)
            assert loaded_rounds[-1] == served / BLOCK
        engine.assert_at_rest()
        assert all(loaded > 0 for loaded in loaded_rounds)  # shared stems hit in the first round
        assert engine.total(names.EVICTED_BLOCKS) > 0
        assert engine.half.index.used_bytes <= capacity


@pytest.mark.parametrize(
    ("requests", "count", "gpu_blocks"),
    [(36, 32, 34), pytest.param(60, 40, 40, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_concurrent_clients_aborts_and_preemption(
    tiny_model: Path, requests: int, count: int, gpu_blocks: int
) -> None:
    """A tiny GPU cache, eight clients, aborts at random points; nothing leaks, nothing is wrong."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(4)
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    options = {"cpu_memory": "3MiB"}
    with real_engine(tiny_model, options, num_gpu_blocks_override=gpu_blocks) as engine:
        alone = {}
        for number in range(12):
            (answer,) = engine.ask([PROMPTS[number]], count)
            alone[number] = answer.tokens
        engine.drop_gpu_cache()
        vllm_engine = engine.llm.llm_engine
        answers: dict[str, tuple[int, ...]] = {}
        live: list[str] = []
        for number in range(requests):
            name = f"{number}-{number % 12}"
            vllm_engine.add_request(name, {"prompt_token_ids": PROMPTS[number % 12]}, params)
            live.append(name)
            for _ in range(rng.randrange(5)):
                for output in vllm_engine.step():
                    answers[output.request_id] = tuple(output.outputs[0].token_ids)
            if rng.random() < 0.3:
                vllm_engine.abort_request([live.pop(rng.randrange(len(live)))])
            if rng.random() < 0.1:
                engine.llm.reset_prefix_cache()
        while vllm_engine.has_unfinished_requests():
            for output in vllm_engine.step():
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
        for _ in range(3):
            vllm_engine.step()
        engine.assert_at_rest()
        finished = {name: tokens for name, tokens in answers.items() if len(tokens) == count}
        assert len(finished) > requests / 3
        # Batches change the last bits of a sum, and a close call between two tokens with them;
        # wrong KV would change every answer from its first token on.
        assert all(
            tokens[:2] == alone[int(name.split("-")[1])][:2] for name, tokens in finished.items()
        )
        same = sum(tokens == alone[int(name.split("-")[1])] for name, tokens in finished.items())
        assert same >= 0.9 * len(finished)
        assert engine.total(names.LOADED_BLOCKS) > 0
        assert engine.total(names.EVICTED_BLOCKS) > 0
        preempted = [m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert preempted[0] > 0


@pytest.mark.slow
def test_lazy_store_saves_what_the_gpu_evicts(tiny_model: Path, truth: Truth) -> None:
    options = {"cpu_memory": "64MiB", "store": "lazy"}
    with real_engine(tiny_model, options, num_gpu_blocks_override=64) as engine:
        for _ in range(3):
            answers = [answer for ids in PROMPTS for answer in engine.ask([ids], COUNT)]
            assert_same(answers, engine, truth)
        assert engine.total(names.LOADED_BLOCKS) > 0
        engine.assert_at_rest()


@pytest.mark.slow
def test_engine_without_prefix_caching_loads_from_the_tier(tiny_model: Path, truth: Truth) -> None:
    options = {"cpu_memory": "64MiB"}
    with real_engine(tiny_model, options, enable_prefix_caching=False) as engine:
        for round_ in range(2):
            answers = [answer for ids in PROMPTS for answer in engine.ask([ids], COUNT)]
            assert_same(answers, engine, truth)
            if round_:
                assert [a.cached for a in answers] == [
                    (len(p) - 1) // BLOCK * BLOCK for p in PROMPTS
                ]
        engine.assert_at_rest()


@pytest.mark.slow
def test_repeated_prompt_computes_one_token_with_partial_tails(
    tiny_model: Path, truth: Truth
) -> None:
    options = {"cpu_memory": "64MiB", "reuse_partial_tail": True}
    with real_engine(tiny_model, options) as engine:
        for _ in range(2):
            answers = []
            for ids in PROMPTS:
                answers += engine.ask([ids], COUNT)
                engine.drop_gpu_cache()
        assert [answer.cached for answer in answers] == [len(ids) - 1 for ids in PROMPTS]
        for mine, right in zip(answers, truth[0], strict=True):
            assert mine.tokens == right.tokens
            # A single row is rounded in another way, see `oracle.make_prompts`.
            assert mine.logprobs == pytest.approx(right.logprobs, abs=1e-3)
        # The loaded tail is what the answer is made from: without it, it is another one.
        arena = engine.worker_half.arena
        arena.bytes_at(0, arena.nbytes)[:] = 0
        (wrong,) = engine.ask([PROMPTS[0]], COUNT)
        assert wrong.cached == len(PROMPTS[0]) - 1
        assert wrong.logprobs != pytest.approx(truth[0][0].logprobs, abs=1e-3)
        engine.assert_at_rest()


def test_inside_a_multi_connector(tiny_model: Path, truth: Truth, caplog) -> None:
    child = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_memory": "64MiB"},
    }
    other = {**child, "kv_connector_extra_config": {"cpu_memory": "8MiB", "eviction": "s3fifo"}}
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child, other]},
    }
    with real_engine(tiny_model, None, transfer) as engine:
        assert '"kv_load_failure_policy": "recompute"' in caplog.text
        engine.ask([PROMPTS[-1]], 1)  # ranks agree in the first step, of which nothing is kept
        engine.drop_gpu_cache()
        for _ in range(2):
            answers = []
            for ids in PROMPTS:
                answers += engine.ask([ids], COUNT)
                engine.drop_gpu_cache()
            assert_same(answers, engine, truth)
        assert [a.cached for a in answers] == [(len(p) - 1) // BLOCK * BLOCK for p in PROMPTS]
        engine.assert_at_rest()


@pytest.mark.parametrize("mode", mostly_slow(["hash_only", "naive"], 1))
def test_baseline_modes_change_nothing(tiny_model: Path, truth: Truth, mode: str) -> None:
    with real_engine(tiny_model, {"mode": mode}) as engine:
        answers = []
        for ids in PROMPTS[:6]:
            answers += engine.ask([ids], COUNT)
            engine.drop_gpu_cache()
        assert_same(answers, engine, (truth[0][:6], truth[1]))
        assert all(answer.cached == 0 for answer in answers)
        assert (engine.half is None) == (mode == "naive")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_memory": "4KiB"}, "does not hold a single block"),
        pytest.param({"cpu_memry": "1GiB"}, 'did you mean "cpu_memory"', marks=pytest.mark.slow),
        pytest.param({"cpu_memory": "900TiB"}, "more than the machine", marks=pytest.mark.slow),
    ],
)
def test_bad_options_stop_the_start_with_a_clear_error(
    tiny_model: Path, options: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message), real_engine(tiny_model, options):
        pass
