"""Memory that a benchmark's processes take, on the host and on the GPU."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from benchmarks.engine_process import device_memory_mib

_PERIOD_S = 2.0


def descendants(pid: int) -> list[int]:
    """Processes that this one started, and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    left = [pid]
    while left:
        fresh = children.get(left.pop(), [])
        found += fresh
        left += fresh
    return found


def pss_mib(pids: Iterable[int]) -> int:
    """Proportional set size: shared pages count once in all.

    Walks all page tables, which takes a second for tens of GiB: not for use while measuring.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(int(kib) for kib in re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE))
    return total >> 10


def host_used_mib() -> int:
    """Of the whole machine. Pinned memory of the CUDA driver counts here, but not in a PSS."""
    text = Path("/proc/meminfo").read_text()
    total, free = (
        int(kib) for kib in re.findall(r"^(?:MemTotal|MemAvailable):\s+(\d+)", text, re.MULTILINE)
    )
    return (total - free) >> 10


class MemoryWatch:
    """Notes the most memory that was in use at any time until `close`. Context manager."""

    def __init__(self) -> None:
        self._before = host_used_mib()
        self.host_growth_mib = 0
        self.gpu_mib: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self.host_growth_mib = max(self.host_growth_mib, host_used_mib() - self._before)
            sizes = device_memory_mib()
            if sizes is not None:
                self.gpu_mib = max(self.gpu_mib or 0, sizes[0])
