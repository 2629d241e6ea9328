"""One call to a daemon: admission by the breaker, a pooled connection, and the breaker's update."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from vllm_tiered_kv.core.breaker import Attempt, Breaker
from vllm_tiered_kv.errors import (
    ErrorCode,
    ProtocolError,
    RemoteError,
    RemoteRefusal,
    RemoteTimeout,
    SessionForgotten,
)
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.pool import ConnectionPool, PoolBusy
from vllm_tiered_kv.wire.messages import HelloReply

logger = logging.getLogger(__name__)

# Refusals worth retrying soon. Of the others, a refused session needs an operator, and a refused
# request says nothing about the next one.
_TRANSIENT = {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.BAD_MESSAGE}
_MAX_WARNINGS = 64
_MIN_FAIR_S = 0.02  # a timeout shorter than this says nothing about the daemon
_OPENING_S = 0.25  # a running daemon accepts a session in less, even if it is busy
_T = TypeVar("_T")


def record_failure(breaker: Breaker, attempt: Attempt, error: Exception, allowed_s: float) -> None:
    """Tells the breaker what a failed call says about the daemon, which had `allowed_s` to answer.
    That may be little: under load a call may wait for a thread until just before its deadline."""
    is_local = isinstance(error, ProtocolError)  # the request could not be encoded
    if is_local or (isinstance(error, RemoteTimeout) and allowed_s < _MIN_FAIR_S):
        breaker.forget(attempt)
    elif _refuses_request_only(error):
        breaker.succeed(attempt)
    elif isinstance(error, RemoteRefusal) and error.code not in _TRANSIENT:
        breaker.refuse(attempt, error.message)
    else:
        breaker.fail(attempt, str(error))


def retry_forgotten_session(connection: Connection, work: Callable[[], _T]) -> _T:
    """Runs `work`, and once more in a new session if the daemon has dropped the old one, as it does
    with too many. The retry is safe if the daemon has answered none of the requests."""
    answered = connection.answered
    try:
        return work()
    except SessionForgotten:
        if connection.answered > answered:
            raise
        return work()


def _refuses_request_only(error: Exception) -> bool:
    return (
        isinstance(error, RemoteRefusal)
        and error.code not in _TRANSIENT
        and not error.refuses_session
    )


class Caller:
    """Makes calls to one daemon. `RemoteStore` calls it from any thread. A failed call raises
    nothing: it is counted, reported to the breaker, and returns False."""

    def __init__(
        self,
        identity: EngineIdentity,
        settings: Settings,
        breaker: Breaker,
        max_connections: int,
    ) -> None:
        self.settings = settings
        self.breaker = breaker
        self.pool = ConnectionPool(self._connect, max_connections)
        self.failed_calls = 0  # ended by a timeout, a broken connection or a refusal
        self.last_error: Exception | None = None  # of the last call that failed
        self._hello = identity.hello()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._instance: bytes | None = None
        self._warned: set[str] = set()

    def attempt(self, work: Callable[[Connection], None], deadline: float) -> bool:
        """Runs `work` with an open session; returns whether it succeeded."""
        attempt = self.breaker.begin() if time.monotonic() < deadline else None
        if attempt is None:
            return False
        try:
            with self.pool.checkout(deadline) as connection:
                allowed_s = deadline - time.monotonic()
                before = connection.progress
                try:
                    self._open(connection, deadline)
                    retry_forgotten_session(connection, lambda: work(connection))
                except (RemoteError, ProtocolError) as error:
                    self._failed(attempt, error, connection.progress > before, allowed_s)
                    return False
            self.breaker.succeed(attempt)
            return True
        except PoolBusy:
            return False
        finally:
            self.breaker.forget(attempt)

    def record_error(self, error: Exception) -> None:
        self.last_error = error

    def warn_once(self, text: str) -> None:
        """Logs a warning about this daemon unless the same text was logged before."""
        with self._lock:
            if text in self._warned or len(self._warned) >= _MAX_WARNINGS:
                return
            self._warned.add(text)
        logger.warning("daemon %s %s", self.settings.address, text)

    def _open(self, connection: Connection, deadline: float) -> None:
        """Opens sockets one at a time as far as the deadline allows: the daemon's zmq assigns each
        connection to its least busy I/O thread, but simultaneous ones to the same thread."""
        max_wait_s = 0.0
        if not connection.is_open:
            max_wait_s = min(_OPENING_S, (deadline - time.monotonic()) / 4)
        has_lock = max_wait_s > 0 and self._opening.acquire(timeout=max_wait_s)
        try:
            connection.open(deadline)
        finally:
            if has_lock:
                self._opening.release()

    def _failed(self, attempt: Attempt, error: Exception, progress: bool, allowed_s: float) -> None:
        with self._lock:
            self.failed_calls += 1
        self.record_error(error)
        if self.pool.closing.is_set():
            return
        if isinstance(error, RemoteTimeout) and progress:
            self.breaker.succeed(attempt)  # slow, not dead
        else:
            if isinstance(error, ProtocolError) or _refuses_request_only(error):
                self.warn_once(f"refused a request, which counts as a miss: {error}")
            record_failure(self.breaker, attempt, error, allowed_s)

    def _connect(self, closing: threading.Event) -> Connection:
        return Connection(self.settings, self._hello, closing=closing, on_hello=self._on_hello)

    def _on_hello(self, reply: HelloReply) -> None:
        with self._lock:
            known, self._instance = self._instance, reply.instance
        if known not in (None, reply.instance):
            logger.warning(
                "daemon %s was restarted; its memory tier starts empty", self.settings.address
            )
