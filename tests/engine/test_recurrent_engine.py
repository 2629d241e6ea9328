"""A real engine with recurrent layers: left alone, with the reason, and it answers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engine import window_models
from tests.engine.real_engine import real_engine

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_a_hybrid_with_recurrent_state_runs_without_the_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = list(range(3, 200))
    model = window_models.write(tmp_path, window_models.QWEN3_NEXT)
    with (
        caplog.at_level(logging.WARNING),
        real_engine(model, {"cpu_memory": "64MiB"}, dtype="bfloat16") as engine,
    ):
        said = [record.message for record in caplog.records if "not tiered" in record.message]
        assert len(said) == 1
        assert "MambaSpec: recurrent state" in said[0]
        assert engine.half is None
        engine.assert_bytes_as_computed_from(model)
        answers = [engine.ask([ids], 4)[0].tokens for _ in range(2)]
    with real_engine(model, None, dtype="bfloat16") as alone:
        assert answers == [alone.ask([ids], 4)[0].tokens for _ in range(2)]
