"""Loads that fail: vLLM computes exactly what is missing, nobody reads what did not arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from tests.conformance.contract_engine import ContractEngine
from tests.engine.toy_asking import seeded_prompt
from vllm_tiered_kv.errors import CudaError

IDS = seeded_prompt(1, 41)


def warm(tiny_model: Path, async_scheduling: bool = False) -> ContractEngine:
    engine = ContractEngine(tiny_model, async_scheduling, gpu_blocks=128, cpu_blocks=64)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    engine.computed.clear()
    return engine


def test_default_policy_of_vllm_would_end_such_requests(tiny_model: Path) -> None:
    """`fail` is vLLM's default; without a word from the user, the connector asks for more."""
    engine = ContractEngine(tiny_model)
    assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.scheduler.recompute_kv_load_failures


@pytest.mark.usefixtures("beside_loads")
@pytest.mark.parametrize("on_gpu", [0, 12, 40])
def test_blocks_missing_after_an_asynchronous_load_are_computed(
    tiny_model: Path, async_scheduling: bool, on_gpu: int
) -> None:
    engine = warm(tiny_model, async_scheduling)
    if on_gpu:
        engine.ask(IDS[: on_gpu + 1])
    engine.computed.clear()
    request_id = engine.add(IDS, 6)
    engine.copier.fail_loads_of.add(request_id)
    engine.run()
    engine.assert_said(request_id, IDS)
    assert engine.finished[request_id].status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.calls.loads_of(request_id) == (0 if on_gpu == 40 else 1)
    # What the GPU had itself is found again when the request starts over.
    assert engine.computed[request_id] - (len(IDS) - on_gpu) in (5, 6)
    engine.assert_conforms()


def test_blocks_missing_after_a_step_load_are_computed(tiny_model: Path) -> None:
    """The step ran on nonsense; vLLM is told the blocks and takes its tokens back."""
    engine = warm(tiny_model)
    engine.copier.fail_ahead = 1.0
    request_id = engine.ask(IDS)
    assert engine.finished[request_id].status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.calls.loads_of(request_id) == 1
    # One token in the step that failed, all of the prompt after it, and the answer.
    assert engine.computed[request_id] == 1 + len(IDS) + 5
    engine.assert_conforms()


def test_step_load_failure_with_steps_in_flight_is_an_error_not_a_wrong_token(
    tiny_model: Path,
) -> None:
    engine = warm(tiny_model, async_scheduling=True)
    engine.copier.fail_ahead = 1.0
    engine.add(IDS, 6)
    with pytest.raises(CudaError):
        engine.run()


@pytest.mark.usefixtures("beside_loads")
def test_blocks_of_a_failed_load_are_never_found_by_others(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """Twins and later requests read through vLLM's prefix cache; the toy checks what they read."""
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 6
    bad = engine.add(IDS, 6)
    engine.copier.fail_loads_of.add(bad)
    engine.until_loading(bad)
    twins = [engine.add(IDS, 6) for _ in range(3)]
    engine.run()
    for request_id in (bad, *twins):
        engine.assert_said(request_id, IDS)
    engine.ask(IDS)
    engine.drop_gpu_cache()
    engine.ask(IDS)
    engine.assert_conforms()


@pytest.mark.usefixtures("beside_loads")
def test_load_that_fails_after_its_request_was_aborted(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = warm(tiny_model, async_scheduling)
    engine.copier.max_delay = 8
    request_id = engine.add(IDS, 6)
    engine.copier.fail_loads_of.add(request_id)
    engine.until_loading(request_id)
    engine.abort(request_id)
    engine.run()
    assert engine.reported_loads == [request_id]
    engine.assert_conforms()
    engine.ask(IDS)


@pytest.mark.usefixtures("beside_loads")
def test_request_whose_load_failed_is_not_offered_another(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a broken tier would keep it waiting for ever. The blocks stay in the index here,
    as if somebody else had stored them anew."""
    engine = warm(tiny_model, async_scheduling)
    monkeypatch.setattr(engine.half.index, "remove", lambda key, in_slot=None: False)
    request_id = engine.add(IDS, 6)
    engine.copier.fail_loads_of.add(request_id)
    engine.run()
    answers = [tokens for name, tokens, _ in engine.calls.asked if name == request_id]
    assert answers[:2] == [40, None]  # once, for vLLM to let others past it
    assert set(answers[2:]) == {0}
    engine.assert_conforms()
