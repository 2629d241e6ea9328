"""The daemon's statistics, for the `stats` request and as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from vllm_tiered_kv.core.store import StoreUsage
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.metrics.names import Kind, Metric
from vllm_tiered_kv.metrics.recorder import Recorder

Sample = tuple[Metric, tuple[str, ...], float]
Gauges = Callable[[], Iterator[Sample]]


class ServerStats:
    """Combines counters with gauges, which are read on demand. Used by the handlers and by HTTP
    threads."""

    def __init__(
        self,
        recorder: Recorder,
        gauges: Gauges,
        details: Gauges = lambda: iter(()),
        histograms: Sequence[Histogram] = (),
    ) -> None:
        """`details` are gauges for Prometheus alone, as are the histograms."""
        self._recorder = recorder
        self._gauges = gauges
        self._details = details
        self._histograms = histograms

    def samples(self, with_details: bool = False) -> Iterator[Sample]:
        """All samples of counters and gauges, grouped by metric, in the order of `names.ALL`."""
        by_name: dict[str, dict[tuple[str, ...], float]] = {}
        for metric, labels, value in self._gauges():
            by_name.setdefault(metric.name, {})[labels] = value
        for metric, labels, value in self._details() if with_details else ():
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
        for metric, labels, value in self.samples(with_details=True):
            (name,) = metric.exposed_names
            if name not in described:
                described.add(name)
                lines += _description(name, metric)
            lines.append(f"{name}{_braces(metric.labels, labels)} {_number(value)}")
        for histogram in self._histograms:
            lines += _histogram_lines(histogram)
        return "\n".join(lines) + "\n"


def _histogram_lines(histogram: Histogram) -> Iterator[str]:
    metric = histogram.metric
    bucket, total, count = metric.exposed_names
    yield from _description(metric.exposed_name, metric)
    bounds = [*map(_number, metric.buckets), "+Inf"]
    for labels, counts, seconds in histogram.snapshot():
        for bound, number in zip(bounds, counts, strict=True):
            yield f"{bucket}{_braces((*metric.labels, 'le'), (*labels, bound))} {number}"
        yield f"{total}{_braces(metric.labels, labels)} {_number(seconds)}"
        yield f"{count}{_braces(metric.labels, labels)} {counts[-1]}"


def _description(name: str, metric: Metric) -> Iterator[str]:
    yield f"# HELP {name} {metric.help}"
    yield f"# TYPE {name} {metric.kind.value}"


def _braces(names: Sequence[str], values: Sequence[str]) -> str:
    pairs = ",".join(
        f'{label}="{_escaped(text)}"' for label, text in zip(names, values, strict=True)
    )
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    """A client chooses its name; a line break in it must not begin a sample."""
    text = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text.encode("utf-8", "replace").decode()


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
