"""How long the tiers of a worker took for each load: what the scheduler's estimates are made of.

A tier works on one load after the other. One that had to wait for another is counted from the end
of that one, so that the times say how fast the tier is and not how busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_tiered_kv.core.tiers import Tier

_MAX_UNCERTAIN = 0.5


class LoadTimes:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[tuple[str, Tier], float] = {}
        self._free_since: dict[Tier, float] = {}
        self._asked_at = 0.0
        self._taken: dict[str, dict[str, float]] = {}

    def begin(self, request_id: str, tier: Tier) -> None:
        self._begun[request_id, tier] = self._clock()

    def end(self, request_id: str, tier: Tier, ended_at: float | None, is_well: bool) -> None:
        """`ended_at`: None if it is only known to have ended since the last `asked`.

        Steps may be long. Where that leaves too much room, the load tells nothing.
        """
        begun = self._begun.pop((request_id, tier), None)
        if begun is None:
            return
        begun = max(begun, self._free_since.get(tier, 0.0))
        now = self._clock()
        taken = (now if ended_at is None else ended_at) - begun
        self._free_since[tier] = begun + max(0.0, taken)
        is_certain = ended_at is not None or now - self._asked_at <= _MAX_UNCERTAIN * taken
        if is_well and is_certain and taken > 0:
            self._taken.setdefault(request_id, {})[tier.value] = taken

    def asked(self) -> None:
        """All loads that had ended by now have been reported."""
        self._asked_at = self._clock()

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds by request and tier, of loads that ended since the last call."""
        taken, self._taken = self._taken, {}
        return taken

    def __bool__(self) -> bool:
        return bool(self._taken)
