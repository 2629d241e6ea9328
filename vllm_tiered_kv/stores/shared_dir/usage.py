"""How much a shared directory holds: by a scan, and in between by what this process did itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Totals:
    blocks: int
    nbytes: int


class UsageTracker:
    """Other hosts add and remove without telling, so a number is only as good as its last scan."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._scanned_at: float | None = None
        self._totals = Totals(0, 0)

    def scanned(self, totals: Totals) -> None:
        with self._lock:
            self._totals = totals
            self._scanned_at = self._monotonic()

    def changed(self, blocks: int, nbytes: int) -> None:
        with self._lock:
            self._totals = Totals(
                max(0, self._totals.blocks + blocks), max(0, self._totals.nbytes + nbytes)
            )

    def latest(self, max_age_s: float) -> Totals | None:
        """None where the last scan is older than this."""
        with self._lock:
            if self._scanned_at is None or self._monotonic() - self._scanned_at > max_age_s:
                return None
            return self._totals
