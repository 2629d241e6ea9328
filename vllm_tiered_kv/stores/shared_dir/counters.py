"""What happened in a shared directory, counted, and how much it holds: by a scan, and in between by
what this process did itself.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


class Event(str, enum.Enum):
    """What may happen to a block or a call."""

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


@dataclass(frozen=True)
class Totals:
    """What the directory holds."""

    blocks: int
    nbytes: int


class UsageTracker:
    """Other hosts add and remove without telling, so a number is only as good as its last scan."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._scanned_at: float | None = None
        self._totals = Totals(0, 0)

    def scanned(self, totals: Totals) -> None:
        with self._lock:
            self._totals = totals
            self._scanned_at = self._monotonic()

    def changed(self, blocks: int, nbytes: int) -> None:
        with self._lock:
            self._totals = Totals(
                max(0, self._totals.blocks + blocks), max(0, self._totals.nbytes + nbytes)
            )

    def latest(self, max_age_s: float) -> Totals | None:
        """None where the last scan is older than this."""
        with self._lock:
            if self._scanned_at is None or self._monotonic() - self._scanned_at > max_age_s:
                return None
            return self._totals
