"""A pool with a bounded number of connections to one daemon, each used by one thread at a time."""

from __future__ import annotations

import contextlib
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
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._in_use = 0
        self.closing = threading.Event()

    @contextlib.contextmanager
    def checkout(self, deadline: float) -> Iterator[Connection]:
        """Yields a connection; raises PoolBusy if none becomes free by the deadline."""
        connection = self._take(deadline)
        try:
            yield connection
        finally:
            if not connection.idle:
                connection.drop()
            self._return(connection)

    def close(self, wait_s: float) -> None:
        """Ends calls in flight (as misses) and closes every connection. Idempotent."""
        self.closing.set()
        end = time.monotonic() + wait_s
        with self._changed:
            self._changed.notify_all()
            while self._in_use and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, deadline: float) -> Connection:
        with self._changed:
            while True:
                if self.closing.is_set():
                    raise PoolBusy("this client is closed")
                if self._idle:
                    self._in_use += 1
                    return self._idle.pop()
                if self._in_use < self._max_connections:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolBusy("all connections are in use")
                self._changed.wait(left)
            self._in_use += 1
        try:
            return self._make(self.closing)
        except BaseException:
            with self._changed:
                self._in_use -= 1
                self._changed.notify()
            raise

    def _return(self, connection: Connection) -> None:
        if self.closing.is_set():
            connection.close()
        with self._changed:
            self._in_use -= 1
            kept = not self.closing.is_set()
            if kept:
                self._idle.append(connection)
            self._changed.notify_all()
        if not kept:
            connection.close()
