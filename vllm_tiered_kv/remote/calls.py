"""Making one call to a daemon: leave from the breaker, a connection, and a verdict at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
from vllm_tiered_kv.remote.health import Attempt, Breaker
from vllm_tiered_kv.remote.pool import ConnectionPool, PoolBusy
from vllm_tiered_kv.wire.messages import HelloReply

logger = logging.getLogger(__name__)

# Worth trying again soon. Of other refusals, those of a session need a person's help, and those of
# a request say nothing about the next one.
_PASSING = {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL, ErrorCode.BAD_MESSAGE}
_MAX_SENTENCES = 64
_FAIR_S = 0.02  # in less, a daemon that is well need not have answered
_OPENING_S = 0.25  # a daemon that is there needs a fraction of it, if busy a large one
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteCounts:
    """Totals since the start."""

    damaged_blocks: int = 0  # arrived with another checksum than they were sent with
    failed_calls: int = 0  # ended by a timeout, a broken connection or a refusal
    restarts: int = 0  # times another instance of the daemon answered


def judge(breaker: Breaker, attempt: Attempt, error: Exception, allowed_s: float) -> None:
    """Tells the breaker what a failed call says about the daemon, which had so long to answer. Of
    many requests that come at once the last have waited for a thread until little was left."""
    is_ours = isinstance(error, ProtocolError)  # it could not even be sent
    if is_ours or (isinstance(error, RemoteTimeout) and allowed_s < _FAIR_S):
        breaker.forget(attempt)
    elif _is_about_the_request(error):
        breaker.succeed(attempt)
    elif isinstance(error, RemoteRefusal) and error.code not in _PASSING:
        breaker.refuse(attempt, error.message)
    else:
        breaker.fail(attempt, str(error))


def in_session(connection: Connection, work: Callable[[], _T]) -> _T:
    """What comes of `work`. A daemon that has forgotten the session, having many, is greeted again
    and asked the same: it is there, and has done nothing yet of what it was asked."""
    answered = connection.answered
    try:
        return work()
    except SessionForgotten:
        if connection.answered > answered:
            raise
        return work()


def _is_about_the_request(error: Exception) -> bool:
    return (
        isinstance(error, RemoteRefusal)
        and error.code not in _PASSING
        and not error.refuses_session
    )


class Caller:
    """Calls to one daemon, from any thread. What goes wrong ends here."""

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
        self.counts = RemoteCounts()
        self.last_error: Exception | None = None  # what ended the last call that failed
        self._hello = identity.hello()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._instance: bytes | None = None
        self._told: set[str] = set()

    def attempt(self, work: Callable[[Connection], None], deadline: float) -> bool:
        """Whether `work` came to its end with an open session."""
        attempt = self.breaker.begin() if time.monotonic() < deadline else None
        if attempt is None:
            return False
        try:
            with self.pool.lend(deadline) as connection:
                allowed_s = deadline - time.monotonic()
                before = connection.progress
                try:
                    self._open(connection, deadline)
                    in_session(connection, lambda: work(connection))
                except (RemoteError, ProtocolError) as error:
                    self._failed(attempt, error, connection.progress > before, allowed_s)
                    return False
            self.breaker.succeed(attempt)
            return True
        except PoolBusy:
            return False
        finally:
            self.breaker.forget(attempt)

    def close(self, wait_s: float) -> None:
        """Ends calls under way and leaves no sockets behind. Idempotent."""
        self.pool.close(wait_s)

    def count(self, *, damaged_blocks: int = 0, failed_calls: int = 0, restarts: int = 0) -> None:
        with self._lock:
            now = self.counts
            self.counts = RemoteCounts(
                now.damaged_blocks + damaged_blocks,
                now.failed_calls + failed_calls,
                now.restarts + restarts,
            )

    def note(self, error: Exception) -> None:
        self.last_error = error

    def tell_once(self, sentence: str) -> None:
        with self._lock:
            if sentence in self._told or len(self._told) >= _MAX_SENTENCES:
                return
            self._told.add(sentence)
        logger.warning("daemon %s %s", self.settings.address, sentence)

    def _open(self, connection: Connection, deadline: float) -> None:
        """Sockets are opened one after the other, as far as that costs no time: the daemon's zmq
        gives a connection to its least busy thread, but those that come at once to the same."""
        patience = 0.0
        if not connection.is_open:
            patience = min(_OPENING_S, (deadline - time.monotonic()) / 4)
        has_turn = patience > 0 and self._opening.acquire(timeout=patience)
        try:
            connection.open(deadline)
        finally:
            if has_turn:
                self._opening.release()

    def _failed(self, attempt: Attempt, error: Exception, progress: bool, allowed_s: float) -> None:
        self.count(failed_calls=1)
        self.note(error)
        if self.pool.closing.is_set():
            return
        if isinstance(error, RemoteTimeout) and progress:
            self.breaker.succeed(attempt)  # slow, not dead
        else:
            if isinstance(error, ProtocolError) or _is_about_the_request(error):
                self.tell_once(f"does not serve a request: {error}")
            judge(self.breaker, attempt, error, allowed_s)

    def _connect(self, closing: threading.Event) -> Connection:
        return Connection(self.settings, self._hello, closing=closing, on_hello=self._greeted)

    def _greeted(self, greeting: HelloReply) -> None:
        with self._lock:
            known, self._instance = self._instance, greeting.instance
        if known not in (None, greeting.instance):
            self.count(restarts=1)
            logger.warning("daemon %s was restarted", self.settings.address)
