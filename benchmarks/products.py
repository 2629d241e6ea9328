"""How much longer matrix products take while something else goes on beside them.

A device under full load runs at the clock its power budget allows. Copies take power, too: they
slow such products down even where they take nothing else from them. Products of zeros need less
power. So both are measured, with the clock and whether the power budget keeps it down.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.samples import spread

MATRIX = 8192
PRODUCTS = 20  # some 30 ms
REPEATS = 21
_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap


class Products:
    """Of random numbers, or of zeros."""

    def __init__(self, zeros: bool) -> None:
        import torch

        self._torch = torch
        make = torch.zeros if zeros else torch.randn
        self._left, self._right, self._product = (
            make(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        self._stream = torch.cuda.Stream(priority=-1)
        self._clock = _Clock()

    def slowdowns(self, ways: dict[str, Callable[[], None]]) -> dict[str, Any]:
        """Each way in random order, against the products alone just before: clocks drift."""
        alone: list[float] = []
        of_alone: dict[str, list[float]] = {name: [] for name in ways}
        clocks: dict[str, list[tuple[int, bool]]] = {name: [] for name in ("alone", *ways)}
        rng = random.Random(0)
        for turn in range(REPEATS):
            for name in rng.sample(list(ways), len(ways)):
                before, clock = self._time(None)
                beside, clock_beside = self._time(ways[name])
                if turn:
                    alone.append(before)
                    of_alone[name].append(beside / before)
                    clocks["alone"] += clock
                    clocks[name] += clock_beside
        return {
            "alone_ms": round(statistics.median(alone), 3),
            "spread_alone": [round(min(alone), 3), round(max(alone), 3)],
            "of_alone": {name: spread(values) for name, values in of_alone.items()},
            "clock_mhz": {
                name: round(statistics.median(mhz for mhz, _ in some))
                for name, some in clocks.items()
                if some
            },
            "share_power_capped": {
                name: round(statistics.mean(capped for _, capped in some), 3)
                for name, some in clocks.items()
                if some
            },
        }

    def _time(self, beside: Callable[[], None] | None) -> tuple[float, list[tuple[int, bool]]]:
        """Milliseconds of the products, and the clock while they ran."""
        torch = self._torch
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # The device must not idle while copies are put into the queue: it would rest.
            for _ in range(PRODUCTS):
                torch.mm(self._left, self._right, out=self._product)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._stream)
            for _ in range(PRODUCTS):
                torch.mm(self._left, self._right, out=self._product)
            end.record(self._stream)
        if beside is not None:
            for _ in range(8):  # some 80 ms on the bus: before, beside and after
                beside()
        begin.synchronize()
        clock = self._clock.read()
        end.synchronize()
        return begin.elapsed_time(end), clock


class _Clock:
    """Of the device's multiprocessors, and whether its power budget keeps it there."""

    def __init__(self) -> None:
        self._nvml: Any = None
        with contextlib.suppress(ImportError):
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read(self) -> list[tuple[int, bool]]:
        """Empty where nobody can say."""
        if self._nvml is None:
            return []
        mhz = self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM)
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device)
        return [(mhz, bool(reasons & _POWER_CAP))]
