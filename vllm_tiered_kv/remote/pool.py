"""A bounded number of connections to one daemon, each lent to one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from vllm_tiered_kv.errors import RemoteTimeout
from vllm_tiered_kv.remote.connection import Connection


class PoolBusy(RemoteTimeout):
    """All connections were in use until the deadline: says nothing about the daemon."""


class ConnectionPool:
    """`make` is called with the event that ends waiting calls when the pool is closed."""

    def __init__(self, make: Callable[[threading.Event], Connection], most: int) -> None:
        if most < 1:
            raise ValueError(f"a pool of {most} connections")
        self._make = make
        self._most = most
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._lent = 0
        self.closing = threading.Event()

    @contextlib.contextmanager
    def lend(self, deadline: float) -> Iterator[Connection]:
        """A connection until the end of the block; PoolBusy when none comes free in time."""
        connection = self._take(deadline)
        try:
            yield connection
        finally:
            if not connection.idle:
                connection.drop()
            self._give_back(connection)

    def close(self, wait_s: float) -> None:
        """Ends calls under way (as misses) and closes every connection. Idempotent."""
        self.closing.set()
        end = time.monotonic() + wait_s
        with self._changed:
            self._changed.notify_all()
            while self._lent and time.monotonic() < end:
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
                    self._lent += 1
                    return self._idle.pop()
                if self._lent < self._most:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PoolBusy("all connections are in use")
                self._changed.wait(left)
            self._lent += 1
        try:
            return self._make(self.closing)
        except BaseException:
            with self._changed:
                self._lent -= 1
                self._changed.notify()
            raise

    def _give_back(self, connection: Connection) -> None:
        if self.closing.is_set():
            connection.close()
        with self._changed:
            self._lent -= 1
            kept = not self.closing.is_set()
            if kept:
                self._idle.append(connection)
            self._changed.notify_all()
        if not kept:
            connection.close()
