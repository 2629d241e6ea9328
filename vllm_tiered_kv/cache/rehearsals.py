"""Which pieces of what tiers hold are fetched for nobody, and how fast they came.

A request computes what a tier holds because nobody knows how fast that is, or because it was too
slow the last time. Beside it a piece is fetched that tells. Where a run of blocks lies in several
places, it is not known which block lies where; but tails leave first, so the end of the run is
taken for what lies in the slowest place, and its beginning for what lies in the others.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vllm_tiered_kv.cache.load_choice import Span
from vllm_tiered_kv.cache.speed_estimates import LoadSpeed
from vllm_tiered_kv.core.tiers import Tier

LEARNT = 3  # samples before an unknown tier is judged
REACH = 8  # a load that is larger than this many times any seen before is guessed
_FIRST_BYTES = 2 << 20  # of a place that was never met
_SHARE = 0.25  # of what a place holds; a load that large is no guess
_MOST_S = 0.1  # what one should take at most: a daemon has others to serve
_LARGER = 1.5  # by how much a further one has to be larger to tell more
_MOST_HURRIED = 8  # of a place, with one request after the other, until there is news
_REMEMBERED = 8  # whose ends are still worth something
_SLOWEST_FIRST = (Tier.BACKING, Tier.SSD, Tier.MEMORY, Tier.CPU)

_EVERY = 16  # requests between two rehearsals, doubled whenever nothing has changed
_EVERY_MOST = 128
_AFTER_S = 30.0  # or this long after the last one
_LOST_S = 60.0  # one that was not heard of for so long has gone with its worker


@dataclass
class _Pace:
    """When the next rehearsal is due."""

    every: int = _EVERY
    since: int = _EVERY  # requests that could have carried one
    heard_at: float | None = None  # when a load last ended
    name: str | None = None  # the one under way
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


class Rehearsals:
    def __init__(self, speeds: Mapping[Tier, LoadSpeed], bytes_per_token: float) -> None:
        self._speeds = speeds
        self._bytes_per_token = bytes_per_token
        self.pace = _Pace()
        self._hurried: Counter[Tier] = Counter()
        self._begun: OrderedDict[str, tuple[Tier, float]] = OrderedDict()

    def piece(self, now: float, part: Span, places: Collection[Tier]) -> tuple[range, Tier] | None:
        """Tokens of a span to fetch, and the place that they tell about; mostly none. `places`:
        of the span, those of which nothing is taken for granted."""
        if self.pace.is_under_way(now):
            return None  # its time would not be its own
        by_speed = [place for place in _SLOWEST_FIRST if place in places]
        unknown = [place for place in by_speed if self._speeds[place].count < LEARNT]
        place = (unknown or by_speed)[0]
        speed = self._speeds[place]
        held = max(1, int(part.tokens * part.sources()[place]))
        tokens = self._tokens(speed, held)
        is_guess = speed.largest * REACH < held * self._bytes_per_token
        tells_more = tokens * self._bytes_per_token >= _LARGER * speed.largest
        is_wanted = bool(unknown) or (is_guess and tells_more)
        is_hurry = is_wanted and self._hurried[place] < _MOST_HURRIED
        if not is_hurry and not self.pace.is_due(now):
            return None
        first = part.tokens - tokens if place is by_speed[0] else 0
        return range(first, first + tokens), place

    def begin(self, name: str, now: float, tokens: int, place: Tier) -> None:
        self._hurried[place] += not self.pace.is_due(now)
        expected_s = self._speeds[place].seconds(tokens * self._bytes_per_token)
        self.pace.begin(name, now, expected_s)
        self._begun[name] = place, expected_s
        while len(self._begun) > _REMEMBERED:
            self._begun.popitem(last=False)

    def end(self, name: str, now: float, nbytes: float, seconds: float) -> None:
        """So many bytes have come, none if that teaches nothing; maybe fewer than was asked for,
        and maybe so late that another one has begun."""
        if name not in self._begun:
            return
        place, expected_s = self._begun.pop(name)
        is_told = nbytes > 0 and seconds > 0
        if self.pace.name == name:
            # Of fewer bytes less was to be expected.
            self.pace.expected_s = min(expected_s, self._speeds[place].seconds(nbytes))
            if self.pace.end(seconds if is_told else None):
                self._hurried[place] = 0
            self.pace.heard_at = now
        if is_told:
            self._speeds[place].observe(nbytes, seconds)

    def _tokens(self, speed: LoadSpeed, held: int) -> int:
        least = min(held, math.ceil(_FIRST_BYTES / self._bytes_per_token))
        tokens = max(least, int(held * _SHARE)) if speed.count else least
        while tokens > least and speed.seconds(tokens * self._bytes_per_token) > _MOST_S:
            tokens = max(least, tokens * 3 // 4)
        return tokens
