"""Ends that come at a bad moment: aborts, resets and shutdown at every stage of a load or store."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.conformance.contract_engine import LOADING, ContractEngine
from tests.engine.toy_asking import seeded_prompt
from vllm_tiered_kv.core.vllm_releases import parse_version
from vllm_tiered_kv.metrics import names

IDS = seeded_prompt(1, 41)


def warm(tiny_model: Path, async_scheduling: bool, **settings: int) -> ContractEngine:
    """An engine whose tier holds ten blocks of IDS, and whose GPU holds none."""
    engine = ContractEngine(tiny_model, async_scheduling, **settings)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    return engine


@pytest.mark.usefixtures("beside_loads")
def test_abort_while_a_load_is_under_way(tiny_model: Path, async_scheduling: bool) -> None:
    """vLLM keeps the blocks until the load is reported: it still writes into them."""
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 10
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    blocks = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
    engine.abort(request_id)
    assert request_id in engine.scheduler.requests
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].ref_cnt for block in blocks)
    assert engine.scheduler.has_requests(), "an idle engine would never hear of the end"
    engine.run()
    assert engine.reported_loads == [request_id]
    assert engine.finished[request_id].tokens == []
    engine.assert_conforms()
    engine.ask(IDS)


@pytest.mark.usefixtures("beside_loads")
def test_abort_of_a_load_that_has_just_ended(tiny_model: Path, async_scheduling: bool) -> None:
    """Reported, but not yet scheduled: nothing may be reported a second time."""
    engine = warm(tiny_model, async_scheduling)
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    while request_id not in engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
    assert engine.requests[request_id].status is LOADING
    engine.abort(request_id)
    engine.run()
    engine.assert_conforms()
    engine.ask(IDS)


@pytest.mark.usefixtures("beside_loads")
def test_abort_between_a_load_s_end_and_its_report(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The worker has reported it, the scheduler aborts it before it reads the report."""
    engine = warm(tiny_model, async_scheduling)
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    while request_id not in engine.reported_loads:
        output = engine.scheduler.schedule()
        executed = engine._execute(output)
        if request_id in engine.reported_loads:
            engine.abort(request_id)
        engine._in_flight.append((output, executed))
        engine.land()
    engine.run()
    assert engine.reported_loads == [request_id]
    engine.assert_conforms()
    engine.ask(IDS)


@pytest.mark.usefixtures("step_loads")
def test_abort_in_the_step_that_ends_a_request(tiny_model: Path, async_scheduling: bool) -> None:
    """The step that samples the last token is under way; both ends come together."""
    engine = warm(tiny_model, async_scheduling)
    for count in range(1, 6):
        engine.drop_gpu_cache()
        request_id = engine.add(IDS, count)
        request = engine.requests[request_id]
        while request.num_output_tokens < count - 1 or not engine.computed[request_id]:
            engine.step()
        if not request.is_finished():
            output = engine.scheduler.schedule()
            engine._in_flight.append((output, engine._execute(output)))
            engine.abort(request_id)
            engine.land()
        engine.run()
        engine.assert_said(request_id, IDS, count)
        engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_abort_after_any_number_of_steps(tiny_model: Path, async_scheduling: bool) -> None:
    engine = warm(tiny_model, async_scheduling, gpu_blocks=128)
    engine.copier.max_delay = 5
    for steps in range(14):
        engine.drop_gpu_cache()
        twins = [engine.add(IDS, 5) for _ in range(2)]
        for _ in range(steps):
            engine.step()
        if not engine.requests[twins[0]].is_finished():
            engine.abort(twins[0])
        engine.run()
        for request_id in twins:
            engine.assert_said(request_id, IDS, 5)
        engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_all_aborted_at_once(tiny_model: Path, async_scheduling: bool) -> None:
    engine = warm(tiny_model, async_scheduling, gpu_blocks=128)
    engine.copier.max_delay = 6
    asked = [engine.add(IDS[: 20 + 4 * n], 8) for n in range(5)]
    for _ in range(3):
        engine.step()
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert all(engine.requests[r].status is RequestStatus.FINISHED_ABORTED for r in asked)
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_reset_of_prefix_cache_and_connector_while_a_load_is_under_way(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """The load was planned before the reset and ends after it; what follows finds nothing."""
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 8
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    # vLLM cannot reset its own cache while a load holds blocks, and says so; the connector can.
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert engine.reported_loads == [request_id]
    engine.assert_said(request_id, IDS)
    engine.assert_conforms()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    hits = engine.half.recorder.total(names.HIT_TOKENS)
    engine.ask(IDS)
    assert engine.half.recorder.total(names.HIT_TOKENS) == hits
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_pause_that_keeps_requests_lasts_until_loads_have_ended(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """Then nothing writes to the GPU any more. vLLM keeps the blocks of the request all the same,
    so it cannot clear its cache, and says so before it comes to the connector's."""
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 8
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.run()
    assert engine.reported_loads == [request_id]
    assert not engine.half.ledger.has_open
    readable = engine.half.index.used_bytes
    assert readable
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.half.index.used_bytes == readable
    # The connector's alone can be cleared at any time,
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert not engine.half.index.used_bytes
    # and everything once the request has run.
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.run()
    engine.assert_said(request_id, IDS)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
@pytest.mark.parametrize("aborts", [True, False], ids=["abort", "wait"])
def test_other_pauses_end_with_everything_cleared(
    tiny_model: Path, async_scheduling: bool, aborts: bool
) -> None:
    engine = warm(tiny_model, async_scheduling)
    if not aborts and (parse_version(vllm.__version__) or (9, 9)) < (0, 32):
        pytest.skip("before vLLM 0.32 a request that loads does not run on in a pause that waits")
    engine.copier.max_delay = 8
    request_id = engine.add(IDS, 6)
    engine.until_loading(request_id)
    if aborts:
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.half.index.used_bytes
    engine.assert_conforms()


def test_reset_of_running_requests_with_a_step_under_way(tiny_model: Path) -> None:
    """With any connector that loads, vLLM frees blocks only when the steps that may write to them
    have ended. It has no connector's cache cleared either; when they have, all can be."""
    engine = warm(tiny_model, True)
    request_id = engine.add(IDS, 12)
    while not engine.requests[request_id].num_output_tokens or not engine._in_flight:
        engine.step()
    readable = engine.half.index.used_bytes
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.half.index.used_bytes == readable > 0
    engine.land()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not engine.half.index.used_bytes
    engine.run()
    engine.assert_said(request_id, IDS, 12)
    engine.assert_conforms()


@pytest.mark.usefixtures("step_loads")
def test_reset_of_running_requests(tiny_model: Path, async_scheduling: bool) -> None:
    """vLLM preempts them all, and they start over in the new epoch."""
    engine = warm(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=64)
    asked = [(engine.add(ids, 12), ids) for ids in (IDS, seeded_prompt(2, 30), IDS[:20])]
    while any(engine.requests[r].num_output_tokens < 2 for r, _ in asked):
        engine.step()
    engine.land()
    answers = len(engine.calls.asked)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    assert engine.calls.asked[answers][1] == 0, "found what was stored before the reset"
    assert all(engine.requests[r].num_preemptions for r, _ in asked)
    for request_id, ids in asked:
        engine.assert_said(request_id, ids, 12)
    engine.assert_conforms()


def test_shutdown_twice_and_with_work_left(tiny_model: Path, async_scheduling: bool) -> None:
    """vLLM shuts both halves down whatever is under way, workers sometimes more than once."""
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 10
    engine.add(IDS, 6)
    for _ in range(2):
        engine.step()
    for _ in range(2):
        engine.worker.shutdown()
        engine.scheduler.shutdown()
