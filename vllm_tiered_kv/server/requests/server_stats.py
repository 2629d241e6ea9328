"""The daemon's statistics, for the `stats` request and as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from vllm_tiered_kv.core.store import StoreUsage
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.names import Kind, Metric
from vllm_tiered_kv.metrics.recorder import Recorder

Sample = tuple[Metric, tuple[str, ...], float]
Gauges = Callable[[], Iterator[Sample]]


class ServerStats:
    """Combines counters with gauges, which are read on demand. Used by the handlers and by HTTP
    threads."""

    def __init__(self, recorder: Recorder, gauges: Gauges) -> None:
        self._recorder = recorder
        self._gauges = gauges

    def samples(self) -> Iterator[Sample]:
        """All samples, grouped by metric, in the order of `names.ALL`."""
        by_name: dict[str, dict[tuple[str, ...], float]] = {}
        for metric, labels, value in self._gauges():
            by_name.setdefault(metric.name, {})[labels] = value
        tiers = {label for (label,) in by_name.get(names.CAPACITY_BYTES.name, {})}
        for metric in names.ALL:
            values = by_name.get(metric.name, {})
            if metric.kind is Kind.COUNTER:
                values = {**_zeros(metric, tiers), **values, **self._recorder.samples(metric)}
            for labels, value in sorted(values.items()):
                yield metric, labels, value

    def stats(self) -> dict[str, Any]:
        """Values by metric name, and by label where the metric has one: then without zeros of
        counters, to be short."""
        tree: dict[str, Any] = {}
        for metric, labels, value in self.samples():
            if labels and not value and metric.kind is Kind.COUNTER:
                continue
            if labels:
                tree.setdefault(metric.name, {})[labels[0]] = int(value)
            else:
                tree[metric.name] = int(value)
        return tree

    def prometheus(self) -> str:
        lines: list[str] = []
        described: set[str] = set()
        for metric, labels, value in self.samples():
            name = metric.exposed_name + ("_total" if metric.kind is Kind.COUNTER else "")
            if name not in described:
                described.add(name)
                lines.append(f"# HELP {name} {metric.help}")
                lines.append(f"# TYPE {name} {metric.kind.value}")
            pairs = ",".join(
                f'{label}="{text}"' for label, text in zip(metric.labels, labels, strict=True)
            )
            braces = f"{{{pairs}}}" if pairs else ""
            lines.append(f"{name}{braces} {_number(value)}")
        return "\n".join(lines) + "\n"


def _zeros(metric: Metric, tiers: Set[str]) -> dict[tuple[str, ...], float]:
    """All series of a counter, without those of tiers that this daemon does not have."""
    series = metric.series or ((),)
    return {labels: 0 for labels in series if metric.labels != ("tier",) or set(labels) <= tiers}


def tier_samples(tier: str, usage: StoreUsage) -> Iterator[Sample]:
    yield names.CAPACITY_BYTES, (tier,), usage.capacity_bytes
    yield names.USED_BYTES, (tier,), usage.used_bytes
    yield names.BLOCKS, (tier,), usage.blocks


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
