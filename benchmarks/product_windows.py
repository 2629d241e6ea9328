"""Windows of matrix products, with and without copies beside them, and what they amount to.

No torch: what ran on a device is told by `benchmarks/products.py`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.samples import spread

PRODUCTS = 40  # measured in a window, some 56 ms on an H200
REST = 30  # behind them, not measured: there the copies of the window come to their end
ALONE = "alone"
"""A window without copies, to compare with."""
NOTHING = "nothing"
"""A way without copies: what is found for it is the error of the method."""

_COVER = 1.2  # copies last so many times as long as the measured products
_USED_REST = 0.9  # and at most into this share of the rest
_LONGEST_PAUSE_MS = 0.1  # the clock is read there, which takes some microseconds
_LATEST_COPIES_MS = 1.0  # a copy that waits for an event begins much sooner
_ENDED_LATE = "copies ended late"


@dataclass(frozen=True)
class CopySpan:
    """Copies beside a window; times count from the window's begin."""

    count: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Window:
    way: str
    products_ms: float
    whole_ms: float
    """With the rest."""
    pause_ms: float
    """Between the rest of the window before and this one."""
    is_queued_in_time: bool
    """All its products were in the queue before it began: it had no pause inside."""
    copies: CopySpan | None = None
    ghz: float | None = None


def alternating(ways: Sequence[str], repeats: int, rng: random.Random) -> list[str]:
    """Every way so many times, in random order, with windows alone before, between and after."""
    plan = [ALONE]
    for _ in range(repeats):
        for way in rng.sample(list(ways), len(ways)):
            plan += [way, ALONE]
    return plan


def copies_needed(products_ms: float, rest_ms: float, copy_ms: float) -> int:
    """Copies that outlast the products and end in the rest behind them."""
    wanted = math.ceil(_COVER * products_ms / copy_ms)
    most = math.floor((products_ms + _USED_REST * rest_ms) / copy_ms)
    return max(1, min(wanted, most))


def copies_next_time(window: Window) -> int:
    """Beside products copies take longer than alone, and products longer beside copies."""
    copies = window.copies
    if copies is None:
        return 0
    if _has_pause(window):
        return copies.count
    copy_ms = (copies.end_ms - copies.begin_ms) / copies.count
    return copies_needed(window.products_ms, window.whole_ms - window.products_ms, copy_ms)


def reasons_to_leave_out(windows: Sequence[Window]) -> list[str | None]:
    """For every window; None for one that says what it should."""
    own = [_reason(window) for window in windows]
    befores = [None, *own]
    # Copies that outlast their window go on beside the next one, which takes itself for alone.
    return [
        reason or (before if before == _ENDED_LATE else None)
        for reason, before in zip(own, befores, strict=False)
    ]


def summary(windows: Sequence[Window], ways: Sequence[str]) -> dict[str, Any]:
    """Every way against its neighbours alone; a device's clock drifts over a longer time."""
    reasons = reasons_to_leave_out(windows)
    alone = [
        window
        for window, reason in zip(windows, reasons, strict=True)
        if window.way == ALONE and reason is None
    ]
    of_alone: dict[str, list[float]] = {way: [] for way in ways}
    clock_of_alone: dict[str, list[float]] = {way: [] for way in ways}
    cycles_of_alone: dict[str, list[float]] = {way: [] for way in ways}
    ghz: dict[str, list[float]] = {way: [] for way in (ALONE, *ways)}
    ghz[ALONE] = [window.ghz for window in alone if window.ghz is not None]
    left_out: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for at in range(1, len(windows) - 1):
        before, window, after = windows[at - 1 : at + 2]
        if window.way == ALONE:
            continue
        reason = reasons[at] or reasons[at - 1] or reasons[at + 1]
        if reason is not None:
            left_out[window.way][reason] += 1
            continue
        neighbours_ms = (before.products_ms + after.products_ms) / 2
        of_alone[window.way].append(window.products_ms / neighbours_ms)
        if window.ghz is not None and before.ghz is not None and after.ghz is not None:
            ghz[window.way].append(window.ghz)
            clock_of_alone[window.way].append(window.ghz / ((before.ghz + after.ghz) / 2))
            neighbours = (before.products_ms * before.ghz + after.products_ms * after.ghz) / 2
            cycles_of_alone[window.way].append(window.products_ms * window.ghz / neighbours)
    times = [window.products_ms for window in alone]
    return {
        "alone_ms": round(statistics.median(times), 3) if times else None,
        "spread_alone": [round(min(times), 3), round(max(times), 3)] if times else [None, None],
        "of_alone": {way: spread(found) for way, found in of_alone.items() if found},
        "clock_ghz": _medians(ghz),
        "clock_of_alone": _medians(clock_of_alone),
        "cycles_of_alone": {way: spread(found) for way, found in cycles_of_alone.items() if found},
        "windows_left_out": {way: dict(found) for way, found in left_out.items() if found},
    }


def _reason(window: Window) -> str | None:
    copies = window.copies
    if copies is not None and copies.end_ms > window.whole_ms:
        return _ENDED_LATE
    if _has_pause(window):
        return "products paused"
    if copies is None:
        return None
    if copies.begin_ms > _LATEST_COPIES_MS:
        return "copies began late"
    return "copies ended early" if copies.end_ms < window.products_ms else None


def _has_pause(window: Window) -> bool:
    return window.pause_ms > _LONGEST_PAUSE_MS or not window.is_queued_in_time


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {way: round(statistics.median(found), 4) for way, found in values.items() if found}
