"""The last hour of the daemon, as samples every few seconds in a fixed amount of memory.

A sample holds counters as they were, so that a reader can take the difference of any two, and
quantiles of the requests since the sample before it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram

_INTERVAL_S = 5.0
_MAX_SAMPLES = 720  # an hour
_OPS = {  # those that an engine waits for, also where it maps the memory
    "lookup": ("match", "contains", "borrow"),
    "read": ("get", "lend"),
    "write": ("put", "seal"),
}
_QUANTILES = {"p50": 0.5, "p99": 0.99}

Row = list["float | None"]


class History:
    """Samples statistics on a thread of its own, so that the event loop is not delayed. The daemon
    creates one; any thread may call `facts`."""

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]],
        durations: Histogram,
        tiers: Sequence[str],
        interval_s: float = _INTERVAL_S,
        max_samples: int = _MAX_SAMPLES,
    ) -> None:
        """`stats` and `durations` are of the requests; `tiers` are those of this daemon."""
        self._stats = stats
        self._durations = durations
        self._tiers = list(tiers)
        self._interval_s = interval_s
        self._rows: deque[Row] = deque(maxlen=max_samples)
        self._taken = 0  # samples ever
        self._counts: dict[str, list[int]] = {}  # of the durations, at the last sample
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-history", daemon=True)
        self.columns = [
            *("time", "received", "sent", "missed", "stored"),
            *(f"{what}_{tier}" for tier in self._tiers for what in ("hit", "used", "evicted")),
            *(f"{kind}_{quantile}" for kind in _OPS for quantile in _QUANTILES),
        ]

    def start(self) -> None:
        self.sample()
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def sample(self) -> None:
        with self._lock:
            row, self._counts = self._row()
            self._rows.append(row)
            self._taken += 1

    def facts(self, after: int = -1) -> dict[str, Any]:
        """The samples with a number above `after`, and one of now."""
        with self._lock:
            now, _ = self._row()
            oldest = self._taken - len(self._rows)
            first = min(max(after + 1, oldest), self._taken)
            rows = list(islice(self._rows, first - oldest, None))
        return {"columns": self.columns, "first": first, "rows": rows, "now": now}

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.sample()

    def _row(self) -> tuple[Row, dict[str, list[int]]]:
        stats = self._stats()
        hits, used, evicted = (
            stats.get(metric.name, {}) for metric in (names.HITS, names.USED_BYTES, names.EVICTED)
        )
        counts = self._count_durations()
        row: Row = [
            round(time.time(), 1),
            stats.get(names.BYTES_IN.name, 0),
            stats.get(names.BYTES_OUT.name, 0),
            stats.get(names.MISSES.name, 0),
            stats.get(names.PUTS.name, {}).get("stored", 0),
        ]
        for tier in self._tiers:
            row += [by_tier.get(tier, 0) for by_tier in (hits, used, evicted)]
        for kind, now in counts.items():
            before = self._counts.get(kind, [0] * len(now))
            since = [a - b for a, b in zip(now, before, strict=True)]
            bounds = self._durations.metric.buckets
            row += [quantile(since, bounds, share) for share in _QUANTILES.values()]
        return row, counts

    def _count_durations(self) -> dict[str, list[int]]:
        """How many requests of each kind took at most as long as each bound, then all."""
        counts = {kind: [0] * (len(self._durations.metric.buckets) + 1) for kind in _OPS}
        for (op,), of_op, _ in self._durations.snapshot():
            for kind, ops in _OPS.items():
                if op in ops:
                    counts[kind] = [a + b for a, b in zip(counts[kind], of_op, strict=True)]
        return counts


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """An estimate from cumulative counts, as that of Prometheus; None if nothing was counted."""
    if not counts[-1]:
        return None
    rank = share * counts[-1]
    bucket = bisect_left(counts, rank)
    if bucket >= len(bounds):
        return bounds[-1]
    low, below = (bounds[bucket - 1], counts[bucket - 1]) if bucket else (0.0, 0)
    within = (rank - below) / (counts[bucket] - below)
    return round(low + (bounds[bucket] - low) * within, 7)
