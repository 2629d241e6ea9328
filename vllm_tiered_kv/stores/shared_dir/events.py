"""What happened in a shared directory, counted."""

from __future__ import annotations

import enum
import threading
from collections import Counter


class Event(str, enum.Enum):
    DAMAGED = "damaged"  # a file was not the block its name says: a miss, removed
    READ_ERROR = "read_error"  # the file system failed to read: a miss
    WRITE_ERROR = "write_error"  # the file system failed to write: the put FAILED
    NO_SPACE = "no_space"  # disk or quota full: the put was DROPPED
    BAD_CHECKSUM = "bad_checksum"  # bytes arrived other than their sender said: the put FAILED
    BAD_KEY = "bad_key"  # a key of no or too many bytes: a miss, the put FAILED
    REMOVE_ERROR = "remove_error"  # a file could not be removed
    FLUSH_ERROR = "flush_error"  # written data may not have reached the disk
    TOUCHED = "touched"  # a last use was noted
    TOUCH_ERROR = "touch_error"  # a last use could not be noted
    TOUCH_SKIPPED = "touch_skipped"  # uses that were not noted: too many at once


class EventCounts:
    """Counters that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Event] = Counter()

    def add(self, event: Event, count: int = 1) -> None:
        with self._lock:
            self._counts[event] += count

    def snapshot(self) -> dict[Event, int]:
        with self._lock:
            return {event: self._counts[event] for event in Event}
