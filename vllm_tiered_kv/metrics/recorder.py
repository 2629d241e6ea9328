"""Records metric values: lifetime totals, and the changes since the last drain."""

from __future__ import annotations

import threading

from vllm_tiered_kv.metrics.names import BY_NAME, Kind, LabelValues, Metric

Samples = dict[str, dict[str, "float | list[float]"]]
"""Metric name -> label values joined by ',' -> value, or durations of a histogram. Plain data, so
any transport can carry it."""

_SEPARATOR = ","
_MAX_DURATIONS = 1000  # of a series between two drains; nobody may ever drain


class Recorder:
    """Adds up metric values. The connector's scheduler half and the daemon own one each.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, LabelValues], float] = {}
        self._changes: dict[tuple[str, LabelValues], float] = {}
        self._durations: dict[tuple[str, LabelValues], list[float]] = {}

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        if metric.kind is not Kind.COUNTER or amount < 0:
            raise ValueError(f"{metric.name} cannot be increased by {amount}")
        if amount:
            key = self._key(metric, labels)
            with self._lock:
                self._totals[key] = self._totals.get(key, 0) + amount
                self._changes[key] = self._changes.get(key, 0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        if metric.kind is not Kind.GAUGE:
            raise ValueError(f"{metric.name} is a counter")
        key = self._key(metric, labels)
        with self._lock:
            if self._totals.get(key) != value:
                self._totals[key] = self._changes[key] = value

    def show(self, metric: Metric, *labels: str) -> None:
        """Reports a counter as 0 before its first event, where its labels are known at run time."""
        key = self._key(metric, labels)
        with self._lock:
            if key not in self._totals:
                self._totals[key] = self._changes[key] = 0

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Adds a duration to a histogram."""
        if metric.kind is not Kind.HISTOGRAM:
            raise ValueError(f"{metric.name} is no histogram")
        key = self._key(metric, labels)
        with self._lock:
            durations = self._durations.setdefault(key, [])
            if len(durations) < _MAX_DURATIONS:
                durations.append(seconds)

    def total(self, metric: Metric, *labels: str) -> float:
        """Returns the lifetime value, summed over the labels that are not given."""
        return sum(
            value
            for values, value in self.samples(metric).items()
            if values[: len(labels)] == labels
        )

    def samples(self, metric: Metric) -> dict[LabelValues, float]:
        """Returns the lifetime values by label values."""
        with self._lock:
            totals = list(self._totals.items())
        return {values: value for (name, values), value in totals if name == metric.name}

    def drain(self) -> Samples:
        """Returns the changes since the last call: sums of counters, last values of gauges, the
        durations of histograms."""
        samples: Samples = {}
        with self._lock:
            changes, self._changes = self._changes, {}
            durations, self._durations = self._durations, {}
        for (name, labels), value in changes.items():
            samples.setdefault(name, {})[_SEPARATOR.join(labels)] = value
        for (name, labels), each in durations.items():
            samples.setdefault(name, {})[_SEPARATOR.join(labels)] = each
        return samples

    @staticmethod
    def _key(metric: Metric, labels: LabelValues) -> tuple[str, LabelValues]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} takes labels {metric.labels}, got {labels}")
        return metric.name, labels


def merge(into: Samples, other: Samples) -> Samples:
    """Merges `other` into `into`: adds counters and histograms, takes gauges from `other`. Returns
    `into`."""
    for name, by_label in other.items():
        mine = into.setdefault(name, {})
        is_gauge = BY_NAME[name].kind is Kind.GAUGE
        for labels, value in by_label.items():
            known = mine.get(labels)
            if isinstance(value, list):
                mine[labels] = [*known, *value] if isinstance(known, list) else list(value)
            elif is_gauge or not isinstance(known, (int, float)):
                mine[labels] = value
            else:
                mine[labels] = known + value
    return into


def label_values(joined: str) -> LabelValues:
    return tuple(joined.split(_SEPARATOR)) if joined else ()
