"""Counts events of a shared directory, and tracks how much it holds.

The usage comes from scans and, between them, from the changes this process makes itself.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter

from vllm_tiered_kv.core.store import StoreUsage


class Event(str, enum.Enum):
    """Events that are counted."""

    DAMAGED = "damaged"  # a file was not the block of its name: a miss, and removed
    READ_ERROR = "read_error"  # the file system failed to read: a miss
    WRITE_ERROR = "write_error"  # the file system failed to write: the put FAILED
    NO_SPACE = "no_space"  # disk or quota full: the put was DROPPED
    BAD_CHECKSUM = "bad_checksum"  # the payload did not match its checksum: the put FAILED
    BAD_KEY = "bad_key"  # an empty or too long key: a miss, or the put FAILED
    REMOVE_ERROR = "remove_error"  # a file could not be removed
    FLUSH_ERROR = "flush_error"  # written data may not have reached the disk
    TOUCHED = "touched"  # the time of last use was updated
    TOUCH_ERROR = "touch_error"  # the time of last use could not be updated
    TOUCH_SKIPPED = "touch_skipped"  # uses dropped because the queue was full


class EventCounts:
    """Event counters of one store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Event] = Counter()

    def add(self, event: Event, count: int = 1) -> None:
        with self._lock:
            self._counts[event] += count

    def snapshot(self) -> dict[Event, int]:
        with self._lock:
            return {event: self._counts[event] for event in Event}


class UsageTracker:
    """Estimates the usage of the directory. Thread-safe.

    Other hosts add and remove blocks unnoticed, so the estimate is only as good as its last scan.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._is_scanned = False
        self.usage = StoreUsage(0, 0, capacity_bytes)

    def scanned(self, blocks: int, nbytes: int) -> None:
        with self._lock:
            self._is_scanned = True
            self.usage = StoreUsage(blocks, nbytes, self.usage.capacity_bytes)

    def changed(self, blocks: int, nbytes: int) -> None:
        with self._lock:
            if self._is_scanned:
                blocks = max(0, self.usage.blocks + blocks)
                nbytes = max(0, self.usage.used_bytes + nbytes)
                self.usage = StoreUsage(blocks, nbytes, self.usage.capacity_bytes)
