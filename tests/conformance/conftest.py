"""The same surroundings as the engine tests have: settings of vLLM, the tiny model."""

from __future__ import annotations

import pytest

from tests.engine.conftest import tiny_model

__all__ = ["tiny_model"]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    """vLLM's Scheduler, and its AsyncScheduler with two steps in flight."""
    return bool(request.param)


@pytest.fixture(params=["auto", "never"], ids=["step_loads", "beside_loads"])
def step_loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways a load takes through vLLM: within the request's step, and asynchronously."""
    monkeypatch.setenv("TIERED_KV_STEP_LOADS", request.param)
    return str(request.param)


@pytest.fixture
def beside_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All loads are asynchronous in vLLM's sense."""
    monkeypatch.setenv("TIERED_KV_STEP_LOADS", "never")
