"""Settings, counters and small helpers of the SSD tier."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class FsyncPolicy(str, enum.Enum):
    """What a put that is acknowledged as DISK survives."""

    GROUP = "group"  # power loss: data, then record, are synced; concurrent puts share syncs
    NEVER = "never"  # a crash of the process: the kernel writes the bytes back at its own pace


@dataclass
class SsdCounters:
    """Counts of events since the store was opened, in blocks unless the name says otherwise."""

    evicted_blocks: int = 0
    bad_blocks: int = 0  # read with a wrong checksum, and removed
    read_errors: int = 0  # could not be read, and removed
    failed_blocks: int = 0  # not written or not made durable, or received with a wrong checksum
    dropped_blocks: int = 0  # no room, or an invalid length or key
    retired_slots: int = 0  # failed writes; not used again before a restart
    syncs: int = 0
    compactions: int = 0


class ReadSpeed:
    """Measures the read speed over about the last second in which reads were running.

    `SsdStore` owns one. Thread-safe.
    """

    _WINDOW_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._nbytes = 0.0
        self._busy_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps a read. Time in which several reads overlap counts once."""
        with self._lock:
            self._count_time()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._count_time()
                self._active -= 1

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._busy_s > self._WINDOW_S:
                self._nbytes, self._busy_s = self._nbytes / 2, self._busy_s / 2

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first read."""
        with self._lock:
            return self._nbytes / self._busy_s if self._nbytes and self._busy_s else None

    def _count_time(self) -> None:
        now = self._clock()
        if self._active:
            self._busy_s += now - self._since
        self._since = now


class Backoff:
    """Exponential backoff of retries after failures. Its owner calls it under a lock."""

    def __init__(self, first_seconds: float) -> None:
        self._first = first_seconds
        self._next = first_seconds
        self.until = 0.0  # monotonic time

    def failed(self, now: float) -> float:
        """Returns the seconds until the next retry."""
        delay = self._next
        self.until = now + delay
        self._next = min(2 * delay, 16 * self._first)
        return delay

    def succeeded(self) -> None:
        self._next = self._first
        self.until = 0.0
