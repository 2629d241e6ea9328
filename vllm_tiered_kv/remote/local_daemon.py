"""A daemon on this host, whose memory this process maps: across its restarts, and while idle.

`LocalDaemon` attaches to the memory, again after a restart, and retires it when the daemon is gone:
memory of a dead daemon would be held by us alone. It stays mapped while anybody reads it. A thread
sees to that, and to leases that are to be released or came too late, while the program does
nothing.

A lookup counts the leading blocks the daemon has and leases those that lie in its memory, in one
question: they may leave before a second one. The lease lasts until it is released, by a thread
nobody waits for. When the daemon dies its memory stays as it is for those who map it. When this
process dies the daemon takes everything back; the workers of an engine do not outlive their
scheduler with anything they read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.remote.shared_memory import LookupLease, SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # how often the thread looks whether the daemon has gone, or settles what it can
_CLOSING_S = 0.5  # how long a daemon gets to take everything back


@dataclass(frozen=True, slots=True)
class LeasedMatch:
    """A match whose first blocks may be leased."""

    count: int
    lease: LookupLease | None
    by_tier: dict[Tier, int]
    """Where the fastest copies of all of them lie."""


class LocalDaemon:
    """The memory of one daemon of this host, for those who look up, read and write blocks there.

    All calls may be made from any thread.
    """

    def __init__(
        self,
        store: RemoteStore,
        on_attach: Callable[[SharedMemory], bool] = lambda memory: True,
        keeps_departed: Callable[[SharedMemory], bool] = lambda memory: False,
    ) -> None:
        """`on_attach` prepares memory before anybody uses it; where it says False, this daemon's
        memory is not used at all. Memory of a daemon that is gone is retired unless
        `keeps_departed`, which is asked again and again; until then no other is attached."""
        self._store = store
        self._on_attach = on_attach
        self._keeps_departed = keeps_departed
        self._is_refused = False
        self._keeps_attached = False
        self._mapped: list[SharedMemory] = []  # not closed yet; replaced as a whole, under the lock
        self._lock = threading.Lock()
        self._attaching = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def keep_attached(self) -> None:
        """Attaches in the background, now and whenever the daemon was restarted."""
        self._keeps_attached = True
        self._wake.set()
        self._start_thread()

    @property
    def current(self) -> SharedMemory | None:
        """The memory of the daemon that is there now, if it is mapped. Never waits."""
        return next((m for m in self._mapped if m.alive and not m.is_retired), None)

    def mapped(self, arena_id: bytes) -> SharedMemory | None:
        """The memory of this name, also of a daemon that has gone, as long as it is kept."""
        return next((m for m in self._mapped if m.arena_id == arena_id), None)

    def attach(self) -> SharedMemory | None:
        """The memory of the daemon that is there now, mapped if it was not; None where blocks have
        to be sent."""
        memory = self.current
        if memory is not None or self._is_closing or self._is_refused:
            return memory
        self._retire_departed()
        with self._attaching:
            memory = self.current  # another thread may have been faster
            if memory is None and all(old.is_retired for old in self._mapped):
                memory = self._store.attach()
                if memory is not None and memory not in self._mapped:
                    memory = self._take(memory)
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # no thread to be had now; with the next call
                self._start_thread()
        return memory

    @contextlib.contextmanager
    def reading(self) -> Iterator[SharedMemory | None]:
        """The memory, mapped until the end of the block; None where blocks have to be sent."""
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
        """How many leading blocks are there for all ranks, and a lease of those in memory; None:
        unknown. Where nothing can be leased it is an ordinary match."""
        memory = self.attach()
        found = None if memory is None else memory.lookup(keys, ranks, nbytes, deadline)
        if found is not None:
            by_tier = dict(zip((Tier.MEMORY, Tier.SSD, Tier.BACKING), found.tiers, strict=True))
            return LeasedMatch(found.count, found.lease, by_tier)
        match = self._store.match_all(keys, ranks, 0, deadline)
        return None if match is None else LeasedMatch(match.count, None, match.by_tier)

    @property
    def lookup_leases(self) -> int:
        """How many leases of lookups are neither released nor about to be."""
        return sum(memory.lookup_leases for memory in self._mapped if memory.alive)

    def close(self, waits_for_readers: bool = False) -> None:
        """Releases everything, as far as the daemon takes it, and retires the memory: it is
        unmapped when its last reader has left."""
        with self._lock:
            self._is_closing = True
            mapped = list(self._mapped)
        for memory in mapped:
            memory.release_lookups()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSING_S)
        for memory in mapped:
            memory.retire()  # ends what the thread may be waiting for
        if self._thread is not None:
            self._thread.join()
        if waits_for_readers:
            for memory in mapped:
                memory.wait_until_closed()

    # ---- inside ---------------------------------------------------------------------------------

    def _take(self, memory: SharedMemory) -> SharedMemory | None:
        """Prepares memory that was just mapped; None, and it is retired, if it cannot be used."""
        memory.on_unsettled = self._look_soon
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

    def _retire_departed(self) -> None:
        """Retires the memory of a daemon that has gone. Its leases died with it."""
        for memory in self._mapped:
            if not memory.is_retired and not memory.alive and not self._keeps_departed(memory):
                memory.retire()
        with self._lock:
            self._mapped = [memory for memory in self._mapped if not memory.closed]

    def _look_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread to be had now; with the next call
            self._start_thread()
        self._wake.set()

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closing:
                thread = threading.Thread(
                    target=self._look_after, name="tiered-kv-local", daemon=True
                )
                thread.start()
                self._thread = thread

    def _look_after(self) -> None:
        while True:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            try:
                self._look()
            except Exception:  # a thread that ends would leave every later lease with the daemon
                logger.exception("memory of %s could not be looked after", self._store.address)
            memory = self.current
            if self._is_closing and (memory is None or memory.is_settled):
                return

    def _look(self) -> None:
        """Once around: is the daemon there, did replies come too late, is a release left?"""
        self._retire_departed()
        memory = self.attach() if self._keeps_attached else self.current
        if memory is not None:
            memory.settle()
