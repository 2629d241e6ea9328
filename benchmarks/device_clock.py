"""The clock a GPU really ran at between two points of a stream.

A tiny kernel notes on every multiprocessor how many cycles it has counted and what time it is. What
the driver reports (NVML) is one moment's clock, and says little of 50 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        """Memory for so many notes, empty; not while a stream still writes earlier ones."""
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
