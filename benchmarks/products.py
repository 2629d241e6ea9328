"""How much longer matrix products take while copies go on beside them.

A GPU that has idled for a moment runs at another clock than one that has not, and a busy one finds
its clock only after a while. So products run without a pause from the first window to the last: the
host keeps some windows of them in the queue and never waits for the device to be done. Every other
window has copies beside it (`benchmarks/product_windows.py` says which, and compares).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.device_clock import DeviceClock
from benchmarks.product_windows import (
    ALONE,
    NOTHING,
    PRODUCTS,
    REST,
    CopySpan,
    Window,
    alternating,
    copies_needed,
    copies_next_time,
    summary,
)

MATRIX = 8192
REPEATS = 15
_WARM_UP = 5  # windows alone that come first and do not count
_TRIALS = 2  # a way that doubles the time of the products needs two to find how long it must last


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


class Products:
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

    def slowdowns(self, ways: Mapping[str, Callable[[], None]]) -> dict[str, Any]:
        self._torch.cuda.synchronize()
        products_ms = self._idle_ms(self._stream, lambda: self._multiply(PRODUCTS))
        rest_ms = products_ms * REST / PRODUCTS
        counts = {
            name: copies_needed(products_ms, rest_ms, self._idle_ms(self._copy_stream, enqueue))
            for name, enqueue in ways.items()
        }
        for _ in range(_TRIALS):
            for window in self._run(list(ways), _copies(ways, counts)):
                counts[window.way] = copies_next_time(window)
        names = [NOTHING, *ways]
        plan = alternating(names, REPEATS, random.Random(0))
        found = summary(self._run(plan, _copies(ways, counts)), names)
        return {**found, "copies_per_window": counts}

    def _run(self, plan: Sequence[str], copies: Mapping[str, Copies]) -> list[Window]:
        """The windows of the plan, one right after the other.

        Products are always one window further in the queue than copies: some ways take long to
        enqueue, or until the device has made room for more, and products must not wait for that.
        """
        torch = self._torch
        plan = [ALONE] * _WARM_UP + list(plan)
        self._clock.reserve(2 * len(plan))
        torch.cuda.synchronize()
        self._multiply(REST)
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
        self._multiply(PRODUCTS)
        end = self._mark(self._stream)
        self._clock.note(self._stream)
        self._multiply(REST)
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
        products_ms=since_begin(marks.end),
        whole_ms=since_begin(marks.over),
        pause_ms=before.elapsed_time(marks.begin),
        is_queued_in_time=marks.is_queued_in_time,
        copies=copies,
        ghz=ghz,
    )
