"""Early loads: when loads start before their step, and what they wait for."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, total
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import ToyGroup, WrongRead, kv_cache_config
from vllm_tiered_kv.connector import same_process
from vllm_tiered_kv.connector.scheduler import early_loads
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import LoadJob
from vllm_tiered_kv.errors import CudaError
from vllm_tiered_kv.metrics import names

CPU = Tier.CPU.value


def warm(engine: ToyEngine, *lengths: int) -> list[list[int]]:
    """Prompts whose blocks are in the tier and not on the GPU."""
    rng = random.Random(7)
    prompts = [prompt(rng, length) for length in lengths]
    for ids in prompts:
        ask(engine, ids)
    engine.drop_gpu_cache()
    return prompts


def ask_together(engine: ToyEngine, prompts: list[list[int]]) -> None:
    asked = [engine.add(ids, 5) for ids in prompts]
    engine.run()
    for request, ids in zip(asked, prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 5)[0]
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def test_all_loads_but_the_last_start_before_the_step(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    prompts = warm(engine, 29, 21, 33)
    for ids in prompts:
        engine.add(ids, 5)
    output = engine.scheduler.schedule()
    assert engine.copier.early_blocks == 7 + 5
    assert total(engine, names.EARLY_LOADS, CPU) == 2
    assert [job.request_id for job in output.kv_connector_metadata.loads] == ["r5"]
    engine._in_flight.append((output, engine._execute(output)))
    assert engine.copier.ahead_blocks == 8
    engine.run()
    for request, ids in zip(("r3", "r4", "r5"), prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 5)[0]
    assert total(engine, names.LOADED_BLOCKS, CPU) == 20
    assert not engine.reported_loads, "a load was asynchronous"
    engine.assert_at_rest()


def test_single_load_starts_with_its_step(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ask_together(engine, warm(engine, 29))
    assert engine.copier.early_blocks == 0
    assert engine.copier.ahead_blocks == 7


def test_early_load_waits_for_stores_that_read_its_blocks(tiny_model: Path) -> None:
    """A request ends while its last blocks wait to be stored. The next two requests get them."""
    engine = ToyEngine(tiny_model, async_scheduling=True, gpu_blocks=14, cpu_blocks=64)
    prompts = warm(engine, 29, 9)
    ended = engine.add(prompt(random.Random(1), 21), 8)
    while ended not in engine.finished:
        engine.step()
    engine.land()
    unread = [job.transfer for job in engine.half._next.stores_before]
    sources = {block for transfer in unread for block in transfer.block_ids.tolist()}
    overwritten: set[int] = set()
    load_early = engine.copier.load_early

    def noted(job_ids: list[int], blocks: list[object]) -> None:
        for part in blocks:
            overwritten.update(part.block_ids.tolist())
        load_early(job_ids, blocks)

    engine.copier.load_early = noted
    ask_together(engine, prompts)
    assert sources & overwritten, "no block was reallocated, so the test shows nothing"


def test_step_that_does_not_wait_for_its_loads_is_a_wrong_read(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the toy engine detects a missing wait."""
    engine = ToyEngine(tiny_model, async_scheduling)
    prompts = warm(engine, 29, 21)
    monkeypatch.setattr(engine.copier, "begin_step", lambda: None)
    with pytest.raises(WrongRead):
        ask_together(engine, prompts)


def test_failed_early_load_is_recomputed(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    prompts = warm(engine, 29, 21, 33)
    engine.copier.fail_ahead = 1.0
    ask_together(engine, prompts)
    assert total(engine, names.EARLY_LOADS, CPU) > 0
    assert total(engine, names.LOADED_BLOCKS) == 0
    assert total(engine, names.LOAD_FAILURES) >= 3


def test_failed_early_load_raises_if_the_step_cannot_be_discarded(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, async_scheduling=True)
    prompts = warm(engine, 29, 21)
    engine.copier.fail_ahead = 1.0
    for ids in prompts:
        engine.add(ids, 5)
    with pytest.raises(CudaError, match="cannot be copied to the GPU"):
        engine.scheduler.schedule()


def not_yet_seen(engine: ToyEngine) -> None:
    engine.worker.worker_half._step_thread = None


def on_another_stream(engine: ToyEngine) -> None:
    engine.copier.early = 0.0


def with_another_connector(engine: ToyEngine) -> None:
    engine.worker.worker_half.wait_for_sources = True


def in_another_process(engine: ToyEngine) -> None:
    del same_process._workers[engine.worker.worker_half]


def twice(engine: ToyEngine) -> None:
    engine.second_worker = KVConnectorFactory.create_connector(
        engine.config, KVConnectorRole.WORKER, engine.kv_cache_config
    )


@pytest.mark.parametrize(
    "hindrance",
    [not_yet_seen, on_another_stream, with_another_connector, in_another_process, twice],
)
def test_loads_start_with_the_step_if_an_early_start_is_unsafe(
    tiny_model: Path, hindrance: object
) -> None:
    engine = ToyEngine(tiny_model)
    prompts = warm(engine, 29, 21)
    hindrance(engine)
    ask_together(engine, prompts)
    assert engine.copier.early_blocks == 0
    assert engine.copier.ahead_blocks == 7 + 5


def test_planning_in_another_thread_starts_no_load(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    prompts = warm(engine, 29, 21)
    asked = [engine.add(ids, 5) for ids in prompts]
    planner = threading.Thread(target=lambda: outputs.append(engine.scheduler.schedule()))
    outputs: list[object] = []
    planner.start()
    planner.join()
    assert engine.copier.early_blocks == 0
    engine._in_flight.append((outputs[0], engine._execute(outputs[0])))
    engine.run()
    assert [engine.finished[r].tokens for r in asked] == [play(ids, 5)[0] for ids in prompts]


def test_engine_moved_to_another_thread_starts_early_loads(tiny_model: Path) -> None:
    """Planning and execution move to the other thread together."""
    engine = ToyEngine(tiny_model)
    prompts = warm(engine, 29, 21)

    def serve() -> None:
        ask(engine, prompt(random.Random(3), 9))
        engine.drop_gpu_cache()
        ask_together(engine, prompts)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert engine.copier.early_blocks == 7


def test_worker_after_shutdown_starts_no_load(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    for ids in warm(engine, 29, 21):
        engine.add(ids, 5)
    engine.worker.shutdown()
    output = engine.scheduler.schedule()
    assert len(output.kv_connector_metadata.loads) == 2
    assert engine.copier.early_blocks == 0


def test_leased_load_without_a_connection_starts_with_the_step(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    warm(engine, 29)
    leased = LoadJob("r", (), ("of a daemon",), 1)
    assert not engine.worker.worker_half.start_early([], [leased])


def test_two_engines_in_one_process_load_early_independently(tiny_model: Path) -> None:
    engines = [ToyEngine(tiny_model, seed=seed) for seed in range(2)]
    prompts = [warm(engine, 29, 21) for engine in engines]
    for engine, ids in zip(engines, prompts, strict=True):
        ask_together(engine, ids)
    assert [engine.copier.early_blocks for engine in engines] == [7, 7]


@pytest.mark.parametrize("zeroes", [False, True])
def test_engine_has_early_loads_unless_vllm_zeroes_blocks(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, zeroes: bool
) -> None:
    made_for = kv_cache_config([ToyGroup(0, None, 4, 32)], 64, 4)
    monkeypatch.setattr(type(made_for), "needs_kv_cache_zeroing", zeroes)
    assert (ToyEngine(tiny_model).half.early_loads is None) is zeroes


def test_is_possible_is_false_if_others_write_new_blocks() -> None:
    def possible(ranks: int = 1, drafts: object = None, zeroes: bool = False) -> bool:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks), speculative_config=drafts
        )
        return early_loads.is_possible(config, zeroes)

    assert possible()
    assert not possible(ranks=2)
    assert not possible(drafts=object())
    assert not possible(zeroes=True)
