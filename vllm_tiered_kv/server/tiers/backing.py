"""The backing tier: a store outside the daemon that many daemons share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from vllm_tiered_kv.core.store import (
    BlockFacts,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.options import redacted
from vllm_tiered_kv.stores.registry import BackingOptions, BackingStore, open_store

logger = logging.getLogger(__name__)

_REOPEN_S = 30.0  # after opening failed


class BackingTier:
    """The LowerStore of the backing tier; the threads of its executors call it. Every call first
    opens the store if it is not open yet, so that a store that hangs when the daemon starts is
    handled like one that hangs later. `usage` never asks the store: monitors call it.
    """

    def __init__(self, options: BackingOptions, recorder: Recorder | None = None) -> None:
        """`recorder` counts calls that the store could not make."""
        self.name = redacted(options.url)
        self._memory: HostRegion | None = None
        self._options = options
        self._recorder = recorder
        self._opened: BackingStore | None = None
        self._opening = threading.RLock()
        self._closed = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def is_absent(self) -> bool:
        """Whether the store is not open yet, or knows that it cannot be reached."""
        return self._opened is None or self._opened.is_absent

    @property
    def read_batch(self) -> int:
        return 1 if self._opened is None else self._opened.read_batch

    def use_memory(self, memory: HostRegion) -> None:
        """Names, before `open`, the memory in which most blocks lie that are read and written."""
        self._memory = memory

    def open(self) -> None:
        """Opens the store once; raises what opening raises. Idempotent."""
        with self._opening:
            if self._opened is None and not self._closed.is_set():
                store = open_store(self._options, self._count_unanswered)
                if self._memory is not None:
                    store.use_memory(self._memory)
                self._opened = store
                if self._closed.is_set():  # closed while it was being opened
                    store.close()

    def open_with_retries(self) -> None:
        """Retries until the store is open or this tier is closed."""
        with self._opening:  # one thread retries, the others wait for it
            while self._opened is None and not self._closed.is_set():
                try:
                    self.open()
                except Exception as error:
                    logger.error(
                        "backing: cannot open %s: %s; retrying in %g s",
                        self.name,
                        error,
                        _REOPEN_S,
                    )
                    self._closed.wait(_REOPEN_S)

    def _count_unanswered(self) -> None:
        if self._recorder is not None:
            self._recorder.add(names.BACKING_LATE, 1)

    @property
    def _store(self) -> BackingStore:
        if self._opened is None:
            self.open_with_retries()
        if self._opened is None:
            raise OSError(f"{self.name} was not opened before the daemon stopped")
        return self._opened

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
        return self._store.put(items, durability)

    def delete(self, keys: Sequence[StoreKey]) -> int:
        return self._store.delete(keys)

    def flush(self) -> bool:
        return self._opened is None or self._opened.flush()  # not open: nothing was written to it

    def take_lost(self) -> list[StoreKey]:
        return [] if self._opened is None else self._opened.take_lost()

    @property
    def damaged_blocks(self) -> int:
        return 0 if self._opened is None else self._opened.damaged_blocks

    @property
    def failed_blocks(self) -> int:
        return 0 if self._opened is None else self._opened.failed_blocks

    def usage(self) -> StoreUsage:
        if self._opened is None:
            return StoreUsage(0, 0, self._options.capacity_bytes)
        return self._opened.known_usage()

    def retry(self) -> None:
        if self._opened is not None:
            self._opened.retry()

    def close(self) -> None:
        """Does not wait for a store that is being opened; that one is closed once it is open."""
        self._closed.set()
        if self._opened is not None:
            self._opened.close()
