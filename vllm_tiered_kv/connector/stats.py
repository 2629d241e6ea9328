"""Our metrics on vLLM's own `/metrics` and in its periodic log line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_tiered_kv.metrics import names, recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class TieredKVStats(KVConnectorStats):
    """Metrics since the last report: metric -> label values -> amount, as `Recorder.drain` returns
    them. vLLM builds and merges it."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> TieredKVStats:
        recorder.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Flat names and values for vLLM's log line; of durations their mean."""
        return {
            name if labels in ("", "cpu") else f"{name}[{labels}]": _mean(value)
            for name, by_label in self.data.items()
            for labels, value in by_label.items()
        }

    def is_empty(self) -> bool:
        return not self.data


def _mean(value: float | list[float]) -> float:
    return round(sum(value) / len(value), 6) if isinstance(value, list) else value


class TieredKVPromMetrics(KVConnectorPromMetrics):
    """One Prometheus metric for each definition in `metrics.names`. vLLM builds it in the front
    end's process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for metric in names.ALL:
            kinds: dict[names.Kind, tuple[Any, dict[str, Any]]] = {
                names.Kind.COUNTER: (self._counter_cls, {}),
                names.Kind.HISTOGRAM: (self._histogram_cls, {"buckets": metric.buckets}),
                names.Kind.GAUGE: (self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
            }
            make, more = kinds[metric.kind]
            self._metrics[metric.name] = make(
                name=metric.exposed_name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **more,
            )
            for engine_labels in per_engine_labelvalues.values():
                for values in metric.series:
                    self._metrics[metric.name].labels(*engine_labels, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for name, by_label in transfer_stats_data.items():
            for joined, value in by_label.items():
                child = self._metrics[name].labels(*engine_labels, *recorder.label_values(joined))
                if isinstance(value, list):
                    for seconds in value:
                        child.observe(seconds)
                elif names.BY_NAME[name].kind is names.Kind.COUNTER:
                    child.inc(value)
                else:
                    child.set(value)
