"""The backing tier: a folder on a shared file system, with its garbage collector."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence

from vllm_tiered_kv.core.store import (
    BlockFacts,
    Durability,
    OnLost,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.gc import GcThread, SharedDirGc
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore

logger = logging.getLogger(__name__)

_COLLECT_EVERY_S = 300.0
_REOPEN_S = 30.0  # after opening failed


class _Folder:
    """The open shared directory and its collector thread."""

    def __init__(self, settings: SharedDirSettings, on_lost: OnLost) -> None:
        self.store = SharedDirStore(settings)
        self.store.on_lost = on_lost
        self.collector = GcThread(SharedDirGc(self.store), _COLLECT_EVERY_S)
        self.collector.start()

    def close(self) -> None:
        self.collector.stop()
        self.store.close()


class BackingFolder:
    """The LowerStore of the backing tier; the threads of its executors call it. Every call first
    opens the folder if it is not open yet, so that a folder that hangs when the daemon starts is
    handled like one that hangs later. `usage` never scans the folder: monitors call it.
    """

    def __init__(self, folder: str, capacity_bytes: int, ttl_s: int) -> None:
        self._settings = SharedDirSettings(
            folder, capacity_bytes=capacity_bytes, ttl_s=float(ttl_s) if ttl_s else None
        )
        self.on_lost: OnLost = lambda keys: None
        self._folder: _Folder | None = None
        self._opening = threading.RLock()
        self._closed = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._folder is not None

    def open(self) -> None:
        """Opens the folder once; raises what opening raises. Idempotent."""
        with self._opening:
            if self._folder is None and not self._closed.is_set():
                folder = _Folder(self._settings, lambda keys: self.on_lost(keys))
                self._folder = folder
                if self._closed.is_set():  # closed while it was being opened
                    folder.close()

    def open_with_retries(self) -> None:
        """Retries until the folder is open or this store is closed."""
        with self._opening:  # one thread retries, the others wait for it
            while self._folder is None and not self._closed.is_set():
                try:
                    self.open()
                except Exception as error:
                    logger.error(
                        "backing: cannot open the folder: %s; retrying in %g s", error, _REOPEN_S
                    )
                    self._closed.wait(_REOPEN_S)

    def _opened(self) -> _Folder:
        if self._folder is None:
            self.open_with_retries()
        if self._folder is None:
            raise OSError(f"{self._settings.root} was not opened before the daemon stopped")
        return self._folder

    @property
    def _store(self) -> SharedDirStore:
        return self._opened().store

    def match(self, keys: Sequence[StoreKey]) -> int:
        return self._store.match(keys)

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._store.contains(keys)

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        return self._store.describe(keys)

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        return self._store.get(keys, into)

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        results = self._store.put(items, durability)
        if PutResult.DROPPED in results:
            self._opened().collector.wake()
        return results

    def delete(self, keys: Sequence[StoreKey]) -> int:
        return self._store.delete(keys)

    def flush(self) -> bool:
        folder = self._folder
        return folder is None or folder.store.flush()  # not open: nothing was written to it

    @property
    def damaged_blocks(self) -> int:
        """Blocks that were found but not readable, since the start."""
        return self._count(Event.DAMAGED, Event.READ_ERROR)

    @property
    def failed_blocks(self) -> int:
        """Blocks that were offered but not stored, since the start."""
        return self._count(Event.WRITE_ERROR, Event.NO_SPACE, Event.BAD_CHECKSUM, Event.BAD_KEY)

    def _count(self, *events: Event) -> int:
        folder = self._folder
        if folder is None:
            return 0
        counted = folder.store.counts.snapshot()
        return sum(counted[event] for event in events)

    def usage(self) -> StoreUsage:
        """As of the last garbage collection; zero before the first one."""
        folder = self._folder
        known = None if folder is None else folder.store.usage_tracker.latest(math.inf)
        blocks, nbytes = (0, 0) if known is None else (known.blocks, known.nbytes)
        return StoreUsage(blocks, nbytes, self._settings.capacity_bytes)

    def retry(self) -> None:
        """No-op: this store does not pause after a failure."""

    def close(self) -> None:
        """Does not wait for a folder that is being opened; that one is closed once it is open."""
        self._closed.set()
        if self._folder is not None:
            self._folder.close()
