"""How much longer matrix products take while copies go on beside them.

A GPU that has idled for a moment runs at another clock than one that has not, and a busy one finds
its clock only after a while. So multiplications run without a pause from the first window to the
last: the host keeps some windows of them in the queue and never waits for the device to be done.
Every other window has copies beside it and is compared with its neighbours.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result_files import spread

_KERNEL = r"""
extern "C" __global__ void note_clocks(long long* notes) {
  unsigned int processor;
  long long cycles, ns;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  long long* note = notes + 3 * blockIdx.x;
  note[0] = processor;
  note[1] = cycles;
  note[2] = ns;
}
"""
_BLOCKS_PER_PROCESSOR = 4  # where a block runs is not ours to say: enough that each gets one


class DeviceClock:
    """Without torch's run-time compiler it notes nothing."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._blocks = properties.multi_processor_count * _BLOCKS_PER_PROCESSOR
        self._notes: Any = None
        self._used = 0
        self._kernel: Any = None
        try:
            self._kernel = torch.cuda._compile_kernel(_KERNEL, "note_clocks")
            self.reserve(1)
            self.note(torch.cuda.current_stream())  # the first launch also loads the kernel
            torch.cuda.synchronize()
        # OSError: NVRTC or the toolkit's headers are not where torch looks for them.
        except (ImportError, AttributeError, RuntimeError, OSError) as reason:
            self._kernel = None
            print(f"clocks are not measured: {reason}", flush=True)

    def reserve(self, count: int) -> None:
        """Allocates empty memory for `count` notes. No stream may still write earlier notes."""
        if self._kernel is not None:
            shape = (count, self._blocks, 3)
            self._notes = self._torch.zeros(shape, dtype=self._torch.int64, device="cuda")
            self._torch.cuda.synchronize()  # zeroed on another stream than the one that writes
            self._used = 0

    def note(self, stream: Any) -> None:
        """Behind what the stream has been given so far."""
        if self._kernel is not None:
            room = self._notes[self._used]
            self._kernel(grid=(self._blocks, 1, 1), block=(1, 1, 1), args=[room], stream=stream)
            self._used += 1

    def ghz(self) -> list[float | None]:
        """Between the first note and the second, the third and the fourth, and so on; waits."""
        if self._kernel is None:
            return []
        self._torch.cuda.synchronize()
        notes: NDArray[np.int64] = self._notes[: self._used].cpu().numpy()
        return [mean_ghz(*pair) for pair in zip(notes[::2], notes[1::2], strict=True)]


def mean_ghz(begin: NDArray[np.int64], end: NDArray[np.int64]) -> float | None:
    """Rows of processor, cycles and nanoseconds; processors count from points of their own."""
    processors, first, last = _common(begin[:, 0], end[:, 0])
    if not len(processors):
        return None
    passed = end[last, 1:] - begin[first, 1:]
    return float(np.median(passed[:, 0] / passed[:, 1]))


def _common(
    begin: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The processors of both, each once, and a row of each side."""
    found: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] = np.intersect1d(
        begin, end, return_indices=True
    )
    return found


MATMULS = 40  # measured in a window, some 56 ms on an H200
TAIL_MATMULS = 30  # behind them, not measured: there the copies of the window come to their end
ALONE = "alone"
"""A window without copies, to compare with."""
NO_COPIES = "nothing"
"""A way without copies: what is found for it is the error of the method."""

_COVER = 1.2  # copies last this many times as long as the measured multiplications
_USED_TAIL = 0.9  # and at most into this share of the rest
_MAX_PAUSE_MS = 0.1  # the clock is read there, which takes some microseconds
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
    matmul_ms: float
    whole_ms: float
    """With the rest."""
    pause_ms: float
    """Between the rest of the window before and this one."""
    is_queued_in_time: bool
    """All its multiplications were in the queue before it began: it had no pause inside."""
    copies: CopySpan | None = None
    ghz: float | None = None


def alternating(ways: Sequence[str], repeats: int, rng: random.Random) -> list[str]:
    """Returns each way `repeats` times in random order, with windows without copies in between."""
    plan = [ALONE]
    for _ in range(repeats):
        for way in rng.sample(list(ways), len(ways)):
            plan += [way, ALONE]
    return plan


def copies_needed(matmul_ms: float, tail_ms: float, copy_ms: float) -> int:
    """Copies that outlast the measured multiplications and end beside those of the tail."""
    wanted = math.ceil(_COVER * matmul_ms / copy_ms)
    most = math.floor((matmul_ms + _USED_TAIL * tail_ms) / copy_ms)
    return max(1, min(wanted, most))


def copies_next_time(window: Window) -> int:
    """Copies and multiplications each take longer beside the other than alone."""
    copies = window.copies
    if copies is None:
        return 0
    if _has_pause(window):
        return copies.count
    copy_ms = (copies.end_ms - copies.begin_ms) / copies.count
    return copies_needed(window.matmul_ms, window.whole_ms - window.matmul_ms, copy_ms)


def exclusion_reasons(windows: Sequence[Window]) -> list[str | None]:
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
    reasons = exclusion_reasons(windows)
    alone = [
        window
        for window, reason in zip(windows, reasons, strict=True)
        if window.way == ALONE and reason is None
    ]
    time_ratio: dict[str, list[float]] = {way: [] for way in ways}
    clock_ratio: dict[str, list[float]] = {way: [] for way in ways}
    cycle_ratio: dict[str, list[float]] = {way: [] for way in ways}
    ghz: dict[str, list[float]] = {way: [] for way in (ALONE, *ways)}
    ghz[ALONE] = [window.ghz for window in alone if window.ghz is not None]
    excluded: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for at in range(1, len(windows) - 1):
        before, window, after = windows[at - 1 : at + 2]
        if window.way == ALONE:
            continue
        reason = reasons[at] or reasons[at - 1] or reasons[at + 1]
        if reason is not None:
            excluded[window.way][reason] += 1
            continue
        neighbours_ms = (before.matmul_ms + after.matmul_ms) / 2
        time_ratio[window.way].append(window.matmul_ms / neighbours_ms)
        if window.ghz is not None and before.ghz is not None and after.ghz is not None:
            ghz[window.way].append(window.ghz)
            clock_ratio[window.way].append(window.ghz / ((before.ghz + after.ghz) / 2))
            neighbours = (before.matmul_ms * before.ghz + after.matmul_ms * after.ghz) / 2
            cycle_ratio[window.way].append(window.matmul_ms * window.ghz / neighbours)
    times = [window.matmul_ms for window in alone]
    return {
        "alone_ms": round(statistics.median(times), 3) if times else None,
        "alone_range_ms": [round(min(times), 3), round(max(times), 3)] if times else [None, None],
        "time_ratio": {way: spread(found) for way, found in time_ratio.items() if found},
        "clock_ghz": _medians(ghz),
        "clock_ratio": _medians(clock_ratio),
        "cycle_ratio": {way: spread(found) for way, found in cycle_ratio.items() if found},
        "windows_excluded": {way: dict(found) for way, found in excluded.items() if found},
    }


def _reason(window: Window) -> str | None:
    copies = window.copies
    if copies is not None and copies.end_ms > window.whole_ms:
        return _ENDED_LATE
    if _has_pause(window):
        return "matmuls paused"
    if copies is None:
        return None
    if copies.begin_ms > _LATEST_COPIES_MS:
        return "copies began late"
    return "copies ended early" if copies.end_ms < window.matmul_ms else None


def _has_pause(window: Window) -> bool:
    return window.pause_ms > _MAX_PAUSE_MS or not window.is_queued_in_time


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {way: round(statistics.median(found), 4) for way, found in values.items() if found}


MATRIX = 8192
REPEATS = 15
_WARM_UP = 5  # windows alone that come first and do not count
_TRIALS = 2  # a way that doubles their time needs two to find how long it must last


@dataclass(frozen=True)
class Copies:
    """One way to copy, so many times beside a window."""

    enqueue: Callable[[], None]
    count: int


@dataclass
class _Marks:
    """Events of a window, to be read when all is over."""

    way: str
    begin: Any
    end: Any
    over: Any
    is_queued_in_time: bool
    copies_begin: Any = None
    copies_end: Any = None
    copies_count: int = 0


class InterferenceBench:
    def __init__(self, copy_stream_handle: int) -> None:
        """`copy_stream_handle` is of the stream the ways begin in and end in."""
        import torch

        self._torch = torch
        self._left, self._right, self._product = (
            torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self._stream = torch.cuda.Stream()  # of the priority at which vLLM computes
        self._copy_stream = torch.cuda.ExternalStream(copy_stream_handle)
        self._clock = DeviceClock()

    def measure(self, ways: Mapping[str, Callable[[], None]]) -> dict[str, Any]:
        self._torch.cuda.synchronize()
        matmul_ms = self._idle_ms(self._stream, lambda: self._multiply(MATMULS))
        tail_ms = matmul_ms * TAIL_MATMULS / MATMULS
        counts = {
            name: copies_needed(matmul_ms, tail_ms, self._idle_ms(self._copy_stream, enqueue))
            for name, enqueue in ways.items()
        }
        for _ in range(_TRIALS):
            for window in self._run(list(ways), _copies(ways, counts)):
                counts[window.way] = copies_next_time(window)
        names = [NO_COPIES, *ways]
        plan = alternating(names, REPEATS, random.Random(0))
        found = summary(self._run(plan, _copies(ways, counts)), names)
        return {**found, "copies_per_window": counts}

    def _run(self, plan: Sequence[str], copies: Mapping[str, Copies]) -> list[Window]:
        """The windows of the plan, one right after the other.

        Multiplications are always one window ahead of copies in the queue: some ways take long to
        enqueue, or until the device has made room for more, and the device must not idle meanwhile.
        """
        torch = self._torch
        plan = [ALONE] * _WARM_UP + list(plan)
        self._clock.reserve(2 * len(plan))
        torch.cuda.synchronize()
        self._multiply(TAIL_MATMULS)
        first = self._mark(self._stream)
        marks: list[_Marks] = []
        for number, way in enumerate(plan):
            marks.append(self._enqueue_window(way, marks[-1].over if marks else first))
            if number >= 1:
                self._enqueue_copies(marks[number - 1], copies)
            if number >= 2:
                marks[number - 2].end.synchronize()
        self._enqueue_copies(marks[-1], copies)
        torch.cuda.synchronize()
        clocks = self._clock.ghz() or [None] * len(plan)
        befores = [first, *(mark.over for mark in marks)]
        windows = [
            _window(mark, before, ghz)
            for mark, before, ghz in zip(marks, befores, clocks, strict=False)
        ]
        return windows[_WARM_UP:]

    def _enqueue_window(self, way: str, before: Any) -> _Marks:
        self._clock.note(self._stream)
        begin = self._mark(self._stream)
        self._multiply(MATMULS)
        end = self._mark(self._stream)
        self._clock.note(self._stream)
        self._multiply(TAIL_MATMULS)
        over = self._mark(self._stream)
        return _Marks(way, begin, end, over, is_queued_in_time=not before.query())

    def _enqueue_copies(self, marks: _Marks, copies: Mapping[str, Copies]) -> None:
        if marks.way not in copies:
            return
        way = copies[marks.way]
        self._copy_stream.wait_event(marks.begin)
        marks.copies_begin = self._mark(self._copy_stream)
        for _ in range(way.count):
            way.enqueue()
        marks.copies_end = self._mark(self._copy_stream)
        marks.copies_count = way.count

    def _multiply(self, times: int) -> None:
        with self._torch.cuda.stream(self._stream):
            for _ in range(times):
                self._torch.mm(self._left, self._right, out=self._product)

    def _mark(self, stream: Any) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _idle_ms(self, stream: Any, enqueue: Callable[[], None]) -> float:
        """On a device that does nothing else: a first estimate."""
        times: list[float] = []
        for _ in range(4):
            begin = self._mark(stream)
            enqueue()
            end = self._mark(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times[1:])


def _copies(ways: Mapping[str, Callable[[], None]], counts: Mapping[str, int]) -> dict[str, Copies]:
    return {name: Copies(enqueue, counts[name]) for name, enqueue in ways.items()}


def _window(marks: _Marks, before: Any, ghz: float | None) -> Window:
    def since_begin(event: Any) -> float:
        ms: float = marks.begin.elapsed_time(event)
        return ms

    copies = None
    if marks.copies_count:
        begin_ms, end_ms = since_begin(marks.copies_begin), since_begin(marks.copies_end)
        copies = CopySpan(marks.copies_count, begin_ms, end_ms)
    return Window(
        way=marks.way,
        matmul_ms=since_begin(marks.end),
        whole_ms=since_begin(marks.over),
        pause_ms=before.elapsed_time(marks.begin),
        is_queued_in_time=marks.is_queued_in_time,
        copies=copies,
        ghz=ghz,
    )
