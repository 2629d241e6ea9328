"""What stores on a network have in common: a prefix is looked up in growing batches, failures are
counted and logged now and then, and the usage is asked for now and then."""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from vllm_tiered_kv.core.store import StoreKey, StoreUsage

WRITE_TIMEOUT_FACTOR = 10  # as long as the daemon waits for writes
MAX_LOOKUPS = 4096  # keys of a request
_FIRST_LOOKUPS = 256  # of the first request of a match
_USAGE_MAX_AGE_S = 10.0
_LOG_INTERVAL_S = 60.0


class Interval:
    """Is due at most once in so many seconds. Thread-safe."""

    def __init__(self, seconds: float = _LOG_INTERVAL_S) -> None:
        self._seconds = seconds
        self._next = 0.0
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return False
            self._next = now + self._seconds
            return True


class Event(enum.Enum):
    """Events that are counted, in blocks."""

    DAMAGED = enum.auto()  # a value was not the block of its key: a miss, and deleted
    READ_ERROR = enum.auto()  # the server of a block did not send it
    WRITE_ERROR = enum.auto()  # a server did not take a block, or did not answer
    NO_SPACE = enum.auto()  # the store is full, and nothing can be evicted
    BAD_BLOCK = enum.auto()  # offered with a wrong checksum or key


def count_leading(
    keys: Sequence[StoreKey], present: Callable[[Sequence[StoreKey]], Sequence[bool | None]]
) -> int:
    """How many leading keys are present."""
    count, batch = 0, _FIRST_LOOKUPS
    while count < len(keys):
        for is_here in present(keys[count : count + batch]):
            if not is_here:
                return count
            count += 1
        batch = min(2 * batch, MAX_LOOKUPS)
    return count


class NetworkStore:
    """Base of the stores in Redis, Mooncake and S3. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[Event] = Counter()
        self._counts_lock = threading.Lock()
        self._usage = StoreUsage(0, 0, 0)
        self._usage_interval = Interval(_USAGE_MAX_AGE_S)
        self._log_interval = Interval()
        self._closed = False

    def known_usage(self) -> StoreUsage:
        return self._usage

    def _is_usage_due(self) -> bool:
        """Asked at the end of some calls, so that `known_usage` is not old on a daemon that
        works."""
        return not self._closed and self._usage_interval.is_due()

    @property
    def damaged_blocks(self) -> int:
        return self._counts[Event.DAMAGED] + self._counts[Event.READ_ERROR]

    @property
    def failed_blocks(self) -> int:
        failed = (Event.WRITE_ERROR, Event.NO_SPACE, Event.BAD_BLOCK)
        return sum(self._counts[event] for event in failed)

    def _count(self, event: Event, blocks: int = 1) -> None:
        if blocks:
            with self._counts_lock:
                self._counts[event] += blocks

    def flush(self) -> bool:
        """No-op: what is acknowledged is as durable as the store is set up to be."""
        return True

    def take_lost(self) -> list[StoreKey]:
        return []  # nothing is acknowledged early

    def retry(self) -> None:
        """No-op: breakers decide when a server is asked again."""
