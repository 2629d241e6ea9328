"""Rare cases, each of which once stored a wrong block, disabled the tier, or hung."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.outputs import KVConnectorOutput

from tests.engine import toy_engine
from tests.engine.keyed_requests import write_adapter
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
    """Positions of a request's blocks that are readable in the tier."""
    (keys,) = keys_of(engine, request_id)
    return [n for n, key in enumerate(keys) if engine.half.index.match_prefix([key])]


def test_blocks_after_a_failed_load_of_another_connector_are_removed(tiny_model: Path) -> None:
    """vLLM recomputes them; blocks stored from the first invalid one on must be removed."""
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
    assert assert_tier_is_right(engine) >= 14  # the recomputed blocks were stored again
    engine.assert_at_rest()


def test_lazy_stores_are_dropped_by_a_reset(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(
        tiny_model, async_scheduling, extra_config={"store": "lazy", "lazy_window": 64}
    )
    request = engine.add(prompt(random.Random(1), 41), 30)
    for _ in range(8):
        engine.step()
    assert engine.requests[request].num_computed_tokens
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    ask(engine, prompt(random.Random(9), 5), 2)  # checks the free queue
    assert readable(engine, request) == []


@pytest.mark.parametrize("drop_stores", [0.0, 1.0], ids=["tier-too-small", "copies-fail"])
def test_lazy_stores_of_an_idle_engine_end(
    tiny_model: Path, async_scheduling: bool, drop_stores: float
) -> None:
    """Each store evicts an earlier one, whose block is still in vLLM's free queue. With a daemon
    this never ended, because puts keep an idle engine stepping."""
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


def test_stale_gpu_blocks_are_not_stored(tiny_model: Path, async_scheduling: bool) -> None:
    """vLLM keeps its own cache while requests run; a hit there is from before the reset."""
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
    ask(engine, ids, 2)  # recomputed
    assert len(readable(engine, first)) == 10
    engine.assert_at_rest()


@pytest.mark.parametrize("kind", ["answers-not-stored", "left-alone"])
def test_half_full_block_at_a_reset_is_not_stored_later(
    tiny_model: Path, async_scheduling: bool, kind: str
) -> None:
    """vLLM sets its hash after the reset, when its request continues; a later request hits it."""
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
    later = ask(engine, ids + play(ids, 30)[0][:20], 2)  # recomputed
    assert readable(engine, later) == [0, 1, 2]
    engine.assert_at_rest()


def test_partly_unusable_tier_uses_the_rest(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=16)
    slab = engine.half.index.geometry.slab_bytes
    # The report of a worker that could pin only a part of its arena.
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


def test_worker_metadata_of_ranks_is_merged() -> None:
    first = TieredKVWorkerMetadata({1: [StoreReport(4)]}, {0: 10})
    second = TieredKVWorkerMetadata({1: [StoreReport(2)], 2: [StoreReport(1)]}, {1: 5})
    both = first.aggregate(second)
    assert both.stores == {1: [StoreReport(4), StoreReport(2)], 2: [StoreReport(1)]}
    assert both.usable_bytes == {0: 10, 1: 5}


@pytest.mark.parametrize("seed", mostly_slow(range(4), 2))
def test_request_that_ends_while_preempted_leaks_nothing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With the role of a producer vLLM frees blocks at once, while steps are in flight."""
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


def test_preempted_request_is_stored_from_its_first_block(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The tier may have evicted its blocks since."""
    engine = ToyEngine(tiny_model, async_scheduling, gpu_blocks=28)
    rng = random.Random(1)
    ids = [engine.add(prompt(rng, 40), 40) for _ in range(2)]  # more than fit
    while not any(engine.requests[request_id].num_preemptions for request_id in ids):
        engine.step()
    engine.half.index.clear()
    engine.run()
    (preempted,) = [n for n in ids if engine.requests[n].num_preemptions]
    full = (engine.requests[preempted].num_tokens - 1) // 4
    assert readable(engine, preempted) == list(range(full))
    engine.assert_at_rest()


def test_step_without_wait_for_save_does_not_hang(tiny_model: Path) -> None:
    """vLLM skips `wait_for_save` on inner pipeline stages with speculation."""
    engine = ToyEngine(tiny_model)
    engine.worker.wait_for_save = lambda: None
    ask(engine, prompt(random.Random(1), 41))
    assert total(engine, names.STORED_BLOCKS) == 0
    assert total(engine, names.DROPPED_BLOCKS, "cpu", DropReason.COPY_FAILED.value) > 0
    engine.assert_at_rest()


def test_reset_while_an_adapter_is_unreadable_succeeds(
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


def test_adapter_of_a_hub_is_uncached_and_logged_once(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM downloads a newer version in the step that loads it, after a hit was planned."""
    fetched = write_adapter(tmp_path / "snapshot", b"1" * 50)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(fetched))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    for _ in range(3):
        engine.add(ids, 3, lora_request=LoRARequest("a", 1, "hub/a"))
        engine.run()
        engine.drop_gpu_cache()
    assert total(engine, names.STORED_BLOCKS) == total(engine, names.HIT_BLOCKS) == 0
    (told,) = [line for line in caplog.messages if "is not cached: vLLM asks a hub" in line]
    assert "give the path of a folder, or set HF_HUB_OFFLINE=1" in told
    engine.assert_at_rest()


def test_abort_between_chunks_stores_only_computed_blocks(
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


def test_sequence_is_not_stored_after_a_dropped_block(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, max_tokens_per_step=16)
    engine.copier.max_delay = 0
    engine.copier.drop_stores = 1.0
    request = engine.add(prompt(random.Random(4), 61), 2)
    engine.run()
    left = readable(engine, request)
    assert left == list(range(len(left)))  # a prefix without gaps
    assert len(left) < 15
    engine.assert_at_rest()


def test_resumable_session_is_uncached(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    ids = prompt(random.Random(1), 41)
    request = engine.add(ids, 2)
    engine.half._requests.clear()
    engine.requests[request].resumable = True
    engine.half.on_new_request(engine.requests[request])
    assert not engine.half._requests
    assert engine.half.get_num_new_matched_tokens(engine.requests[request], 0) == (0, False)


def test_stores_finish_reading_in_their_step_inside_a_multi_connector(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    settled: list[int] = []
    engine.copier.settle_sources = lambda: settled.append(len(engine.copier._stores))
    ask(engine, prompt(random.Random(1), 41))
    assert not settled
    engine.worker.worker_half.wait_for_sources = True
    ask(engine, prompt(random.Random(2), 41))
    assert settled
    assert all(np.array(settled) > 0)  # called while the step's stores are in flight


def test_missing_reports_do_not_keep_the_engine_stepping(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports that arrive very late make nothing readable, but release the slots."""
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
    assert not engine.half.ledger.has_open  # or later transfers would get no time at all
    ask(engine, ids, 3)  # does not wait for the missing stores
    engine.worker.build_connector_worker_meta = report
    for told in filter(None, lost):
        engine.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    while engine.half.ledger.has_open_stores:  # copies that end now are reported with later steps
        ask(engine, ids[:2], 1)
    assert total(engine, names.STORED_BLOCKS) == 0
    engine.assert_at_rest()
    engine.drop_gpu_cache()
    ask(engine, ids, 3)
    assert total(engine, names.STORED_BLOCKS) == 10
    assert assert_tier_is_right(engine)
    engine.assert_at_rest()
