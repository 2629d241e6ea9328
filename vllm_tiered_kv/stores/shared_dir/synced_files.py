"""Tracks which files of a shared directory this process knows to be durable.

A file that another process wrote, or that was not synced, may have the right length and no content:
a power loss can keep the size of a file and lose its bytes. A file system reports a failed
write-back once. The next sync succeeds although the bytes are lost, so everything written before
the failed sync must be written again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.tree import Identity

_MAX_SYNCED = 65536
_MAX_UNSYNCED = 65536


class SyncedFiles:
    """A bounded set of files known to be complete and durable, so that they need not be read again.

    This process wrote and synced them, or synced and then read them. A file that was replaced or
    touched since is unknown again; the oldest entries are removed first. Thread-safe.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[StoreKey, Identity] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: StoreKey, file: Identity) -> None:
        with self._lock:
            self._files[key] = file
            self._files.move_to_end(key)
            while len(self._files) > _MAX_SYNCED:
                self._files.popitem(last=False)

    def knows(self, key: StoreKey, file: Identity) -> bool:
        with self._lock:
            return self._files.get(key) == file


class UnsyncedBlocks:
    """Blocks that this process has written but not synced, and those that a failed sync lost.

    Both are bounded: when the unsynced ones are full, the store syncs; of the lost ones the oldest
    are removed first. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[StoreKey, None] = {}
        self._lost: dict[StoreKey, None] = {}
        self.failures = 0  # number of failed syncs

    @property
    def is_full(self) -> bool:
        return len(self._written) >= _MAX_UNSYNCED

    def wrote(self, keys: Sequence[StoreKey], failures: int) -> bool:
        """Adds blocks whose writing started after this number of failures. Returns False if a sync
        has failed since, which may have lost them."""
        with self._lock:
            if failures != self.failures:
                self._lose(keys)
                return False
            for key in keys:
                self._written[key] = None
                self._lost.pop(key, None)
            return True

    def synced(self, keys: Sequence[StoreKey]) -> None:
        """Records blocks that were written and synced individually."""
        with self._lock:
            for key in keys:
                self._lost.pop(key, None)

    def take(self) -> list[StoreKey]:
        """Takes the blocks that a sync starting now covers."""
        with self._lock:
            taken, self._written = self._written, {}
            return list(taken)

    def failed(self, taken: Sequence[StoreKey]) -> list[StoreKey]:
        """Records that the sync of these blocks failed. Returns all blocks it may have lost,
        including those written meanwhile."""
        with self._lock:
            self.failures += 1
            lost = [*taken, *self._written]
            self._written = {}
            self._lose(lost)
            return lost

    def _lose(self, keys: Sequence[StoreKey]) -> None:
        self._lost.update(dict.fromkeys(keys))
        while len(self._lost) > _MAX_UNSYNCED:
            del self._lost[next(iter(self._lost))]

    def is_lost(self, key: StoreKey) -> bool:
        return key in self._lost
