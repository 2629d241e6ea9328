"""The shared memory of a daemon on this host, across restarts of the daemon.

`LocalDaemon` attaches to the memory, again after each restart, and retires it when the daemon is
gone, because only this process would then keep it allocated. Retired memory stays mapped while
somebody reads it. A thread does this in the background, and also releases leases, including those
of late replies.

A lookup counts the leading blocks that the daemon has and leases those in its memory, in one
request, because blocks may be evicted before a second one. The lease lasts until it is released,
which the thread does, so that no caller waits for it. If the daemon dies, its memory stays readable
in the processes that map it. If this process dies, the daemon ends its leases; the workers of an
engine end with their scheduler, so that none of them reads leased blocks after that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.remote.shared_memory import LeasedMatch, SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_MAINTAIN_EVERY_S = 0.5
_CLOSING_S = 0.5  # most time for the release of leases on close


class LocalDaemon:
    """Access to the shared memory of one daemon on this host: lookups, reads and writes. Scheduler,
    workers and `TokenCache` make one per daemon. Any thread may call it."""

    def __init__(
        self,
        store: RemoteStore,
        on_attach: Callable[[SharedMemory], bool] = lambda memory: True,
        on_unmap: Callable[[SharedMemory], None] = lambda memory: None,
        keeps_dead: Callable[[SharedMemory], bool] = lambda memory: False,
    ) -> None:
        """`on_attach` prepares memory before its first use; if it returns False, this daemon's
        memory is never used. `on_unmap` is called before memory is unmapped. Memory of a dead
        daemon is retired as soon as `keeps_dead`, which is polled, returns False; no new memory is
        attached before that."""
        self._store = store
        self._on_attach = on_attach
        self._on_unmap = on_unmap
        self._keeps_dead = keeps_dead
        self._is_refused = False
        self._keeps_attached = False
        self._mapped: list[SharedMemory] = []  # replaced under the lock, never changed in place
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def keep_attached(self) -> None:
        """Attaches in the background, now and after each restart of the daemon."""
        self._keeps_attached = True
        self._wake.set()
        self._start_thread()

    @property
    def current(self) -> SharedMemory | None:
        """The memory of the running daemon if it is mapped. Never waits."""
        return next((m for m in self._mapped if m.alive and not m.is_retired), None)

    def mapped(self, arena_id: bytes) -> SharedMemory | None:
        """Returns the memory with this id if it is mapped, also that of a dead daemon."""
        return next((m for m in self._mapped if m.arena_id == arena_id), None)

    def attach(self) -> SharedMemory | None:
        """Returns the memory of the running daemon, and maps it if necessary; None if blocks have
        to go through the socket."""
        memory = self.current
        if memory is not None or self._is_closing or self._is_refused:
            return memory
        self._retire_dead()
        with self._attaching:
            memory = self.current  # another thread may have attached it meanwhile
            if memory is None and all(old.is_retired for old in self._mapped):
                memory = self._store.attach(self._wake_thread, self._on_unmap)
                if memory is not None and memory not in self._mapped:
                    memory = self._adopt(memory)
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # out of threads: the next call tries again
                self._start_thread()
        return memory

    @contextlib.contextmanager
    def reading(self) -> Iterator[SharedMemory | None]:
        """Yields the memory and keeps it mapped; None if blocks have to go through the socket."""
        memory = self.attach()
        if memory is None or not memory.enter():
            yield None
            return
        try:
            yield memory
        finally:
            memory.leave()

    def lookup(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], nbytes: int, deadline: float
    ) -> LeasedMatch | None:
        """Counts the leading blocks that the daemon has for all ranks and leases those in memory;
        None if it does not answer. If nothing can be leased, this is an ordinary match."""
        memory = self.attach()
        found = None if memory is None else memory.lookup(keys, ranks, nbytes, deadline)
        if found is not None:
            return found
        match = self._store.match_all(keys, ranks, 0, deadline)
        return None if match is None else LeasedMatch(match.count, None, match.by_tier)

    def close(self, waits_for_readers: bool = False) -> None:
        """Releases all leases if the daemon answers, and retires the memory, which is unmapped when
        its last reader has left."""
        with self._lock:
            self._is_closing = True
            mapped = list(self._mapped)
        for memory in mapped:
            memory.release_lookups()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
        for memory in mapped:
            memory.retire()  # ends a call in which the thread may wait
        if self._thread is not None:
            self._thread.join()
        if waits_for_readers:
            for memory in mapped:
                memory.wait_until_closed()

    # ---- internals ------------------------------------------------------------------------------

    def _adopt(self, memory: SharedMemory) -> SharedMemory | None:
        """Prepares newly mapped memory; retires it and returns None if it cannot be used."""
        try:
            self._is_refused = not self._on_attach(memory)
        except BaseException:
            memory.retire()
            raise
        with self._lock:
            is_wanted = not self._is_refused and not self._is_closing
            if is_wanted:
                self._mapped = [*(m for m in self._mapped if not m.closed), memory]
        if not is_wanted:
            memory.retire()
            return None
        return memory

    def _retire_dead(self) -> None:
        """Retires the memory of a dead daemon, whose leases have ended."""
        for memory in self._mapped:
            if not memory.is_retired and not memory.alive and not self._keeps_dead(memory):
                memory.retire()
        with self._lock:
            self._mapped = [memory for memory in self._mapped if not memory.closed]

    def _wake_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # out of threads: the next call tries again
            self._start_thread()
        self._wake.set()

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closing:
                thread = threading.Thread(target=self._run, name="tiered-kv-local", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while True:
            self._wake.wait(_MAINTAIN_EVERY_S)
            self._wake.clear()
            try:
                self._maintain()
            except Exception:  # without the thread no later lease would be released
                logger.exception(
                    "maintenance of the shared memory of daemon %s failed; retrying in %.1f s",
                    self._store.address,
                    _MAINTAIN_EVERY_S,
                )
            memory = self.current
            if self._is_closing and (memory is None or memory.is_settled):
                return

    def _maintain(self) -> None:
        """Follows restarts of the daemon, releases leases and takes late replies."""
        self._retire_dead()
        memory = self.attach() if self._keeps_attached else self.current
        if memory is not None:
            memory.settle()
