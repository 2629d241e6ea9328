"""A pool with a bounded number of connections to one daemon, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

from vllm_tiered_kv.errors import RemoteTimeout
from vllm_tiered_kv.remote.connection import Connection


class PoolBusy(RemoteTimeout):
    """All connections were in use until the deadline. It says nothing about the daemon."""


class ConnectionPool:
    """Connections of one `Caller`, for any thread. `make` opens one; the event that it gets ends
    waiting calls when the pool is closed."""

    def __init__(self, make: Callable[[threading.Event], Connection], max_connections: int) -> None:
        if max_connections < 1:
            raise ValueError(f"a pool needs at least one connection, not {max_connections}")
        self._make = make
        self._max_connections = max_connections
        # The connection used last comes first. None: a place for one that is not open.
        self._free: queue.LifoQueue[Connection | None] = queue.LifoQueue()
        for _ in range(max_connections):
            self._free.put(None)
        self.closing = threading.Event()

    @contextlib.contextmanager
    def checkout(self, deadline: float) -> Iterator[Connection]:
        """Yields a connection; raises PoolBusy if none becomes free by the deadline."""
        try:
            connection = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise PoolBusy("all connections are in use") from None
        try:
            if self.closing.is_set():
                raise PoolBusy("this client is closed")
            connection = connection or self._make(self.closing)
            yield connection
        finally:
            if connection is not None and not connection.idle:
                connection.drop()
            self._free.put(connection)
            if self.closing.is_set():
                self._close_free(0.0)

    def close(self, wait_s: float) -> None:
        """Ends calls in flight (as misses) and closes every connection. Idempotent."""
        self.closing.set()
        self._close_free(wait_s)

    def _close_free(self, wait_s: float) -> None:
        """Closes the connections that are free, or become free within this time."""
        end = time.monotonic() + wait_s
        taken = 0
        with contextlib.suppress(queue.Empty):
            while taken < self._max_connections:
                connection = self._free.get(timeout=max(0.0, end - time.monotonic()))
                taken += 1
                if connection is not None:
                    connection.close()
        for _ in range(taken):
            self._free.put(None)
