"""Whether a daemon is worth asking: one breaker for each.

A daemon that does not answer would cost every call its whole deadline. After a few failures in a
row the breaker opens and calls end at once, as misses. When a cool-down has passed one call goes
through as a probe: its answer closes the breaker, its failure doubles the cool-down up to a cap. A
daemon that answers but refuses this engine gets a long cool-down, since only a person can help.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

logger = logging.getLogger(__name__)


class BreakerState(enum.Enum):
    CLOSED = enum.auto()  # calls go through
    OPEN = enum.auto()  # calls end at once
    HALF_OPEN = enum.auto()  # one call is finding out


@dataclass(frozen=True, slots=True)
class Attempt:
    """Leave to make one call, to be ended by a verdict or by `forget`."""

    period: int  # the state it was given in: what it tells later than that is old news
    probe: bool


@dataclass(frozen=True, slots=True)
class BreakerCounts:
    """Totals since the start."""

    failures: int = 0
    refusals: int = 0
    opened: int = 0
    skipped: int = 0  # calls that ended at once because the breaker was not closed


class Breaker:
    """All calls may be made from any thread, and none waits."""

    def __init__(
        self,
        name: str,
        *,
        threshold: int = 3,
        cooldown_s: float = 0.5,
        longest_cooldown_s: float = 10.0,
        refusal_cooldown_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` gives numbers from 0 to 1: it shortens cool-downs by up to a quarter, so that
        engines do not come back to a daemon all at once."""
        self._name = name
        self._threshold = threshold
        self._cooldown = cooldown_s
        self._longest = longest_cooldown_s
        self._refusal_cooldown = refusal_cooldown_s
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._period = 0
        self._failures_in_row = 0
        self._reopened = 0  # times in a row
        self._open_until = 0.0
        self._counts = BreakerCounts()
        self._last_refusal = ""
        self.is_up = False
        """Whether the last verdict was that the daemon answers; False before the first one."""

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def counts(self) -> BreakerCounts:
        return self._counts

    @property
    def available(self) -> bool:
        """Whether a call made now would go through."""
        with self._lock:
            return self._state is BreakerState.CLOSED or (
                self._state is BreakerState.OPEN and self._clock() >= self._open_until
            )

    def begin(self) -> Attempt | None:
        """Leave to call, or None: do without."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Attempt(self._period, probe=False)
            if self._state is BreakerState.OPEN and self._clock() >= self._open_until:
                self._enter(BreakerState.HALF_OPEN)
                return Attempt(self._period, probe=True)
            self._counts = replace(self._counts, skipped=self._counts.skipped + 1)
            return None

    def succeed(self, attempt: Attempt) -> None:
        """The daemon answered."""
        with self._lock:
            if attempt.period != self._period:
                return
            self._failures_in_row = 0
            self.is_up = True
            if attempt.probe:
                self._reopened = 0
                self._last_refusal = ""
                self._enter(BreakerState.CLOSED)
                logger.warning("the daemon at %s is back", self._name)

    def fail(self, attempt: Attempt, reason: str, is_absent: bool = False) -> None:
        """The daemon did not answer, or not in a way that can be used. `is_absent`: nobody listens
        there, which one failure is enough to know and costs next to nothing to find out again."""
        with self._lock:
            self._counts = replace(self._counts, failures=self._counts.failures + 1)
            if attempt.period != self._period:
                return
            self._failures_in_row += 1
            self.is_up = False
            if not attempt.probe and not is_absent and self._failures_in_row < self._threshold:
                return
            if is_absent:
                self._reopened = 0
            cooldown = min(self._longest, self._cooldown * 2.0 ** min(self._reopened, 60))
            self._open(cooldown)
            if not attempt.probe:
                logger.warning(
                    "cannot reach the daemon at %s (%s; is it running?); continuing without it",
                    self._name,
                    reason,
                )

    def refuse(self, attempt: Attempt, reason: str) -> None:
        """The daemon will not serve this engine."""
        with self._lock:
            self._counts = replace(self._counts, refusals=self._counts.refusals + 1)
            if reason != self._last_refusal:
                self._last_refusal = reason
                logger.warning(
                    "the daemon at %s refuses this engine: %s; continuing without it",
                    self._name,
                    reason,
                )
            if attempt.period == self._period:
                self.is_up = False
                self._open(max(self._refusal_cooldown, self._longest))

    def forget(self, attempt: Attempt) -> None:
        """The call is over and says nothing about the daemon. Of no effect after a verdict."""
        with self._lock:
            if attempt.probe and attempt.period == self._period:
                self._enter(BreakerState.OPEN)  # the next call may probe at once

    def _open(self, cooldown: float) -> None:
        self._open_until = self._clock() + cooldown * (1 - 0.25 * self._jitter())
        self._reopened += 1
        self._failures_in_row = 0
        if self._state is BreakerState.CLOSED:
            self._counts = replace(self._counts, opened=self._counts.opened + 1)
        self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._period += 1
