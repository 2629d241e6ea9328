"""Failed loads: vLLM's own recovery is not enough.

vLLM restarts the requests, but keeps blocks that were never loaded in its prefix cache, and keeps
reservations of loads that have ended. Each of these cases once caused a wrong read, a wrong block
in the tier, or a hang.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.engine.toy_asking import (
    ask,
    assert_tier_is_right,
    keys_of,
    prompt,
    seeded_prompt,
    total,
)
from tests.engine.toy_at_daemon import REMOTE, engine_at
from tests.engine.toy_engine import ToyEngine, play
from tests.remote.faulty_daemon import FaultyDaemon, forgetful
from vllm_tiered_kv.connector.scheduler import step_load_policy
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

ENDED = pytest.mark.parametrize("ended", [False, True], ids=["goes-on", "aborted"])


def warm(engine: ToyEngine, ids: list[int]) -> None:
    """Puts the blocks of the prompt into the tier and drops them from the GPU."""
    ask(engine, ids)
    engine.drop_gpu_cache()


def step_that_fails(engine: ToyEngine) -> None:
    """Runs a step whose step loads fail."""
    engine.copier.fail_ahead = 1.0
    output = engine.scheduler.schedule()
    assert output.has_sync_kv_loads
    engine.scheduler.update_from_output(output, engine._execute(output))
    engine.copier.fail_ahead = 0.0
    assert total(engine, names.LOAD_FAILURES) == 1


def answered(engine: ToyEngine, ids: list[int]) -> str:
    """Adds a request and waits for the answer to its daemon lookup."""
    request = engine.add(ids, 3)
    engine.half._requests[request].remote.lookup.future.result(timeout=30)
    return request


def wait_for_loads(engine: ToyEngine, count: int) -> None:
    """Waits until so many loads have ended, without a step that reports them."""
    done = engine.worker.worker_half._remote.loader._done
    end = time.monotonic() + 30
    while done.qsize() < count:
        assert time.monotonic() < end, "loads did not end"
        time.sleep(0.01)


def cached(engine: ToyEngine) -> set[int]:
    """GPU blocks in vLLM's prefix cache."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    return {block.block_id for block in blocks if block.block_hash is not None}


# ---- blocks that the failed step read and wrote -------------------------------------------------


@pytest.mark.parametrize("tokens", [31, 32])
def test_recomputed_blocks_are_stored_again(tiny_model: Path, tokens: int) -> None:
    """The other request took the blocks of the failed load for GPU hits."""
    engine = ToyEngine(tiny_model, max_tokens_per_step=64)
    ids = seeded_prompt(2, tokens)
    warm(engine, ids)
    failing, other = engine.add(ids, 1), engine.add(ids, 1)
    (keys,) = keys_of(engine, other)
    step_that_fails(engine)
    engine.abort(failing)
    engine.run()
    assert engine.finished[other].tokens == play(ids, 1)[0]
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)
    assert all(engine.half.index.lookup(key) is Lookup.HIT for key in keys)


def steps_of_half_a_prompt(model: Path) -> ToyEngine:
    """An engine whose steps have several requests, each of which needs several steps."""
    return ToyEngine(model, max_tokens_per_step=16, engine_args={"long_prefill_token_threshold": 4})


@ENDED
def test_new_request_does_not_read_blocks_that_failed_to_load(
    tiny_model: Path, ended: bool
) -> None:
    """vLLM keeps such blocks in its prefix cache and lets one request recompute them, which may
    take many steps or never happen."""
    engine = steps_of_half_a_prompt(tiny_model)
    rng = random.Random(5)
    shared = prompt(rng, 41)
    warm(engine, shared)
    engine.copier.fail_ahead = 1.0
    failing = engine.add(shared, 5)
    engine.step()
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.copier.fail_ahead = 0.0
    engine.step()
    if ended:
        engine.abort(failing)
    ids = shared + prompt(rng, 4)
    other = engine.add(ids, 5)
    engine.run()
    assert engine.finished[other].tokens == play(ids, 5)[0]
    assert ended or engine.finished[failing].tokens == play(shared, 5)[0]
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@ENDED
def test_requests_that_share_a_failed_load_recompute_it(tiny_model: Path, ended: bool) -> None:
    """vLLM restarts only the first one and lets the others continue after the shared blocks. One of
    them is uncached."""
    engine = steps_of_half_a_prompt(tiny_model)
    rng = random.Random(6)
    shared = prompt(rng, 41)
    warm(engine, shared)
    engine.copier.fail_ahead = 1.0
    prompts = [shared, shared + prompt(rng, 3), shared + prompt(rng, 2)]
    first, second = engine.add(prompts[0], 5), engine.add(prompts[1], 5)
    third = engine.add(prompts[2], 5, resumable=True)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {first: 1, second: 4, third: 3}
    engine.scheduler.update_from_output(output, engine._execute(output))
    if ended:
        engine.abort(first)
    engine.requests[third].resumable = False  # so that it ends
    engine.run()
    for request, ids in list(zip((first, second, third), prompts, strict=True))[ended:]:
        assert engine.finished[request].tokens == play(ids, 5)[0]
    assert total(engine, names.LOAD_FAILURES) == 1
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix-cache", "no-prefix-cache"])
def test_blocks_computed_from_a_failed_load_are_not_stored_after_abort(
    tiny_model: Path, prefix_caching: bool
) -> None:
    engine = ToyEngine(tiny_model, prefix_caching=prefix_caching)
    engine.copier.max_delay = 0
    rng = random.Random(7)
    stem = prompt(rng, 21)
    ids = stem + prompt(rng, 11)
    ask(engine, stem, 1)
    if prefix_caching:
        engine.drop_gpu_cache()
    engine.copier.fail_ahead = 1.0
    failing = engine.add(ids, 5)
    output = engine.scheduler.schedule()
    assert output.has_sync_kv_loads
    result = engine._execute(output)
    engine.abort(failing)  # while its step is in flight
    engine.scheduler.update_from_output(output, result)
    engine.copier.fail_ahead = 0.0
    engine.run()
    assert_tier_is_right(engine)
    for _ in range(2):  # the GPU's prefix cache is right too
        ask(engine, ids, 5)
    engine.assert_at_rest()
    assert assert_tier_is_right(engine)


def test_stale_blocks_are_not_stored_after_a_failed_step(tiny_model: Path) -> None:
    """Stale blocks are recognised by their hashes, and a failed step removes all hashes."""
    engine = ToyEngine(tiny_model, gpu_blocks=128, cpu_blocks=128)
    rng = random.Random(1)
    old, fresh = prompt(rng, 33), prompt(rng, 41)
    ask(engine, old, 1)
    engine.add(prompt(rng, 9), 8)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)  # a request runs
    engine.run()
    before = cached(engine)
    ask(engine, fresh, 1)
    engine.scheduler.kv_cache_manager.evict_blocks(cached(engine) - before)
    engine.add(fresh, 3)
    stale = engine.add(old, 14)  # all of it is on the GPU
    step_that_fails(engine)
    engine.run()
    assert engine.half.index.match_prefix(keys_of(engine, stale)[0]) == 0
    engine.assert_at_rest()


# ---- reservations that block others -------------------------------------------------------------


def test_long_request_whose_daemon_failed_is_admitted_again(tiny_model: Path) -> None:
    """vLLM keeps its reservation for the failed load. A second asynchronous load, from the CPU
    tier, would need as many blocks again, which the GPU does not have."""
    with FaultyDaemon() as daemon:
        toy = engine_at(tiny_model, daemon.address, gpu_blocks=28, extra={"step_loads": "never"})
        asked = seeded_prompt(2, 65)
        ask(toy, asked[:49])
        toy.drop_gpu_cache()
        daemon.fault = forgetful
        others = [seeded_prompt(number, 13) for number in (3, 4)]
        names_of_others = [toy.add(ids, 3) for ids in others]
        ask(toy, asked)
        for name, ids in zip(names_of_others, others, strict=True):
            assert toy.finished[name].tokens == play(ids, 3)[0]
        assert total(toy, names.LOAD_FAILURES, REMOTE) >= 1
        toy.assert_at_rest()
        toy.close()


def test_asynchronous_load_does_not_build_on_a_step_load(tiny_model: Path) -> None:
    """vLLM would restart it while its blocks are still reserved, and never admit it again."""
    asked = seeded_prompt(2, 65)
    with FaultyDaemon() as daemon:
        first = engine_at(tiny_model, daemon.address)
        ask(first, asked, 3)
        first.close()
        engine = engine_at(tiny_model, daemon.address, gpu_blocks=28)
        warm(engine, asked[:33])
        engine.add(asked[:33], 3)
        long = answered(engine, asked)
        step_that_fails(engine)
        engine.run()
        assert engine.finished[long].tokens == play(asked, 3)[0]
        engine.assert_at_rest()
        engine.close()


def test_asynchronous_load_is_admitted_between_endless_step_loads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step loads belong to an endless sequence of requests with higher priority."""
    monkeypatch.setattr(step_load_policy, "_MAX_BYTES_PER_STEP", 1)
    engine = ToyEngine(
        tiny_model, gpu_blocks=128, cpu_blocks=256, engine_args={"scheduling_policy": "priority"}
    )
    rng = random.Random(3)
    stem = prompt(rng, 21)
    waiting = stem + prompt(rng, 20)
    others = [prompt(rng, 21) for _ in range(20)]
    for ids in (waiting, *others):
        ask(engine, ids, 1)
    engine.drop_gpu_cache()
    ask(engine, stem, 1)
    last = engine.add(waiting, 3, priority=9)
    for ids in others:
        engine.add(ids, 1, priority=0)
        engine.step()
        if engine.half.ledger.is_loading(last) or last in engine.reported_loads:
            break
    else:
        pytest.fail("it was never loaded")
    engine.run()
    assert engine.finished[last].tokens == play(waiting, 3)[0]
    engine.assert_at_rest()


def test_loads_that_share_failed_blocks_do_not_deadlock(tiny_model: Path) -> None:
    """Two loads end in the same step. The first request would need the shared blocks a second time,
    but the second one holds them and is behind it in the queue."""
    shared = seeded_prompt(2, 32)
    prompts = [shared + seeded_prompt(seed, 17) for seed in (3, 4)]
    with FaultyDaemon() as daemon:
        first = engine_at(tiny_model, daemon.address)
        for ids in prompts:
            ask(first, ids, 3)
        first.close()
        engine = engine_at(tiny_model, daemon.address, gpu_blocks=22)
        warm(engine, [*shared, 5])
        computing = engine.add([*shared, 5], 3)
        asked = [answered(engine, ids) for ids in prompts]
        daemon.fault = forgetful  # a failed request is computed without another lookup
        daemon.delay = lambda _: 0.2  # so that no load ends within the step
        step_that_fails(engine)
        engine.abort(computing)  # or they would share the blocks it recomputes
        wait_for_loads(engine, sum(map(engine.half.ledger.is_loading, asked)))
        engine.run()
        for request, ids in zip(asked, prompts, strict=True):
            assert engine.finished[request].tokens == play(ids, 3)[0]
        engine.assert_at_rest()
        engine.close()


def window_engine(model: Path, async_scheduling: bool, gpu_blocks: int, **more) -> ToyEngine:
    """An engine whose windows need two blocks if loaded, and many more if computed."""
    return ToyEngine(
        model, async_scheduling, gpu_blocks=gpu_blocks, cpu_blocks=256, windows=(None, 8), **more
    )


def warm_prompts(engine: ToyEngine, count: int) -> list[list[int]]:
    prompts = [seeded_prompt(seed, 65) for seed in range(count)]
    for ids in prompts:
        warm(engine, ids)
    return prompts


@pytest.mark.parametrize(("async_scheduling", "gpu_blocks"), [(False, 41), (True, 47)])
def test_windowed_request_after_failed_load_does_not_block_the_queue(
    tiny_model: Path, async_scheduling: bool, gpu_blocks: int
) -> None:
    """vLLM considers no request behind one that it believes to hold blocks and that needs more.
    This one has lost its blocks, and the one behind it holds those it needs."""
    engine = window_engine(tiny_model, async_scheduling, gpu_blocks)
    prompts = warm_prompts(engine, 2)
    asked = [engine.add(ids, 3) for ids in prompts]
    engine.copier.fail_loads_of = {asked[0]}
    engine.run(limit=100)
    assert sorted(engine.reported_loads) == asked
    for request, ids in zip(asked, prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 3)[0]
    engine.assert_at_rest()


def test_load_does_not_take_blocks_reserved_for_a_failed_request(tiny_model: Path) -> None:
    """vLLM reserves blocks for the full length of a request whose load failed. It runs only after
    the requests with higher priority are admitted."""
    engine = window_engine(
        tiny_model, False, 41, engine_args={"scheduling_policy": "priority"}, max_seqs=1
    )
    prompts = warm_prompts(engine, 3)
    asked = [engine.add(ids, 3, priority=9) for ids in prompts[:2]]
    engine.copier.fail_loads_of = {asked[0]}
    for _ in range(30):
        if engine.requests[asked[1]].status is RequestStatus.RUNNING:
            break
        engine.step()
    assert engine.requests[asked[0]].status is RequestStatus.WAITING
    asked.append(engine.add(prompts[2], 3, priority=0))
    engine.run(limit=100)
    for request, ids in zip(asked, prompts, strict=True):
        assert engine.finished[request].tokens == play(ids, 3)[0]
    engine.assert_at_rest()


def test_failed_request_that_is_aborted_does_not_forbid_loads(tiny_model: Path) -> None:
    """Asynchronous loads of others begin again when it has been computed, or is gone."""
    engine = window_engine(
        tiny_model, False, 41, engine_args={"scheduling_policy": "priority"}, max_seqs=1
    )
    prompts = warm_prompts(engine, 3)
    asked = [engine.add(ids, 3, priority=9) for ids in prompts[:2]]
    engine.copier.fail_loads_of = {asked[0]}
    for _ in range(30):
        if engine.requests[asked[1]].status is RequestStatus.RUNNING:
            break
        engine.step()
    assert engine.requests[asked[0]].status is RequestStatus.WAITING
    engine.abort(asked[0])
    last = engine.add(prompts[2], 3)
    engine.run(limit=100)
    assert last in engine.reported_loads
    assert engine.finished[last].tokens == play(prompts[2], 3)[0]
    engine.assert_at_rest()


@pytest.mark.parametrize("by_block", [False, True], ids=["by-request", "by-block"])
def test_failed_load_of_another_connector_does_not_block_ours(
    tiny_model: Path, by_block: bool
) -> None:
    """Inside a MultiConnector vLLM has reserved blocks for the other connector's load. As long as
    no step has read them, no other block is dropped."""
    asked, bystander = seeded_prompt(2, 65), seeded_prompt(3, 21)
    with FaultyDaemon() as daemon:
        first = engine_at(tiny_model, daemon.address)
        ask(first, asked, 3)
        first.close()
        engine = engine_at(tiny_model, daemon.address, gpu_blocks=28)
        ask(engine, bystander, 1)
        connector = engine.scheduler.connector
        matched, allocated = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
        )
        connector.get_num_new_matched_tokens = lambda *_: (64, True)
        connector.update_state_after_alloc = lambda request, blocks, _: allocated(
            request, blocks, 0
        )
        request = engine.add(asked, 3)
        output = engine.scheduler.schedule()
        connector.get_num_new_matched_tokens = matched
        connector.update_state_after_alloc = allocated
        assert engine.requests[request].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        result = engine._execute(output)
        reported = result.kv_connector_output
        reported.finished_recving = {request}
        if by_block:
            (table,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
            reported.invalid_block_ids = {table[0]}
        else:
            reported.failed_recving = {request}
        before = cached(engine)
        engine.scheduler.update_from_output(output, result)
        assert cached(engine) == before != set()
        engine.run()
        assert engine.finished[request].tokens == play(asked, 3)[0]
        engine.assert_at_rest()
        engine.close()


def test_reset_keeps_recorded_failures(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, extra_config={"step_loads": "never"})
    ids = seeded_prompt(1, 41)
    warm(engine, ids)
    request = engine.add(ids, 3)
    engine.copier.fail_loads_of = {request}
    while not total(engine, names.LOAD_FAILURES):
        engine.step()
    assert engine.scheduler.reset_connector_cache()
    state = engine.half._requests[request]
    assert state.load.has_failed
    assert state.load.keeps_reservation
    engine.run()
    assert engine.finished[request].tokens == play(ids, 3)[0]
    engine.assert_at_rest()
