"""Rare turns of events, each of which once stored a wrong block, lost the tier, or hung."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.engine import toy_engine
from tests.engine.toy_asking import (
    ask,
    assert_tier_is_right,
    keys_of,
    prompt,
    total,
    workload,
)
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import mostly_slow
from vllm_tiered_kv.cache.ledger import StoreReport
from vllm_tiered_kv.connector.metadata import TieredKVWorkerMetadata
from vllm_tiered_kv.connector.scheduler import scheduler_half
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import DropReason


def readable(engine: ToyEngine, request_id: str) -> list[int]:
    """Positions of a request's blocks that the tier would serve now."""
    (keys,) = keys_of(engine, request_id)
    return [n for n, key in enumerate(keys) if engine.half.index.match_prefix([key])]


def test_blocks_another_connector_failed_to_load_are_taken_back(tiny_model: Path) -> None:
    """vLLM truncates and recomputes; what was stored from the first bad block on must go."""
    engine = ToyEngine(tiny_model)
    engine.copier.max_delay = 0
    request = engine.add(prompt(random.Random(1), 41), 20)
    engine.step()
    engine.step()
    assert len(readable(engine, request)) == 10
    output = engine.scheduler.schedule()
    result = engine._execute(output)
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
    result.kv_connector_output.invalid_block_ids = {table[3]}
    engine.scheduler.update_from_output(output, result)
    assert readable(engine, request) == [0, 1, 2]
    engine.half.index.check()
    engine.run()
    assert engine.finished[request].tokens == play(engine.requests[request].prompt_token_ids, 20)[0]
    assert assert_tier_is_right(engine) >= 14  # stored anew by the recomputation
    engine.assert_at_rest()


def test_lazy_stores_do_not_cross_a_reset(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, extra_config={"store": "lazy", "lazy_window": 64}
    )
    request = engine.add(prompt(random.Random(1), 41), 30)
    for _ in range(8):
        engine.step()
    assert engine.requests[request].num_computed_tokens
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    ask(engine, prompt(random.Random(9), 5), 2)  # looks at the free queue
    assert readable(engine, request) == []


@pytest.mark.parametrize("drop_stores", [0.0, 1.0], ids=["tier-too-small", "copies-fail"])
def test_lazy_stores_do_not_go_round_in_circles(
    tiny_model: Path, async_scheduling: bool, drop_stores: float
) -> None:
    """What is stored evicts what was stored before, which still waits in vLLM's free queue. With a
    daemon this never ended: blocks on their way to it keep an idle engine stepping."""
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=128,
        cpu_blocks=12,
        extra_config={"store": "lazy", "lazy_window": 64},
    )
    engine.copier.drop_stores = drop_stores
    rng = random.Random(1)
    for _ in range(6):
        ask(engine, prompt(rng, 41), 2)
    ask(engine, prompt(rng, 9), 200)
    tried = total(engine, names.STORED_BLOCKS) + total(engine, names.DROPPED_BLOCKS)
    assert 12 < tried <= 6 * 10 + 52
    engine.assert_at_rest()
    assert assert_tier_is_right(engine) or drop_stores


def test_gpu_blocks_that_outlive_a_reset_are_not_stored(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """vLLM keeps its own cache when requests run; a hit there is still from before the reset."""
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = prompt(random.Random(1), 41)
    first = ask(engine, ids, 2)
    engine.add(prompt(random.Random(2), 9), 40)
    for _ in range(3):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    ask(engine, ids, 2)
    assert readable(engine, first) == []
    engine.drop_gpu_cache()
    ask(engine, ids, 2)  # computed anew
    assert len(readable(engine, first)) == 10
    engine.assert_at_rest()


@pytest.mark.parametrize("kind", ["answers-not-stored", "left-alone"])
def test_a_first_block_that_a_reset_finds_half_full_is_not_stored(
    tiny_model: Path, async_scheduling: bool, kind: str
) -> None:
    """vLLM writes a hash on it after the reset, when its request goes on; a later one finds it."""
    options = {"store_decode": kind != "answers-not-stored"}
    engine = ToyEngine(tiny_model, async_scheduling, block_size=8, extra_config=options)
    ids = prompt(random.Random(1), 5)
    request = engine.add(ids, 30, resumable=kind == "left-alone")
    engine.step()
    engine.step()
    assert 0 < engine.requests[request].num_computed_tokens < 8
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(60):  # a session does not end by itself
        engine.step()
    assert engine.requests[request].num_output_tokens == 30
    later = ask(engine, ids + play(ids, 30)[0][:20], 2)
    assert readable(engine, later) == []
    engine.abort(request)
    engine.run()
    engine.drop_gpu_cache()
    later = ask(engine, ids + play(ids, 30)[0][:20], 2)  # computed anew
    assert readable(engine, later) == [0, 1, 2]
    engine.assert_at_rest()


def test_a_tier_of_which_a_part_is_unusable_goes_on_with_the_rest(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=16)
    slab = engine.half.index.geometry.slab_bytes
    # What a worker reports whose arena could be pinned only in part.
    engine.half.update_connector_output(
        SimpleNamespace(
            kv_connector_worker_meta=TieredKVWorkerMetadata({}, {0: 16 * slab, 1: 8 * slab + 1}),
            finished_recving=None,
            failed_recving=set(),
            invalid_block_ids=set(),
        )
    )
    rng = random.Random(1)
    for _ in range(10):
        ids = prompt(rng, 33)
        ask(engine, ids)
        assert max(use.slot for use in engine.half.index.slots()) < 8
        engine.drop_gpu_cache()
    assert total(engine, names.EVICTED_BLOCKS) > 0
    hits = total(engine, names.HIT_TOKENS)
    ask(engine, ids)
    assert total(engine, names.HIT_TOKENS) > hits
    engine.assert_at_rest()


def test_reports_of_ranks_are_put_together() -> None:
    first = TieredKVWorkerMetadata({1: [StoreReport(4)]}, {0: 10})
    second = TieredKVWorkerMetadata({1: [StoreReport(2)], 2: [StoreReport(1)]}, {1: 5})
    both = first.aggregate(second)
    assert both.stores == {1: [StoreReport(4), StoreReport(2)], 2: [StoreReport(1)]}
    assert both.usable_bytes == {0: 10, 1: 5}


@pytest.mark.parametrize("seed", mostly_slow(range(4), 2))
def test_a_request_that_ends_while_preempted(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """As a pure producer vLLM frees its blocks at once, under steps still in flight."""
    transfer = toy_engine.KVTransferConfig
    monkeypatch.setattr(
        toy_engine,
        "KVTransferConfig",
        lambda **options: transfer(**{**options, "kv_role": "kv_producer"}),
    )
    engine = ToyEngine(tiny_model, True, gpu_blocks=28, cpu_blocks=30, store_delay=4, seed=seed)
    engine.copier.max_delay = 8
    workload(engine, seed, 60)
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_a_preempted_request_is_stored_from_its_first_block_again(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """What was stored of it before may have left the tier since."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=28)
    rng = random.Random(1)
    ids = [engine.add(prompt(rng, 40), 40) for _ in range(2)]  # more than there is room for
    while not any(engine.requests[request_id].num_preemptions for request_id in ids):
        engine.step()
    engine.half.index.clear()
    engine.run()
    (preempted,) = [n for n in ids if engine.requests[n].num_preemptions]
    full = (engine.requests[preempted].num_tokens - 1) // 4
    assert readable(engine, preempted) == list(range(full))
    engine.assert_at_rest()


def test_a_step_whose_stores_were_never_run_does_not_hang(tiny_model: Path) -> None:
    """vLLM skips `wait_for_save` on inner pipeline stages with speculation."""
    engine = ToyEngine(tiny_model)
    engine.worker.wait_for_save = lambda: None
    ask(engine, prompt(random.Random(1), 41))
    assert total(engine, names.STORED_BLOCKS) == 0
    assert total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.COPY_FAILED.value) > 0
    engine.assert_at_rest()


def test_a_reset_with_a_request_whose_keys_cannot_be_made(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    request = engine.add(ids, 20)
    for _ in range(4):
        engine.step()

    def unreadable(request: object) -> None:
        raise PermissionError("adapter_model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(engine.half._key_maker, "keys_for", unreadable)
        assert engine.scheduler.reset_connector_cache()
        engine.run()
    assert engine.finished[request].tokens == play(ids, 20)[0]
    assert engine.half.index.used_bytes == 0
    engine.assert_at_rest()


def test_aborts_between_odd_chunks_store_nothing_half_done(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, max_tokens_per_step=6, gpu_blocks=128, cpu_blocks=200
    )
    rng = random.Random(3)
    for steps in range(1, 12):
        request = engine.add(prompt(rng, 61), 4)
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        engine.run()
    assert assert_tier_is_right(engine)
    engine.assert_at_rest()


def test_after_a_dropped_block_the_rest_of_its_sequence_is_not_stored(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, max_tokens_per_step=16)
    engine.copier.max_delay = 0
    engine.copier.drop_stores = 1.0
    request = engine.add(prompt(random.Random(4), 61), 2)
    engine.run()
    left = readable(engine, request)
    assert left == list(range(len(left)))  # a head without holes
    assert len(left) < 15
    engine.assert_at_rest()


def test_a_resumable_session_is_left_alone(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    request = engine.add(ids, 2)
    engine.half._requests.clear()
    engine.requests[request].resumable = True
    engine.half.on_new_request(engine.requests[request])
    assert not engine.half._requests
    assert engine.half.get_num_new_matched_tokens(engine.requests[request], 0) == (0, False)


def test_sources_are_settled_where_other_connectors_write(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    settled: list[int] = []
    engine.copier.settle_sources = lambda: settled.append(len(engine.copier._stores))
    ask(engine, prompt(random.Random(1), 41))
    assert not settled
    engine.worker.worker_half.wait_for_sources = True
    ask(engine, prompt(random.Random(2), 41))
    assert settled
    assert all(np.array(settled) > 0)  # called with the stores of the step under way


def test_reports_that_never_come_do_not_keep_the_engine_from_resting(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that come very late make nothing readable, but give the memory back."""
    engine = ToyEngine(tiny_model)
    timeout = engine.half._config.remote_load_timeout
    monkeypatch.setattr(scheduler_half, "_REPORT_TIMEOUT_S", 0.02 - timeout)
    lost = []
    report = engine.worker.build_connector_worker_meta
    engine.worker.build_connector_worker_meta = lambda: lost.append(report())
    ids = prompt(random.Random(1), 41)
    ask(engine, ids, 3)
    assert total(engine, names.DROPPED_BLOCKS, "cpu", "unreported") == 10
    assert (
        engine.half.index.used_bytes == 10 * engine.half.index.geometry.slot_bytes[0]
    )  # may still be written
    ask(engine, ids, 3)  # what it lacks is not waited for
    engine.worker.build_connector_worker_meta = report
    for told in filter(None, lost):
        engine.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    assert total(engine, names.STORED_BLOCKS) == 0
    engine.assert_at_rest()
    engine.drop_gpu_cache()
    ask(engine, ids, 3)
    assert total(engine, names.STORED_BLOCKS) == 10
    assert assert_tier_is_right(engine)
    engine.assert_at_rest()
