"""Measures how long each tier takes for each load, as input for the scheduler's cost model.

A tier works on one load at a time. The time of a load that waited for another one counts from the
end of the other, so that the times tell how fast the tier is, not how busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_tiered_kv.core.tiers import Tier

_MAX_UNCERTAIN = 0.5  # largest share of a time that may be unknown


class LoadTimes:
    """Load times of one worker. `WorkerHalf` calls it from the model's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[tuple[str, Tier], float] = {}
        self._free_since: dict[Tier, float] = {}
        self._polled_at = 0.0
        self._taken: dict[str, dict[str, float]] = {}

    def begin(self, request_id: str, tier: Tier) -> None:
        self._begun[request_id, tier] = self._clock()

    def end(self, request_id: str, tier: Tier, ended_at: float | None, is_well: bool) -> None:
        """Ends a load. `ended_at` is None if the load ended at an unknown time after `polled`.

        The measurement is dropped if the time since then is a large part of it, because steps may
        be long.
        """
        begun = self._begun.pop((request_id, tier), None)
        if begun is None:
            return
        begun = max(begun, self._free_since.get(tier, 0.0))
        now = self._clock()
        taken = (now if ended_at is None else ended_at) - begun
        self._free_since[tier] = begun + max(0.0, taken)
        is_certain = ended_at is not None or now - self._polled_at <= _MAX_UNCERTAIN * taken
        if is_well and is_certain and taken > 0:
            self._taken.setdefault(request_id, {})[tier.value] = taken

    def polled(self) -> None:
        """Notes that `end` was called for all loads that have ended by now."""
        self._polled_at = self._clock()

    def take(self) -> dict[str, dict[str, float]]:
        """Returns the seconds by request and tier of the loads that ended since the last call."""
        taken, self._taken = self._taken, {}
        return taken
