"""The one rule for probes: what workers fetch in the background to learn how fast a tier is.

A request computes what a tier holds, because the tier is unknown or was too slow the last time.
Meanwhile the workers fetch a piece of it that no request waits for. This is how an unknown tier is
measured, and how one that became fast again is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vllm_tiered_kv.cache.cost_model import ENOUGH, Choice, CostModel, Span, between, major_places
from vllm_tiered_kv.core.tiers import Tier

_PROBE_S = 0.1  # a probe's expected length: long enough to tell bandwidth from latency, and with
_EVERY_S = 10.0  # this long between two a slow tier spends 1 % of its time on them
_LOST_S = 600.0  # a worker reports every probe, with the next step; an idle engine may take minutes
_SLOWEST_FIRST = (Tier.BACKING, Tier.SSD, Tier.MEMORY)


class BackgroundProbes:
    """Adds probes to choices of the cost model. `connector.load_policy.LoadDecider` asks it, in the
    scheduler's thread. One probe is under way at a time, and none beside a load: they would share
    the bandwidth that they measure."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._name: str | None = None  # of the probe under way
        self._place = Tier.MEMORY
        self._begun_at = self._heard_at = float("-inf")
        self._has_taught = True
        self._is_half = False

    def added(self, now: float, choice: Choice) -> Choice:
        """The choice with what is to be probed of the tokens that it does not load, if anything."""
        start = choice.tokens
        for part in between(start, choice.held, choice.spans):
            places = major_places([part]) - self._costs.trusted
            if places:
                piece = self._piece(now, part, places)
                if piece is None:
                    return choice
                first, stop = start + piece[0].start, start + piece[0].stop
                return dataclasses.replace(choice, probed=range(first, stop), probed_place=piece[1])
            start += part.tokens
        return choice

    def _piece(self, now: float, part: Span, places: Collection[Tier]) -> tuple[range, Tier] | None:
        """The tokens of a span to probe, and the place of the daemon that they measure.

        A place with fewer than `ENOUGH` samples is probed with each request as long as the probes
        succeed, any other one every `_EVERY_S`. The daemon does not say which block of a span lies
        where. Tails are evicted first, so the end of a span is taken for its slowest place and the
        beginning for the others.
        """
        if self._costs.loads or (self._name is not None and now < self._begun_at + _LOST_S):
            return None
        slowest_first = [place for place in _SLOWEST_FIRST if place in places]
        unknown = [place for place in slowest_first if self._costs.speeds[place].count < ENOUGH]
        is_urgent = bool(unknown) and self._has_taught
        heard_at = max(self._begun_at, self._heard_at, self._costs.measured_at)
        if not is_urgent and now < heard_at + _EVERY_S:
            return None
        place = (unknown or slowest_first)[0]
        held = max(1, int(part.tokens * part.sources()[place]))
        within = self._costs.speeds[place].bytes_within(_PROBE_S) / self._costs.bytes_per_token
        tokens = max(1, min(held, int(within)))
        if self._is_half:  # samples of two sizes tell latency and bandwidth apart
            tokens = -(-tokens // 2)
        first = part.tokens - tokens if place is slowest_first[0] else 0
        return range(first, first + tokens), place

    def begin(self, name: str, now: float, choice: Choice) -> None:
        """The request with this name was admitted, and the workers probe beside it."""
        if choice.probed_place is not None:
            self._name, self._place, self._begun_at = name, choice.probed_place, now
            self._is_half = not self._is_half

    def end(self, name: str, now: float, nbytes: float, seconds: float) -> None:
        """The probe has fetched `nbytes`: 0 if it failed or a load disturbed it."""
        if name != self._name:
            return
        self._name = None
        self._has_taught = nbytes > 0 and seconds > 0
        self._heard_at = now
        self._costs.speeds[self._place].observe(nbytes, seconds)
