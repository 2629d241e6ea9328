"""The backing tier: a folder on a shared file system, with its collector."""

from __future__ import annotations

import math
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
from vllm_tiered_kv.server.opened_later import OpenedLater
from vllm_tiered_kv.stores.shared_dir.events import Event
from vllm_tiered_kv.stores.shared_dir.gc import SharedDirGc
from vllm_tiered_kv.stores.shared_dir.gc_thread import GcThread
from vllm_tiered_kv.stores.shared_dir.settings import SharedDirSettings
from vllm_tiered_kv.stores.shared_dir.store import SharedDirStore

_COLLECT_EVERY_S = 300.0


class _Folder:
    """An open one."""

    def __init__(self, settings: SharedDirSettings, on_lost: OnLost) -> None:
        self.store = SharedDirStore(settings)
        self.store.on_lost = on_lost
        self.collector = GcThread(SharedDirGc(self.store), _COLLECT_EVERY_S)
        self.collector.start()

    def close(self) -> None:
        self.collector.stop()
        self.store.close()


class BackingFolder:
    """A LowerStore. Unlike the shared directory's own, `usage` never scans: monitors ask for it."""

    def __init__(
        self, folder: str, capacity_bytes: int, ttl_s: int, patience_s: float = math.inf
    ) -> None:
        """A folder that does not answer for `patience_s` is opened when it does. Until then it is
        as one that hangs: calls that need it return when it is open."""
        self._settings = SharedDirSettings(
            folder, capacity_bytes=capacity_bytes, ttl_s=float(ttl_s) if ttl_s else None
        )
        self.on_lost: OnLost = lambda keys: None
        self._folder = OpenedLater(
            f"backing: {folder}",
            lambda: _Folder(self._settings, lambda keys: self.on_lost(keys)),
            _Folder.close,
            patience_s,
        )

    @property
    def is_open(self) -> bool:
        return self._folder.now is not None

    @property
    def _store(self) -> SharedDirStore:
        return self._folder.wait().store

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
            self._folder.wait().collector.wake()
        return results

    def delete(self, keys: Sequence[StoreKey]) -> int:
        return self._store.delete(keys)

    def flush(self) -> bool:
        folder = self._folder.now
        return folder is None or folder.store.flush()  # not open: it has been given nothing

    @property
    def damaged_blocks(self) -> int:
        """Found and not readable, since the start."""
        return self._count(Event.DAMAGED, Event.READ_ERROR)

    @property
    def failed_blocks(self) -> int:
        """Offered and not kept, since the start."""
        return self._count(Event.WRITE_ERROR, Event.NO_SPACE, Event.BAD_CHECKSUM, Event.BAD_KEY)

    def _count(self, *events: Event) -> int:
        folder = self._folder.now
        if folder is None:
            return 0
        counted = folder.store.counts.snapshot()
        return sum(counted[event] for event in events)

    def usage(self) -> StoreUsage:
        """As of the last collection; nothing before the first one."""
        folder = self._folder.now
        known = None if folder is None else folder.store.usage_tracker.latest(math.inf)
        blocks, nbytes = (0, 0) if known is None else (known.blocks, known.nbytes)
        return StoreUsage(blocks, nbytes, self._settings.capacity_bytes)

    def retry(self) -> None:
        """Nothing is paused after a failure."""

    def close(self) -> None:
        self._folder.close()
