"""What can be chosen about a store on a disk, and what it counts."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class FsyncPolicy(str, enum.Enum):
    """What a put acknowledged as DISK survives."""

    GROUP = "group"  # power loss: data, then record, are synced; puts at the same time share syncs
    NEVER = "never"  # death of the process: the system has the bytes and writes them in its time


@dataclass
class SsdCounters:
    """Events since the store was opened; blocks unless the name says otherwise."""

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    evicted_blocks: int = 0
    evicted_bytes: int = 0
    bad_blocks: int = 0  # read back with another checksum, and forgotten
    read_errors: int = 0  # could not be read, and forgotten
    failed_blocks: int = 0  # could not be written or made durable, or came with a wrong checksum
    dropped_blocks: int = 0  # no room, or a length or key that cannot be stored
    too_large_blocks: int = 0  # those of them that are larger than a slab
    retired_slots: int = 0  # could not be written, and are not used again before a restart
    syncs: int = 0
    compactions: int = 0


class ReadSpeed:
    """Bytes per second while anything is being read, of about the last second of reading."""

    _FORGET_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._nbytes = 0.0
        self._busy_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read. Time in which several read at once counts once."""
        with self._lock:
            self._count_time()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._count_time()
                self._under_way -= 1

    def has_read(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            if self._busy_s > self._FORGET_S:
                self._nbytes, self._busy_s = self._nbytes / 2, self._busy_s / 2

    @property
    def bytes_per_s(self) -> float | None:
        """None as long as nothing was read."""
        with self._lock:
            return self._nbytes / self._busy_s if self._nbytes and self._busy_s else None

    def _count_time(self) -> None:
        now = self._clock()
        if self._under_way:
            self._busy_s += now - self._since
        self._since = now


class Backoff:
    """When to try again after a failure: soon, then ever later."""

    def __init__(self, first_seconds: float) -> None:
        self._first = first_seconds
        self._next = first_seconds
        self.until = 0.0  # monotonic time

    def failed(self, now: float) -> float:
        """Seconds until the next try."""
        delay = self._next
        self.until = now + delay
        self._next = min(2 * delay, 16 * self._first)
        return delay

    def succeeded(self) -> None:
        self._next = self._first
        self.until = 0.0
