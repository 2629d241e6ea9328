"""Plans background probes: blocks that workers fetch and discard to measure how fast a tier is.

When a request recomputes cached blocks, because their tier is unknown or was too slow before, the
workers fetch some of these blocks in the background, and no request waits for them. This measures
an unknown tier, and finds out when a slow tier has become fast again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vllm_tiered_kv.cache.cost_model import ENOUGH, Choice, CostModel, Span, between, major_places
from vllm_tiered_kv.core.tiers import Tier

_PROBE_S = 0.1  # a probe's expected duration, long enough to separate bandwidth from latency
_EVERY_S = 10.0  # between two probes, so that a slow tier spends 1 % of its time on them
_LOST_S = 600.0  # workers report a probe with the next step, which may be minutes away when idle
_SLOWEST_FIRST = (Tier.BACKING, Tier.SSD, Tier.MEMORY)


class BackgroundProbes:
    """Adds probes to choices of the cost model. `connector.scheduler.load_policy.LoadDecider` calls
    it in the scheduler's thread. At most one probe is in flight, and none besides a load, because
    they would share the bandwidth to be measured."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._name: str | None = None  # of the probe in flight
        self._place = Tier.MEMORY
        self._begun_at = self._ended_at = float("-inf")
        self._has_succeeded = True  # the last probe
        self._is_half = False

    def added(self, now: float, choice: Choice) -> Choice:
        """Returns the choice with the probe, if any, of tokens that it does not load."""
        if choice.measured:  # its load measures the tier
            return choice
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
        """Returns the tokens of a span to probe, and the place of the daemon that they measure;
        None if no probe is due.

        A place with fewer than `ENOUGH` samples is probed with each request as long as the probes
        succeed, other places every `_EVERY_S`. The daemon does not report which block of a span is
        in which place. It demotes tails first, so the end of a span is assumed to be in the slowest
        place, and the start in the others.
        """
        if self._costs.loads or (self._name is not None and now < self._begun_at + _LOST_S):
            return None
        slowest_first = [place for place in _SLOWEST_FIRST if place in places]
        unknown = [place for place in slowest_first if self._costs.speeds[place].count < ENOUGH]
        is_urgent = bool(unknown) and self._has_succeeded
        measured_at = max(self._begun_at, self._ended_at, self._costs.measured_at)
        if not is_urgent and now < measured_at + _EVERY_S:
            return None
        place = (unknown or slowest_first)[0]
        held = max(1, int(part.tokens * part.sources()[place]))
        within = self._costs.speeds[place].bytes_within(_PROBE_S) / self._costs.bytes_per_token
        tokens = max(1, min(held, int(within)))
        if self._is_half:  # samples of two sizes separate latency and bandwidth
            tokens = -(-tokens // 2)
        first = part.tokens - tokens if place is slowest_first[0] else 0
        return range(first, first + tokens), place

    def begin(self, name: str, now: float, choice: Choice) -> None:
        """The request with this name was admitted, and the workers start its probe, if any."""
        if choice.probed_place is not None:
            self._name, self._place, self._begun_at = name, choice.probed_place, now
            self._is_half = not self._is_half

    def end(self, name: str, now: float, nbytes: float, seconds: float) -> None:
        """The probe has ended. `nbytes` is 0 if it failed or a load cancelled it."""
        if name != self._name:
            return
        self._name = None
        self._has_succeeded = nbytes > 0 and seconds > 0
        self._ended_at = now
        self._costs.speeds[self._place].observe(nbytes, seconds)
