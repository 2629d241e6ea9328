"""Step loads: when a load is one, and what it must never do."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import WrongRead
from vllm_tiered_kv.cache.cost_model import Decision
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.assembly import make_worker_half
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.metrics import names

LAYER_CALLS = pytest.mark.parametrize("layer_calls", [0.0, 1.0], ids=["whole", "by-layer"])


def warm(engine: ToyEngine, *prompts: list[int]) -> None:
    """Puts the blocks of these prompts into the tier and drops them from the GPU."""
    for ids in prompts:
        ask(engine, ids)
    engine.drop_gpu_cache()


@LAYER_CALLS
def test_single_request_is_computed_in_the_step_that_loads_it(
    tiny_model: Path, async_scheduling: bool, layer_calls: float
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    engine.layer_calls = layer_calls
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    engine.add(ids, 6)
    output = engine.scheduler.schedule()
    assert output.has_sync_kv_loads
    assert sum(output.num_scheduled_tokens.values()) == 1
    engine._in_flight.append((output, engine._execute(output)))
    engine.run()
    assert engine.copier.ahead_blocks == total(engine, names.LOADED_BLOCKS, "cpu") == 10
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@LAYER_CALLS
def test_load_overtakes_a_step_that_does_not_use_its_blocks(
    tiny_model: Path, async_scheduling: bool, layer_calls: float
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    engine.layer_calls = layer_calls
    rng = random.Random(1)
    ids = prompt(rng, 41)
    warm(engine, ids)
    running = engine.add(prompt(rng, 9), 30)
    for _ in range(6):
        engine.step()
    asked = engine.add(ids, 6)
    engine.run()
    assert engine.copier.overtaking_blocks == engine.copier.ahead_blocks == 10
    assert engine.finished[asked].tokens == play(ids, 6)[0]
    assert len(engine.finished[running].tokens) == 30
    assert assert_tier_is_right(engine)


def test_load_gets_no_block_that_a_step_in_flight_writes(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """vLLM keeps the blocks of an aborted request until its last step has ended."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=18)
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    for seed in range(2, 6):
        engine.copier.overtaking_blocks = 0
        aborted = engine.add(prompt(random.Random(seed), 30), 8)
        for _ in range(4):
            engine.step()
        engine.abort(aborted)
        ask(engine, ids)
        assert engine.copier.overtaking_blocks >= 8
        engine.drop_gpu_cache()
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@pytest.mark.parametrize("blocks", [9, 10])
def test_running_requests_wait_for_small_step_loads_only(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    limit = blocks * engine.half.block_bytes[0]
    monkeypatch.setattr(
        "vllm_tiered_kv.connector.scheduler.step_load_policy._MAX_BYTES_WITH_OTHERS", limit
    )
    rng = random.Random(2)
    ids, other = prompt(rng, 41), prompt(rng, 9)
    warm(engine, ids)
    running = engine.add(other, 30)
    engine.step()
    engine.step()
    loaded = engine.add(ids, 4)
    engine.run()
    assert engine.reported_loads == ([loaded] if blocks < 10 else [])
    assert engine.copier.ahead_blocks == (0 if blocks < 10 else 10)
    assert engine.finished[running].tokens == play(other, 30)[0]
    assert engine.finished[loaded].tokens == play(ids, 4)[0]
    engine.assert_at_rest()


@LAYER_CALLS
def test_requests_that_arrive_together_load_in_one_step(
    tiny_model: Path, async_scheduling: bool, layer_calls: float
) -> None:
    """Two of them share a prefix: the second one hits the first one's blocks on the GPU before they
    are loaded."""
    engine = ToyEngine(tiny_model, async_scheduling)
    engine.layer_calls = layer_calls
    rng = random.Random(3)
    shared = prompt(rng, 20)
    prompts = [shared + prompt(rng, 9), shared + prompt(rng, 9), prompt(rng, 29)]
    warm(engine, *prompts)
    asked = [engine.add(ids, 5) for ids in prompts]
    engine.run()
    for request, ids in zip(asked, prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 5)[0]
    assert engine.copier.ahead_blocks > 0
    assert not engine.reported_loads
    engine.assert_at_rest()


def test_failed_step_load_is_recomputed_by_all_requests_that_share_it(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    rng = random.Random(4)
    shared = prompt(rng, 20)
    prompts = [shared + prompt(rng, 9), shared + prompt(rng, 9)]
    warm(engine, *prompts)
    engine.copier.fail_ahead = 1.0
    asked = [engine.add(ids, 5) for ids in prompts]
    engine.run()
    for request, ids in zip(asked, prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 5)[0]
    assert total(engine, names.LOAD_FAILURES) >= 1
    assert total(engine, names.LOADED_BLOCKS) == 0
    engine.assert_at_rest()
    assert_tier_is_right(engine)


@pytest.mark.parametrize("runner", [{"async_scheduling": True}, {"second_runner": True}])
def test_failed_step_load_raises_if_the_step_cannot_be_discarded(
    tiny_model: Path, runner: dict[str, bool]
) -> None:
    """With asynchronous scheduling the next step is in flight before vLLM learns of the error, and
    its tokens would be used. Model Runner V2 continues after what it computed. So the engine stops:
    a GPU that fails to copy cannot compute either."""
    engine = ToyEngine(tiny_model, **runner)
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    engine.copier.fail_ahead = 1.0
    engine.add(ids, 6)
    with pytest.raises(CudaError, match="cannot be copied to the GPU"):
        engine.run()


def test_model_runner_v2_does_not_rewind_a_discarded_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows why its steps cannot be discarded: the next step continues after the invalid blocks,
    here beyond the end of its block table."""
    monkeypatch.setattr(assembly, "_steps_can_be_discarded", lambda _: True)
    engine = ToyEngine(tiny_model, second_runner=True)
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    engine.copier.fail_ahead = 1.0
    engine.add(ids, 6)
    with pytest.raises((WrongRead, IndexError)):
        engine.run()


def test_steps_in_flight_cannot_be_discarded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous scheduling and pipeline stages have several steps in flight."""
    engine = ToyEngine(tiny_model)

    def can_be_discarded() -> bool:
        half = make_worker_half(TieredKVConfig(), engine.config, engine.kv_cache_config)
        return half._step_loads._steps_can_be_discarded

    assert can_be_discarded()
    monkeypatch.setattr(engine.config.parallel_config, "pipeline_parallel_size", 2)
    assert not can_be_discarded()
    monkeypatch.undo()
    monkeypatch.setattr(engine.config.scheduler_config, "async_scheduling", True)
    assert not can_be_discarded()


def test_step_load_that_vllm_declines_leaks_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Happens inside a MultiConnector if another connector offers more tokens."""
    monkeypatch.setenv("TIERED_KV_LOAD_POLICY", "auto")
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    request = engine.requests[engine.add(ids, 4)]
    half = engine.half
    offered, _ = half.get_num_new_matched_tokens(request, 0)
    assert offered
    decisions = half._requests[request.request_id].load.match.choice.decisions
    assert decisions == {Tier.CPU: Decision.LOAD}
    half.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
    assert not half.load_policy.costs.loads, "no load is in flight"
    engine.run()
    engine.assert_at_rest()


def test_layer_that_does_not_wait_for_its_load_is_a_wrong_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the toy engine detects a missing wait."""
    engine = ToyEngine(tiny_model)
    engine.layer_calls = 1.0
    ids = prompt(random.Random(1), 41)
    warm(engine, ids)
    monkeypatch.setattr(engine.worker, "wait_for_layer_load", lambda name: None)
    engine.add(ids, 6)
    with pytest.raises(WrongRead):
        engine.run()


def test_random_workload_with_failures_reads_only_right_kv(
    tiny_model: Path, async_scheduling: bool
) -> None:
    ahead = 0
    for seed in range(12):
        rng = random.Random(seed)
        engine = ToyEngine(
            tiny_model, async_scheduling, gpu_blocks=48, cpu_blocks=64, seed=seed, max_seqs=4
        )
        engine.copier.fail_every = 0.2
        engine.copier.fail_ahead = 0.0 if async_scheduling else 0.2
        engine.copier.drop_stores = 0.1
        shared = prompt(rng, 16)
        asked: dict[str, tuple[list[int], int]] = {}
        for _ in range(25):
            for _ in range(rng.choice([0, 1, 1, 3])):
                ids = shared[: rng.choice([0, 8, 16])] + prompt(rng, rng.randint(1, 40))
                if asked and rng.random() < 0.5:
                    ids = rng.choice(list(asked.values()))[0]
                count = rng.randint(1, 8)
                asked[engine.add(ids, count)] = (ids, count)
            for _ in range(rng.randint(0, 6)):
                engine.step()
            if asked and rng.random() < 0.2:
                aborted = rng.choice(list(asked))
                if aborted not in engine.finished:
                    engine.abort(aborted)
                    del asked[aborted]
            if rng.random() < 0.3:
                engine.run()
                engine.drop_gpu_cache()
        engine.run()
        for request, (ids, count) in asked.items():
            assert engine.finished[request].tokens == play(ids, count)[0]
        ahead += engine.copier.ahead_blocks
        engine.assert_at_rest()
        assert_tier_is_right(engine)
    assert ahead > 100
