"""What stores on a network have in common: a put looks blocks up and verifies them before writing,
a prefix is looked up in growing batches, failures are counted and logged now and then, and the
usage is asked for now and then."""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey, StoreUsage
from vllm_tiered_kv.native.cpu import hash_buffers
from vllm_tiered_kv.stores.block_format import BlockHeader, is_key

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


@dataclass(frozen=True)
class NewBlock:
    """A block that is verified and has to be written."""

    header: BlockHeader
    payload: memoryview


class NetworkStore(ABC):
    """Base of the stores in Redis, Mooncake and S3. Thread-safe."""

    read_batch = 8  # one request to a server for several blocks, without delaying the first much

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._counts: Counter[Event] = Counter()
        self._counts_lock = threading.Lock()
        self._usage = StoreUsage(0, 0, 0)
        self._usage_interval = Interval(_USAGE_MAX_AGE_S)
        self._log_interval = Interval()
        self._closed = False

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        """Every durability is the same: that of the service."""
        if self._closed:
            return [PutResult.DROPPED] * len(items)
        results = [PutResult.FAILED] * len(items)
        deadline = self._deadline(WRITE_TIMEOUT_FACTOR)
        valid = [
            n
            for n, item in enumerate(items)
            if is_key(item.key) and is_key(item.parent or b"no parent")
        ]
        keys = list(dict.fromkeys(items[n].key for n in valid))
        known = dict(zip(keys, self._known(keys, deadline), strict=True))
        self._count(Event.WRITE_ERROR, list(known.values()).count(None))
        absent: list[int] = []
        for n in valid:
            if known[items[n].key]:
                results[n] = PutResult.PRESENT
            elif known[items[n].key] is not None:
                absent.append(n)
        good: list[int] = []
        new: dict[StoreKey, NewBlock] = {}
        payloads = [items[n].payload.cast("B") for n in absent]
        checksums = hash_buffers(payloads, threads=0)
        for n, payload, checksum in zip(absent, payloads, checksums, strict=True):
            item = items[n]
            if item.checksum in (None, checksum):
                good.append(n)
                header = BlockHeader(item.key, item.parent, len(payload), checksum)
                new.setdefault(item.key, NewBlock(header, payload))
        self._count(Event.BAD_BLOCK, len(items) - len(valid) + len(absent) - len(good))
        written = dict(zip(new, self._write_new(list(new.values()), deadline), strict=True))
        for n in good:
            results[n] = written[items[n].key]
            if results[n] is PutResult.STORED:
                written[items[n].key] = PutResult.PRESENT  # for the same key once more
        return results

    @abstractmethod
    def _known(self, keys: Sequence[StoreKey], deadline: float) -> Sequence[bool | None]:
        """Whether each block, about to be put, is present; None if the service did not answer."""

    @abstractmethod
    def _write_new(self, blocks: Sequence[NewBlock], deadline: float) -> list[PutResult]:
        """Writes blocks of different keys and counts failures; ends every put."""

    def _deadline(self, factor: float = 1.0) -> float:
        return time.monotonic() + factor * self._timeout_s

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

    def retry(self) -> None:  # noqa: B027
        """No-op: breakers decide when a server is asked again."""
