"""What windows of matrix products amount to. Running them needs a GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.copy_interference import (
    ALONE,
    NO_COPIES,
    CopySpan,
    Window,
    alternating,
    copies_needed,
    copies_next_time,
    exclusion_reasons,
    mean_ghz,
    summary,
)
from benchmarks.result_files import Result, Results
from benchmarks.sections.copies import block_section


def a_window(way: str = ALONE, ms: float = 56.0, **changes: Any) -> Window:
    found: dict[str, Any] = {"whole_ms": ms + 42, "pause_ms": 0.01, "is_queued_in_time": True}
    return Window(way, ms, **{**found, **changes})


def test_every_way_stands_between_windows_alone() -> None:
    plan = alternating(["a", "b", "c"], 4, random.Random(0))
    assert set(plan[::2]) == {ALONE}
    assert [sorted(plan[1::2][at : at + 3]) for at in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert len(plan) == 25


@pytest.mark.parametrize("copy_ms", [1.0, 10.0, 17.0, 22.0])
def test_copies_outlast_the_products_but_not_the_rest(copy_ms: float) -> None:
    count = copies_needed(56, 42, copy_ms)
    assert 1.2 * 56 <= count * copy_ms < 56 + 42


def test_long_copy_is_made_once() -> None:
    assert copies_needed(56, 42, 500) == 1


def test_copies_that_slow_products_down_are_made_more_often() -> None:
    seen = a_window("a", 112.0, copies=CopySpan(7, 0.0, 70.0))
    assert copies_next_time(seen) == 14
    paused = a_window("a", 112.0, pause_ms=3.0, copies=CopySpan(7, 0.0, 70.0))
    assert copies_next_time(paused) == 7


def test_way_is_compared_with_its_neighbours() -> None:
    copies = CopySpan(7, 0.05, 70.0)
    found = summary(
        [
            a_window(ms=50, ghz=1.5),
            a_window(NO_COPIES, 52, ghz=1.6),
            a_window(ms=54, ghz=1.7),
            a_window("a", 66, copies=copies, ghz=1.4),
            a_window(ms=66, ghz=1.8),
        ],
        [NO_COPIES, "a"],
    )
    assert (found["alone_ms"], found["alone_range_ms"]) == (54, [50, 66])
    assert {way: ratio["median"] for way, ratio in found["time_ratio"].items()} == {
        NO_COPIES: 1.0,
        "a": 1.1,
    }
    assert found["clock_ghz"] == {ALONE: 1.7, NO_COPIES: 1.6, "a": 1.4}
    assert found["clock_ratio"] == {NO_COPIES: 1.0, "a": 0.8}
    assert {way: ratio["median"] for way, ratio in found["cycle_ratio"].items()} == {
        NO_COPIES: round(52 * 1.6 / ((50 * 1.5 + 54 * 1.7) / 2), 3),
        "a": round(66 * 1.4 / ((54 * 1.7 + 66 * 1.8) / 2), 3),
    }
    assert found["windows_excluded"] == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pause_ms": 2.0}, "matmuls paused"),
        ({"is_queued_in_time": False}, "matmuls paused"),
        ({"copies": CopySpan(7, 5.0, 80.0)}, "copies began late"),
        ({"copies": CopySpan(7, 0.0, 50.0)}, "copies ended early"),
        ({"copies": CopySpan(7, 0.0, 99.0)}, "copies ended late"),
        ({"copies": CopySpan(7, 0.0, 70.0)}, None),
    ],
)
def test_window_that_went_wrong_is_excluded(changes: dict[str, Any], reason: str | None) -> None:
    windows = [a_window(), a_window("a", **changes), a_window(), a_window("b"), a_window()]
    found = summary(windows, ["a", "b"])
    # Copies that go on too long spoil the window behind them, and so what is compared with that.
    spoilt = ["a", "b"] if reason == "copies ended late" else ["a"] if reason else []
    assert found["windows_excluded"] == {way: {reason: 1} for way in spoilt}
    assert list(found["time_ratio"]) == [way for way in ("a", "b") if way not in spoilt]
    assert exclusion_reasons(windows)[1] == reason
    assert found["clock_ratio"] == {}


def test_windows_that_all_paused_give_no_ratio() -> None:
    found = summary([a_window(way, pause_ms=9.0) for way in (ALONE, "a", ALONE)], ["a"])
    assert (found["alone_ms"], found["alone_range_ms"], found["time_ratio"]) == (
        None,
        [None] * 2,
        {},
    )


def test_clock_is_that_of_processors_noted_twice() -> None:
    begin = np.array([[0, 1_000, 5_000], [1, 900_000, 5_010], [2, 7, 5_000]])
    end = np.array([[1, 900_000 + 160_000, 105_010], [0, 151_000, 105_000], [3, 1, 1], [1, 0, 0]])
    assert mean_ghz(begin, end) == pytest.approx(1.55)
    assert mean_ghz(begin[2:], end) is None


def the_section(interference: dict[str, Any]) -> str:
    environment = {
        "commit": "0123456789abcdef",
        "command": "python -m benchmarks.block_copy",
        "machine": {"cpu": "a CPU", "cores": 16, "memory_gib": 126, "gpu": "a GPU, driver 1"},
        "versions": {"vllm": "0.32.0", "torch": "2.11.0"},
    }
    shape = {"block_bytes": 1024, "in": {}, "out": {}, "ratios": {}}
    data = {"environment": environment, "shapes": {"m/16": shape}, "interference": interference}
    return block_section(Results((Result("block_copy-somewhere", data),)))


def test_section_shows_ratios_and_clocks() -> None:
    windows = [a_window(ghz=1.5), a_window("in: a", 57.12, ghz=1.47), a_window(ghz=1.5)]
    windows += [a_window("in: b", pause_ms=5.0), a_window(ghz=1.5)]
    text = the_section(summary(windows, ["in: a", "in: b"]))
    assert "| in: a | 1.020 (1.020 … 1.020) | 0.980 (1.47 GHz) | 1.000 (1.000 … 1.000) |" in text
    assert "Windows excluded: in: b: 1 (matmuls paused)." in text
    without = the_section(summary([a_window(), a_window("in: a"), a_window()], ["in: a"]))
    assert "| in: a | 1.000 (1.000 … 1.000) |\n" in without
    assert "Clock" not in without
