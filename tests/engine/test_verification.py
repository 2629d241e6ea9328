"""Verified hits under vLLM's real schedulers, with copies that end when they like.

The toy model has one right value for every position, so a block that was tampered with is the only
one that may be found different, and every other comparison must be equal.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import ask, keys_of, seeded_prompt, total
from tests.engine.toy_at_daemon import REMOTE, TRANSPORTS, address, engine_at, wait_attached
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import eventually, mostly_slow
from vllm_tiered_kv.connector.scheduler import scheduler_half
from vllm_tiered_kv.connector.scheduler.verification import is_chosen
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

CPU = Tier.CPU.value
ALWAYS = {"verify_fraction": 1}


def counts(engine: ToyEngine, tier: str = CPU) -> dict[str, float]:
    kinds = {
        "verified": names.VERIFIED_BLOCKS,
        "inexact": names.INEXACT_BLOCKS,
        "different": names.DIFFERING_BLOCKS,
        "skipped": names.UNVERIFIED_BLOCKS,
    }
    return {kind: total(engine, metric, tier) for kind, metric in kinds.items()}


def assert_at_rest(engine: ToyEngine) -> None:
    engine.assert_at_rest()
    assert not engine.half.ledger.has_open_comparisons
    assert not engine.half.ledger.fence._open
    # Spare slots went back: whatever is in use is readable.
    assert len(engine.half.index.slots()) == len(engine.half.index)


def test_same_requests_are_always_chosen_and_as_many_as_asked_for() -> None:
    ids = [f"chatcmpl-{n}" for n in range(4000)]
    chosen = [i for i in ids if is_chosen(i, 0.25)]
    assert 850 < len(chosen) < 1150
    assert chosen == [i for i in ids if is_chosen(i, 0.25)]
    assert set(chosen) < {i for i in ids if is_chosen(i, 0.5)}
    assert all(is_chosen(i, 1) for i in ids)
    assert not any(is_chosen(i, 0) for i in ids)


def test_engine_without_verification_has_no_verifier(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    assert engine.half.verification is None
    assert engine.worker.worker_half._verifier is None


def test_hit_is_computed_and_found_equal(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=256, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    ask(engine, ids)
    assert counts(engine) == {"verified": 0, "inexact": 0, "different": 0, "skipped": 0}
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert counts(engine) == {"verified": 10, "inexact": 0, "different": 0, "skipped": 0}
    # A verified request counts as computed, not as a hit, nor as a miss.
    assert total(engine, names.HIT_TOKENS) == total(engine, names.LOADED_BLOCKS) == 0
    assert total(engine, names.RECOMPUTED_TOKENS) == 40
    assert total(engine, names.MISS_TOKENS) == 40  # of the first time
    assert_at_rest(engine)
    engine.close()


def test_missing_verdicts_do_not_keep_the_engine_stepping(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Verdicts that arrive very late count for nothing, but release pins and spare slots."""
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    ask(engine, ids)
    engine.drop_gpu_cache()
    timeout = engine.half._config.remote_load_timeout
    monkeypatch.setattr(scheduler_half, "_REPORT_TIMEOUT_S", 0.02 - timeout)
    lost = []
    report = engine.worker.build_connector_worker_meta
    engine.worker.build_connector_worker_meta = lambda: lost.append(report())
    ask(engine, ids)
    assert not engine.half.ledger.has_open_comparisons
    assert caplog.text.count("workers sent no report") == 1
    assert counts(engine)["skipped"] == 10
    engine.worker.build_connector_worker_meta = report
    for told in filter(None, lost):
        engine.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=told))
    while engine.half.ledger._comparisons:  # what ends now is reported with later steps
        ask(engine, ids[:2], 1)
    assert counts(engine) == {"verified": 0, "inexact": 0, "different": 0, "skipped": 10}
    assert_at_rest(engine)
    engine.close()


@pytest.mark.parametrize("windows", [(None, 10), (10,)], ids=["hybrid", "window"])
def test_blocks_of_windows_are_compared_too(
    tiny_model: Path, async_scheduling: bool, windows: tuple[int | None, ...]
) -> None:
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        windows=windows,
        gpu_blocks=128,
        cpu_blocks=256,
        max_tokens_per_step=16,  # earlier blocks of the window are gone by the next step
        extra_config=ALWAYS,
    )
    ids = seeded_prompt(1)
    request = ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids)
    first = counts(engine)
    assert first["verified"] >= 10 * len(windows) - 1
    assert first["different"] == first["inexact"] == 0
    last = keys_of(engine, request)[-1][9]
    engine.arena[engine.half.index.slot_of(last), 1, 2] ^= 1
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert counts(engine)["different"] == 1
    assert not engine.half.index.match_prefix([last])
    assert_at_rest(engine)
    engine.close()


def test_bad_block_is_named_counted_and_evicted(
    tiny_model: Path, async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=256, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    (keys,) = keys_of(engine, ask(engine, ids))
    engine.arena[engine.half.index.slot_of(keys[3]), 1, 2] ^= 1
    engine.drop_gpu_cache()
    with caplog.at_level(logging.WARNING, "vllm_tiered_kv"):
        ask(engine, ids)
    assert counts(engine) == {"verified": 10, "inexact": 0, "different": 1, "skipped": 0}
    (line,) = [r.getMessage() for r in caplog.records if "verification" in r.getMessage()]
    assert keys[3].hex() in line
    assert "1 block(s) of the cpu tier" in line
    assert engine.half.index.match_prefix(keys) == 3  # what follows it is a miss by nature
    assert_at_rest(engine)
    # The next one stores it anew, and the chain is whole again.
    engine.drop_gpu_cache()
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids)
    assert counts(engine)["different"] == 1
    assert engine.half.index.match_prefix(keys) >= 10
    assert_at_rest(engine)
    engine.close()


def test_every_bad_block_is_named(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    (keys,) = keys_of(engine, ask(engine, ids))
    for key in keys[:10]:
        engine.arena[engine.half.index.slot_of(key), 1, 2] ^= 1
    engine.drop_gpu_cache()
    with caplog.at_level(logging.WARNING, "vllm_tiered_kv"):
        ask(engine, ids)
    told = "\n".join(r.getMessage() for r in caplog.records if "verification" in r.getMessage())
    assert [key for key in keys[:10] if key.hex() not in told] == []
    engine.close()


def test_daemon_that_cannot_be_asked_to_forget_is_named(
    tiny_model: Path, daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    toy = engine_at(tiny_model, daemon.endpoint)
    toy.run()
    daemon.kill()
    with caplog.at_level(logging.WARNING, "vllm_tiered_kv"):
        toy.half.remote._lookups.delete([BlockKey(bytes(17))])
        eventually(lambda: "may serve them again" in caplog.text)
    toy.close()


def test_only_chosen_requests_are_computed(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config={"verify_fraction": 0.5})
    ids = seeded_prompt(1)
    ask(engine, ids)
    chosen = 0
    for number in range(1, 21):
        engine.drop_gpu_cache()
        ask(engine, ids)
        chosen += is_chosen(f"r{number}", 0.5)
    assert 0 < chosen < 20
    assert counts(engine) == {"verified": 10 * chosen, "inexact": 0, "different": 0, "skipped": 0}
    assert total(engine, names.HIT_BLOCKS) == 10 * (20 - chosen)
    assert_at_rest(engine)
    engine.close()


def test_spare_slots_are_few_and_the_rest_follows_in_later_steps(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """An eighth of 32 slots: ten blocks take several rounds. They must not take longer than the
    request does, so each of them ends in the step that begins it."""
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=32, extra_config=ALWAYS)
    verifier = engine.worker.worker_half._verifier
    really_copied = verifier.copied

    def copied(*arguments: Any) -> bool:
        taken = really_copied(*arguments)
        if taken:
            eventually(lambda: not verifier._done.empty())
        return taken

    verifier.copied = copied
    ids = seeded_prompt(1)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids, 60)
    found = counts(engine)
    assert found["verified"] + found["skipped"] == 10
    assert found["verified"] >= 6
    assert found["different"] == 0
    assert_at_rest(engine)
    engine.close()


def test_request_that_ends_too_soon_leaves_blocks_unverified(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=32, extra_config=ALWAYS)
    engine.copier.max_delay = 8
    ids = seeded_prompt(1)
    ask(engine, ids)
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    found = counts(engine)
    assert found["skipped"] > 0
    assert found["verified"] + found["skipped"] == 10
    assert_at_rest(engine)
    engine.close()


def test_request_with_lost_adapter_reports_no_mismatch(tiny_model: Path) -> None:
    """It computes with another one by then."""
    engine = ToyEngine(tiny_model, cpu_blocks=256, max_tokens_per_step=8, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    ask(engine, ids)
    engine.drop_gpu_cache()
    request = engine.add(ids, 4)
    engine.step()
    engine.half._requests[request].lost_adapter = True
    engine.run()
    assert counts(engine) == {"verified": 2, "inexact": 0, "different": 0, "skipped": 8}
    assert_at_rest(engine)
    engine.close()


def test_idle_engine_goes_on_until_all_is_compared(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config=ALWAYS)
    ids = seeded_prompt(1)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.copier.max_delay = 100
    ask(engine, ids, 1)
    assert counts(engine)["verified"] == 10
    assert_at_rest(engine)
    engine.close()


LONG = seeded_prompt(1, 121)


def in_its_first_chunk(model: Path) -> tuple[ToyEngine, str]:
    """A verified request for LONG, after one of four steps."""
    engine = ToyEngine(model, cpu_blocks=256, extra_config=ALWAYS)
    ask(engine, LONG)
    engine.drop_gpu_cache()
    request = engine.add(LONG, 6)
    engine.step()
    return engine, request


def test_aborted_request_leaves_nothing_behind(tiny_model: Path) -> None:
    engine, request = in_its_first_chunk(tiny_model)
    assert engine.half.ledger.has_open_comparisons
    engine.abort(request)
    engine.run()
    found = counts(engine)
    assert found["verified"] == 8
    assert found["skipped"] == 22
    assert_at_rest(engine)
    engine.close()


def test_preempted_request_is_loaded_the_second_time(tiny_model: Path) -> None:
    engine, request = in_its_first_chunk(tiny_model)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.finished[request].tokens == play(LONG, 6)[0]
    assert counts(engine) == {"verified": 8, "inexact": 0, "different": 0, "skipped": 22}
    assert total(engine, names.HIT_TOKENS) == 120
    assert_at_rest(engine)
    engine.close()


def test_after_a_reset_nothing_is_believed(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config=ALWAYS)
    engine.copier.max_delay = 8
    ids = seeded_prompt(1, 121)
    (keys,) = keys_of(engine, ask(engine, ids))
    for key in keys:
        engine.arena[engine.half.index.slot_of(key)] ^= 1
    engine.drop_gpu_cache()
    engine.add(ids, 6)
    engine.step()
    assert engine.half.ledger.has_open_comparisons
    engine.scheduler.connector.reset_cache()
    engine.run()
    assert counts(engine) == {"verified": 0, "inexact": 0, "different": 0, "skipped": 30}
    assert_at_rest(engine)
    engine.close()


def test_blocks_reported_invalid_to_vllm_report_no_mismatch(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, cpu_blocks=256, extra_config=ALWAYS)
    engine.copier.max_delay = 8
    ids = seeded_prompt(1)
    (keys,) = keys_of(engine, ask(engine, ids))
    for key in keys:
        engine.arena[engine.half.index.slot_of(key)] ^= 1  # as if the GPU's were the wrong ones
    engine.drop_gpu_cache()
    engine.add(ids, 6)
    engine.step()
    assert engine.half.ledger.has_open_comparisons
    engine.half._recover_from_invalid_blocks({0})
    engine.run()
    assert counts(engine)["different"] == 0
    assert engine.half.index.match_prefix(keys) >= 10
    assert_at_rest(engine)
    engine.close()


@pytest.mark.parametrize("seed", mostly_slow(range(8), 2))
def test_random_events_leak_nothing_and_report_no_mismatch(
    tiny_model: Path, seed: int, async_scheduling: bool
) -> None:
    """Random prompts, aborts, preemptions, resets, failed loads and dropped copies."""
    rng = random.Random(seed)
    engine = ToyEngine(
        tiny_model,
        async_scheduling,
        gpu_blocks=rng.choice([28, 40, 64]),
        cpu_blocks=rng.choice([24, 64, 200]),
        store_delay=rng.choice([None, 2, 4]),
        max_tokens_per_step=rng.choice([16, 32, 64]),
        extra_config={
            "verify_fraction": rng.choice([0.5, 0.8, 1]),
            "step_loads": rng.choice(["auto", "never"]),
            "store": rng.choice(["eager", "lazy"]),
        },
        seed=seed,
    )
    engine.copier.fail_every = 0.1
    engine.copier.drop_stores = 0.1
    if not async_scheduling:  # with it, such a failure ends the engine
        engine.copier.fail_ahead = 0.1
    stems = [seeded_prompt(100 + n, rng.randrange(8, 60)) for n in range(3)]
    asked: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for _ in range(100):
        if rng.random() < 0.5:
            ids = rng.choice(stems) + seeded_prompt(rng.randrange(6), rng.randrange(1, 20))
            asked[engine.add(ids, 12)] = ids
        if asked and rng.random() < 0.1:
            victim = rng.choice(list(asked))
            if victim not in engine.finished:
                engine.abort(victim)
                aborted.add(victim)
        if rng.random() < 0.04:
            engine.land()
            engine.scheduler.connector.reset_cache()
        if rng.random() < 0.15:
            engine.run()
            engine.drop_gpu_cache()
        for _ in range(rng.randrange(5)):
            engine.step()
    engine.run()
    for request_id, ids in asked.items():
        if request_id not in aborted:
            assert engine.finished[request_id].tokens == play(ids, 12)[0]
    assert total(engine, names.DIFFERING_BLOCKS) == 0
    assert_at_rest(engine)
    assert total(engine, names.VERIFIED_BLOCKS) > 0
    print(seed, counts(engine))
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_of_a_daemon_are_verified_and_bad_ones_deleted_there(
    tiny_model: Path,
    daemon: DaemonProcess,
    transport: str,
    async_scheduling: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = address(daemon, transport)
    ids = seeded_prompt(1)
    # A block is changed after it was computed and before it is sent: its checksum is right.
    first = engine_at(tiny_model, at, async_scheduling=async_scheduling)
    _tamper_before_sending(first, position=3)
    (keys,) = keys_of(first, ask(first, ids))
    first.close()

    second = engine_at(
        tiny_model, at, async_scheduling=async_scheduling, cpu_blocks=256, extra=ALWAYS
    )
    wait_attached(second, at)
    with caplog.at_level(logging.WARNING, "vllm_tiered_kv"):
        ask(second, ids)
    assert counts(second, REMOTE) == {"verified": 10, "inexact": 0, "different": 1, "skipped": 0}
    assert total(second, names.HIT_TOKENS) == 0
    (line,) = [r.getMessage() for r in caplog.records if "verification" in r.getMessage()]
    assert keys[3].hex() in line
    assert "1 block(s) of the remote tier" in line
    assert_at_rest(second)
    lookups = second.half.remote._lookups
    (store,) = lookups._cluster.stores.values()
    end = time.monotonic() + 30
    while store.match_all(keys, lookups._ranks).count != 3:
        assert time.monotonic() < end, "the daemon still has the bad block"
        time.sleep(0.01)
    second.close()


def _tamper_before_sending(engine: ToyEngine, position: int) -> None:
    offer = engine.half.remote.puts.offer

    def tampered(stored: list[tuple[bytes, list[int]]]) -> None:
        for slot in (slot for _, slots in stored for slot in slots):
            key, _ = engine.half.index.block_in(slot)
            request = next(iter(engine.requests))
            if key == keys_of(engine, request)[0][position]:
                engine.arena[slot, 0, 0] ^= 1 << 40
        offer(stored)

    engine.half.remote.puts.offer = tampered
