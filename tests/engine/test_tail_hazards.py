"""`reuse_partial_tail` where something comes in between: failures, preemption, resets, adapters,
little room, daemons that hold only a part."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.test_isolation import adapter, replace_files
from tests.engine.test_partial_tail import TAILS, hits, tailed
from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, seeded_prompt, total
from tests.engine.toy_at_daemon import TRANSPORTS, address, engine_at, wait_attached
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_ranks import RankedToyEngine
from tests.patience import mostly_slow
from vllm_tiered_kv.connector.scheduler.partial_tail import Tail
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import names


def tail_state(engine: ToyEngine, request: str) -> Tail:
    tail = engine.half._requests[request].load.tail
    assert tail is not None
    return tail


def storm(engine: ToyEngine, seed: int, resets: bool = True, rounds: int = 60) -> None:
    """Few prompts, some of which end within others, and whatever can happen to them."""
    rng = random.Random(seed)
    asked = [prompt(rng, rng.randrange(2, 45)) for _ in range(5)]
    asked += [ids[: rng.randrange(2, len(ids) + 1)] + prompt(rng, seed % 4) for ids in asked]
    served = {}
    for _ in range(rounds):
        ids, count = rng.choice(asked), rng.randrange(1, 14)
        served[engine.add(ids, count)] = play(ids, count)[0]
        for _ in range(rng.randrange(7)):
            engine.step()
        event = rng.random()
        if event < 0.2:
            engine.scheduler.reset_prefix_cache()
        elif event < 0.24 and resets:
            engine.scheduler.reset_connector_cache()
        elif event < 0.3 and resets and not engine._in_flight:
            with contextlib.suppress(RuntimeError):  # while a load runs beside the steps
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif event < 0.4:
            victim = rng.choice(list(served))
            if not engine.requests[victim].is_finished():
                engine.abort(victim)
    engine.run()
    for request, right in served.items():
        finished = engine.finished[request]
        if finished.status is RequestStatus.FINISHED_ABORTED:
            right = right[: len(finished.tokens)]
        assert finished.tokens == right
    engine.assert_at_rest()
    assert_tier_is_right(engine)


STORMS: dict[str, dict[str, Any]] = {
    "without prefix caching": {"prefix_caching": False},
    "prompts alone": {"extra": {"store_decode": False}},
    "preempted, in chunks": {"gpu_blocks": 26, "max_tokens_per_step": 6, "store_delay": 4},
    "little memory": {"cpu_blocks": 9, "extra": {"eviction": "s3fifo"}},
    "verified": {"extra": {"verify_fraction": 0.5}},
}


@pytest.mark.parametrize("kind", STORMS)
def test_storms(tiny_model: Path, async_scheduling: bool, step_loads: str, kind: str) -> None:
    engine = tailed(tiny_model, async_scheduling, seed=1, **STORMS[kind])
    engine.copier.fail_every = engine.copier.drop_stores = 0.1
    engine.copier.fail_ahead = 0.0 if async_scheduling else 0.1  # such a step is not taken back
    storm(engine, 1)
    engine.close()  # threads that compare


def test_storms_over_ranks(tiny_model: Path, async_scheduling: bool, step_loads: str) -> None:
    engine = RankedToyEngine(tiny_model, async_scheduling, extra_config=TAILS, gpu_blocks=40)
    for copier in engine.copiers:
        copier.drop_stores = 0.1
    storm(engine, 2, resets=False)


def test_tail_is_stored_when_all_of_its_tokens_are_there(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = tailed(tiny_model, async_scheduling, max_tokens_per_step=5)
    request = engine.add(seeded_prompt(1, 23), 1)
    while not engine.requests[request].is_finished():
        engine.step()
        state = engine.half._requests.get(request)
        if state is not None and state.store.has_tail:
            assert engine.requests[request].num_computed_tokens >= 23
    engine.run()
    assert total(engine, names.STORED_BLOCKS) == 6
    assert_tier_is_right(engine)


def test_request_restarted_behind_its_prompt_has_no_tail(tiny_model: Path, step_loads: str) -> None:
    """Where the prompt ended the request has written more: that is another block."""
    engine = tailed(tiny_model)
    ids = seeded_prompt(2, 30)
    request = engine.add(ids, 20)
    while engine.requests[request].num_output_tokens < 1:
        engine.step()
    for _ in range(5):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        before = engine.requests[request].num_output_tokens
        while engine.requests[request].num_output_tokens == before:
            engine.step()
    engine.run()
    assert engine.finished[request].tokens == play(ids, 20)[0]
    assert total(engine, names.HIT_TOKENS) > 0
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_tail_is_one_of_the_blocks_that_are_missed(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = tailed(tiny_model, async_scheduling)
    ids = seeded_prompt(3, 39)
    ask(engine, ids, 1)
    assert total(engine, names.MISS_BLOCKS) == 10
    engine.drop_gpu_cache()
    ask(engine, ids, 1)
    assert total(engine, names.HIT_BLOCKS) == 10
    assert total(engine, names.MISS_BLOCKS) == 10
    ask(engine, [*ids[:37], 3, 4, 5, 6], 1)  # those of 36 tokens are found
    assert total(engine, names.MISS_BLOCKS) == 11


# ---- failures -----------------------------------------------------------------------------------


def test_failed_step_stores_the_tails_of_all_again(tiny_model: Path) -> None:
    """Nothing of that step becomes readable, whoever computed it."""
    engine = tailed(tiny_model, max_tokens_per_step=64)
    failing, other = seeded_prompt(4, 31), seeded_prompt(5, 19)
    ask(engine, failing)
    engine.drop_gpu_cache()
    engine.copier.fail_ahead = 1.0
    engine.add(failing, 3)
    engine.add(other, 8)
    engine.step()
    engine.copier.fail_ahead = 0.0
    engine.run()
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.drop_gpu_cache()
    assert hits(engine, failing) == 30
    assert hits(engine, other) == 18
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_tail_that_was_made_from_bad_blocks_is_forgotten(tiny_model: Path) -> None:
    """Another connector says late that its load has failed: the tail is there by then."""
    engine = tailed(tiny_model)
    ids = seeded_prompt(6, 30)
    request = engine.add(ids, 30)
    tail = None
    while tail is None or engine.half.index.lookup(tail.key) is not Lookup.HIT:
        engine.step()
        tail = tail_state(engine, request)
    output = engine.scheduler.schedule()
    result = engine._execute(output)
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
    result.kv_connector_output.invalid_block_ids = {table[2]}
    engine.scheduler.update_from_output(output, result)
    assert engine.half.index.lookup(tail.key) is Lookup.MISS
    engine.run()
    assert engine.finished[request].tokens == play(ids, 30)[0]
    engine.drop_gpu_cache()
    assert hits(engine, ids) == 29, "it was computed, and stored, again"
    engine.assert_at_rest()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_load_of_a_tail_that_fails_is_computed(
    tiny_model: Path, async_scheduling: bool, on_gpu: bool
) -> None:
    engine = tailed(tiny_model, async_scheduling, extra={"step_loads": "never"})
    ids = seeded_prompt(7, 39)
    ask(engine, ids)
    if not on_gpu:
        engine.drop_gpu_cache()
    engine.copier.fail_every = 1.0
    ask(engine, ids)
    engine.copier.fail_every = 0.0
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.drop_gpu_cache()
    assert hits(engine, ids) == 38
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_tail_of_a_replaced_adapter_is_not_stored(tiny_model: Path, tmp_path: Path) -> None:
    """Its last tokens are computed with the new files, and so is what is read of it."""
    path = adapter(tmp_path / "one", b"one")
    engine = tailed(tiny_model, max_tokens_per_step=8)
    lora = LoRARequest("tune", 1, str(path), load_inplace=True)
    request = engine.add(seeded_prompt(8, 30), 3, lora_request=lora, model="1")
    while engine.requests[request].num_computed_tokens < 16:
        engine.step()
    tail = tail_state(engine, request)
    replace_files(path, b"two")
    engine.run()
    assert engine.half.index.held > 2
    assert engine.half.index.lookup(tail.key) is Lookup.MISS


# ---- daemons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tail_from_a_daemon_is_kept_where_the_other_blocks_are(
    tiny_model: Path, tmp_path: Path, async_scheduling: bool, transport: str
) -> None:
    """Or the next one would find all but the tail here, and ask nobody for that."""
    ids = seeded_prompt(9, 39)
    with DaemonProcess(tmp_path) as daemon:
        at = address(daemon, transport)
        for found in (0, 38):
            engine = engine_at(tiny_model, at, async_scheduling=async_scheduling, extra=TAILS)
            wait_attached(engine, at)
            assert hits(engine, ids, 1) == found
            engine.drop_gpu_cache()
            assert hits(engine, ids, 1) == 38
            engine.assert_at_rest()
            engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_block_that_a_daemons_tail_becomes_is_stored(
    tiny_model: Path, tmp_path: Path, async_scheduling: bool, transport: str
) -> None:
    """No daemon has it: whoever stored the tail said a single token."""
    ids = seeded_prompt(10, 39)
    with DaemonProcess(tmp_path) as daemon:
        at = address(daemon, transport)
        for number in range(2):
            engine = engine_at(tiny_model, at, async_scheduling=async_scheduling, extra=TAILS)
            wait_attached(engine, at)
            assert hits(engine, ids, 8 if number else 1) == 38 * number
            if number:
                engine.drop_gpu_cache()
                assert hits(engine, ids + play(ids, 8)[0], 1) == 44
            engine.assert_at_rest()
            engine.close()


@pytest.mark.parametrize("length", mostly_slow([258, 256, 262], 1))
def test_tail_may_be_where_the_daemon_is_chosen_anew(
    tiny_model: Path, tmp_path: Path, async_scheduling: bool, length: int
) -> None:
    """The 65th block decides about those that follow it, also if it is a tail."""
    ids = seeded_prompt(11, length)
    for name in "ab":
        (tmp_path / name).mkdir()
    with DaemonProcess(tmp_path / "a") as one, DaemonProcess(tmp_path / "b") as other:
        at = [one.endpoint, other.endpoint]
        for number in range(2):
            engine = engine_at(
                tiny_model, at, async_scheduling=async_scheduling, extra=TAILS, gpu_blocks=160
            )
            engine.run()
            assert hits(engine, ids, 1) == (length - 1) * number
            engine.assert_at_rest()
            engine.close()
