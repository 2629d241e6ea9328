"""A short soak with a fixed seed; `make soak` runs the same for as long as one likes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.toy_soak import SoakError, ToySoak, _Episode

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def soak(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToySoak]:
    monkeypatch.delenv("TIERED_KV_STEP_LOADS", raising=False)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        running = ToySoak(tiny_model, Path(folder), seed=20)
        yield running
        running.close()


def test_random_requests_and_faults_leave_nothing_behind(soak: ToySoak) -> None:
    soak.run(seconds=20, least_requests=2000)
    print(dict(soak.counts))
    for event in (
        *("answered", "abort", "sleep", "reset_tiers", "restart_running", "change_faults"),
        *("freeze", "thaw", "preemptions", "loaded_blocks", "load_failures", "evicted_blocks"),
        "engines_with_windows",
    ):
        assert soak.counts[event] > 0, f"nothing of this kind happened: {event}"
    assert not soak.counts["differing_blocks"]


def test_a_soak_can_fail(soak: ToySoak, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which seed and which episode, and what happened last."""
    open_engine = _Episode._open

    def without_pins(episode: _Episode) -> tuple:
        settings, toy = open_engine(episode)
        toy.half.index.unpin = lambda slots: None
        return settings, toy

    monkeypatch.setattr(_Episode, "_open", without_pins)
    with pytest.raises(SoakError, match=r"(?s)seed 20, episode 0.*the last actions.*SOAK_SEED=20"):
        soak.run(seconds=1)
