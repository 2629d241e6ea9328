"""The breaker: decides whether to call a server. There is one for each daemon, and one for each
server of a distributed store.

A server that does not answer costs every call its full deadline. After a few consecutive failures
the breaker opens, and calls end at once, as misses. After a cool-down it admits one call as a
probe: success closes the breaker, failure doubles the cool-down up to a cap. A server that answers
but refuses this client gets a long cool-down, because an operator has to act.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_THRESHOLD = 3  # failures in a row
_COOLDOWN_S = 0.5
_LONGEST_COOLDOWN_S = 10.0
_REFUSAL_COOLDOWN_S = 30.0


class BreakerState(enum.Enum):
    """Whether calls go through."""

    CLOSED = enum.auto()  # calls go through
    OPEN = enum.auto()  # calls end at once
    HALF_OPEN = enum.auto()  # one call probes the server


@dataclass(frozen=True, slots=True)
class Attempt:
    """Permission for one call; the caller ends it with `succeed`, `fail`, `refuse` or `forget`."""

    period: int  # of the breaker's state: a result from an earlier period is stale
    probe: bool


class Breaker:
    """Circuit breaker of one server, named in logs. Any thread may call it; no call waits."""

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` returns a number from 0 to 1 that shortens a cool-down by up to a quarter, so
        that clients do not all return to a server at once."""
        self._name = name
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._period = 0
        self._failures_in_row = 0
        self._opened_in_row = 0
        self._open_until = 0.0
        self._last_refusal = ""
        self.is_up = False
        """Whether the last result was a success; False before the first one."""

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def available(self) -> bool:
        """Whether `begin` would admit a call now."""
        with self._lock:
            return self._state is BreakerState.CLOSED or (
                self._state is BreakerState.OPEN and self._clock() >= self._open_until
            )

    def begin(self) -> Attempt | None:
        """Admits a call; None if the caller must do without the server."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Attempt(self._period, probe=False)
            if self._state is BreakerState.OPEN and self._clock() >= self._open_until:
                self._enter(BreakerState.HALF_OPEN)
                return Attempt(self._period, probe=True)
            return None

    def succeed(self, attempt: Attempt) -> None:
        """The server answered."""
        with self._lock:
            if attempt.period != self._period:
                return
            self._failures_in_row = 0
            self.is_up = True
            if attempt.probe:
                self._opened_in_row = 0
                self._last_refusal = ""
                self._enter(BreakerState.CLOSED)
                logger.warning("%s is back", self._name)

    def fail(self, attempt: Attempt, reason: str, is_absent: bool = False) -> None:
        """The server did not answer, or its answer was unusable. `is_absent`: nothing listens at
        the address. One such failure opens the breaker, and the cool-down stays short because the
        next check is cheap."""
        with self._lock:
            if attempt.period != self._period:
                return
            self._failures_in_row += 1
            self.is_up = False
            if not attempt.probe and not is_absent and self._failures_in_row < _THRESHOLD:
                return
            if is_absent:
                self._opened_in_row = 0
            cooldown = min(_LONGEST_COOLDOWN_S, _COOLDOWN_S * 2.0 ** min(self._opened_in_row, 60))
            self._open(cooldown)
            if not attempt.probe:
                logger.warning(
                    "cannot reach %s (%s; is it running?); continuing without it",
                    self._name,
                    reason,
                )

    def refuse(self, attempt: Attempt, reason: str) -> None:
        """The server refused this client."""
        with self._lock:
            if reason != self._last_refusal:
                self._last_refusal = reason
                logger.warning(
                    "%s refuses this client: %s; continuing without it",
                    self._name,
                    reason,
                )
            if attempt.period == self._period:
                self.is_up = False
                self._open(_REFUSAL_COOLDOWN_S)

    def forget(self, attempt: Attempt) -> None:
        """The call ended without telling anything about the server. No effect after a result."""
        with self._lock:
            if attempt.probe and attempt.period == self._period:
                self._enter(BreakerState.OPEN)  # the next call may probe at once

    def _open(self, cooldown: float) -> None:
        self._open_until = self._clock() + cooldown * (1 - 0.25 * self._jitter())
        self._opened_in_row += 1
        self._failures_in_row = 0
        self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._period += 1
