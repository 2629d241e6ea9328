"""Blocks this process has written to a shared directory and not synced, and those a sync lost.

A file system tells of a failed write once. A sync after the one that failed succeeds, although the
bytes are gone when the machine loses its power: what was written before has to be written again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey

_MOST = 65536


class Unsynced:
    """From any thread. Bounded: a full list of unsynced blocks wants a sync, and of the lost ones
    those lost longest ago are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[StoreKey, None] = {}
        self._lost: dict[StoreKey, None] = {}
        self.failures = 0  # of syncs

    @property
    def is_full(self) -> bool:
        return len(self._written) >= _MOST

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
        while len(self._lost) > _MOST:
            del self._lost[next(iter(self._lost))]

    def is_lost(self, key: StoreKey) -> bool:
        return key in self._lost
