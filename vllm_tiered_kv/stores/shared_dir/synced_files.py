"""What this process knows about the durability of its files in a shared directory.

A file that somebody else wrote, or that was not synced, may be of the right length and hold
nothing: a power cut can keep a file's size and lose its bytes. A file system tells of a failed
write once. A sync after the one that failed succeeds, although the bytes are gone when the machine
loses its power: what was written before has to be written again.
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
    """Files known to be whole and on disk, so that nobody has to read them to say so: this process
    wrote and synced them, or synced and then read them. A file that was exchanged or touched since
    is not known any more, and what was noted longest ago is forgotten first. From any thread."""

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
    """Blocks this process has written and not synced, and those a sync lost. Bounded: a full list
    of unsynced blocks wants a sync, and of the lost ones those lost longest ago are forgotten. From
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[StoreKey, None] = {}
        self._lost: dict[StoreKey, None] = {}
        self.failures = 0  # of syncs

    @property
    def is_full(self) -> bool:
        return len(self._written) >= _MAX_UNSYNCED

    def wrote(self, keys: Sequence[StoreKey], failures: int) -> bool:
        """Notes blocks whose writing began after so many failures. False where a sync has failed
        since, and may have lost them."""
        with self._lock:
            if failures != self.failures:
                self._lose(keys)
                return False
            for key in keys:
                self._written[key] = None
                self._lost.pop(key, None)
            return True

    def synced(self, keys: Sequence[StoreKey]) -> None:
        """These were written and synced by themselves."""
        with self._lock:
            for key in keys:
                self._lost.pop(key, None)

    def take(self) -> list[StoreKey]:
        """Those that a sync beginning now covers."""
        with self._lock:
            taken, self._written = self._written, {}
            return list(taken)

    def failed(self, taken: Sequence[StoreKey]) -> list[StoreKey]:
        """What the sync that covered these may have lost: also what was written meanwhile."""
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
