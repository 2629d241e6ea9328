"""Counts durations in fixed buckets, for a process that serves its metrics itself."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from vllm_tiered_kv.metrics.names import Kind, LabelValues, Metric


class _Series:
    __slots__ = ("counts", "total_s")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total_s = 0.0


class Histogram:
    """The durations of one metric, by its label values. Any thread may call it. `observe` takes
    about as long as counting an event with a `Recorder`."""

    def __init__(self, metric: Metric) -> None:
        assert metric.kind is Kind.HISTOGRAM
        self.metric = metric
        self._bounds = metric.buckets
        self._lock = threading.Lock()
        self._series: dict[LabelValues, _Series] = {}
        for labels in metric.series if metric.labels else ((),):
            self._add_series(labels)

    def observe(self, seconds: float, *labels: str, times: int = 1) -> None:
        series = self._series.get(labels) or self._add_series(labels)
        bucket = bisect_left(self._bounds, seconds)
        with self._lock:
            series.counts[bucket] += times
            series.total_s += seconds * times

    def snapshot(self) -> Iterator[tuple[LabelValues, list[int], float]]:
        """Of each series: how many durations were at most as long as each bound, then of all, and
        the sum of all."""
        with self._lock:
            copies = [(labels, list(s.counts), s.total_s) for labels, s in self._series.items()]
        for labels, counts, total_s in sorted(copies):
            yield labels, list(accumulate(counts)), total_s

    def _add_series(self, labels: LabelValues) -> _Series:
        if len(labels) != len(self.metric.labels):
            raise ValueError(f"{self.metric.name} takes labels {self.metric.labels}, got {labels}")
        with self._lock:
            return self._series.setdefault(labels, _Series(len(self._bounds) + 1))
