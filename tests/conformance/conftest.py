"""The same surroundings as the engine tests have: settings of vLLM, the tiny model, schedulers."""

from __future__ import annotations

import pytest

from tests.engine.conftest import async_scheduling, step_loads, tiny_model

__all__ = ["async_scheduling", "step_loads", "tiny_model"]


@pytest.fixture
def beside_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All loads are asynchronous in vLLM's sense."""
    monkeypatch.setenv("TIERED_KV_STEP_LOADS", "never")
