"""When a tier that is not used is tried again."""

from __future__ import annotations

from dataclasses import dataclass

_EVERY = 16  # requests between two probes, doubled whenever nothing has changed
_EVERY_MOST = 128
_AFTER_S = 30.0  # or this long after the last one
_LOST_S = 60.0  # one that was not heard of for so long has gone with its worker


@dataclass
class Probing:
    """Of one tier: a small load that a request waits for, or a rehearsal that nobody does."""

    every: int = _EVERY
    since: int = _EVERY  # requests that could have carried a probe
    heard_at: float | None = None  # when a load of this tier last ended
    name: str | None = None  # the probe under way
    begun_at: float = 0.0
    expected_s: float = 0.0

    def is_under_way(self, now: float) -> bool:
        return self.name is not None and now - self.begun_at < _LOST_S

    def is_due(self, now: float) -> bool:
        return self.since >= self.every or self.silence(now) >= _AFTER_S

    def silence(self, now: float) -> float:
        return 0.0 if self.heard_at is None else now - self.heard_at

    def begin(self, name: str, now: float, expected_s: float) -> None:
        self.name, self.begun_at, self.expected_s, self.since = name, now, expected_s, 0

    def end(self, taken: float | None) -> bool:
        """Whether that is news."""
        self.name = None
        is_news = taken is not None and taken < self.expected_s / 2
        # Surprisingly fast: the next request may find out whether that is so.
        self.since = _EVERY_MOST if is_news else self.since
        self.every = _EVERY if is_news else min(2 * self.every, _EVERY_MOST)
        return is_news
