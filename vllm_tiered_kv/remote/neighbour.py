"""The memory of a daemon on this host, for programs that copy blocks themselves.

Attached to when it is first used, and anew when the daemon was restarted. It stays mapped while
anybody copies, whatever becomes of the daemon, and no longer: memory of a daemon that has gone
would be held by us alone. A thread sees to that, and to leases that came too late, while the
program does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from vllm_tiered_kv.remote.shared_memory import SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Neighbour:
    """All calls may be made from any thread."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._users: dict[SharedMemory, int] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def memory(self) -> Iterator[SharedMemory | None]:
        """The memory, mapped until the end of the block; None where blocks have to be sent."""
        memory = self._enter()
        try:
            yield memory
        finally:
            if memory is not None:
                self._leave(memory)

    def close(self) -> None:
        """Returns when nobody copies any more. The memory itself is closed with the store."""
        self._stop.set()
        with self._changed:
            while any(self._users.values()):
                self._changed.wait()
        if self._thread is not None:
            self._thread.join()

    def _enter(self) -> SharedMemory | None:
        memory = self._store.attach()
        with self._changed:
            self._give_up_dead()
            if memory is None or memory.closed or self._stop.is_set():
                return None
            self._users[memory] = self._users.get(memory, 0) + 1
            self._start_thread()
            return memory

    def _leave(self, memory: SharedMemory) -> None:
        with self._changed:
            self._users[memory] -= 1
            self._give_up_dead()
            self._changed.notify_all()

    def _give_up_dead(self) -> None:
        """Under the lock."""
        for memory, users in list(self._users.items()):
            if not users and not memory.alive:
                del self._users[memory]
                memory.close()

    def _start_thread(self) -> None:
        """Under the lock."""
        if self._thread is None:
            thread = threading.Thread(target=self._look_after, name="tiered-kv-near", daemon=True)
            with contextlib.suppress(RuntimeError):  # none to be had now; with the next call
                thread.start()
                self._thread = thread

    def _look_after(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                with self._changed:
                    self._give_up_dead()
                    known = list(self._users)
                for memory in known:
                    memory.settle()
            except Exception:  # a thread that ends would leave every later lease with the daemon
                logger.exception("memory of %s could not be seen to", self._store.address)
