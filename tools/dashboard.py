"""Writes the Grafana dashboard, deploy/grafana/tiered-kv.json; a test checks that it is up to date.

python -m tools.dashboard
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy" / "grafana" / "tiered-kv.json"

_WIDTH = 24  # columns of Grafana's grid
_HEIGHT = 8
_STAT_HEIGHT = 5
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ENGINE = 'model_name=~"$model",instance=~"$engine"'
_DAEMON = 'instance=~"$daemon"'


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    queries: Sequence[Query]
    unit: str = "short"
    description: str = ""
    is_stat: bool = False
    width: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


def _engine(name: str, more: str = "") -> str:
    return f"vllm:tiered_kv_{name}{{{_ENGINE}{more}}}"


def _daemon(name: str, more: str = "") -> str:
    return f"tiered_kv_server_{name}{{{_DAEMON}{more}}}"


def _rate(samples: str) -> str:
    return f"rate({samples}[$__rate_interval])"


def _quantiles(buckets: str, by: str) -> list[Query]:
    return [
        Query(
            f"histogram_quantile({share}, sum by (le, {by}) ({_rate(buckets)}))",
            f"{{{{{by}}}}} {name}",
        )
        for share, name in ((0.5, "median"), (0.99, "p99"))
    ]


def _increase(samples: str) -> str:
    return f"sum(increase({samples}[$__range]))"


_SAVED = _engine("saved_prefill_seconds_total")
_HITS, _MISSES = _engine("hit_tokens_total"), _engine("miss_tokens_total")
_COMPUTED = _engine("computed_tokens_total")
_RECOMPUTED = _engine("recomputed_tokens_total")

ROWS = (
    Row(
        "What the cache is worth",
        (
            Panel(
                "Prefill time saved",
                [Query(_increase(_SAVED))],
                "s",
                "GPU seconds that prompts did not take, in the chosen range: estimated from the "
                "prefill speed that the engines measure.",
                is_stat=True,
                width=6,
            ),
            Panel(
                "Prompt tokens from a tier",
                [
                    Query(
                        f"{_increase(_HITS)} / ({_increase(_HITS)} + {_increase(_MISSES)} + "
                        f"{_increase(_RECOMPUTED)})"
                    )
                ],
                "percentunit",
                "Of the tokens in whole blocks that the GPU's own prefix cache did not have.",
                is_stat=True,
                width=6,
            ),
            Panel(
                "Daemons that answer",
                [Query(f"sum({_engine('daemon_up')}) / count({_engine('daemon_up')})")],
                "percentunit",
                "As engines see them.",
                is_stat=True,
                width=6,
            ),
            Panel(
                "Blocks that differed",
                [Query(_increase(_engine("differing_blocks_total")))],
                "short",
                "Verified blocks that were not what the model computes. Anything but 0 is a fault.",
                is_stat=True,
                width=6,
            ),
        ),
    ),
    Row(
        "Engines",
        (
            Panel(
                "Prefill time saved per second",
                [Query(f"sum by (tier) ({_rate(_SAVED)})", "{{tier}}")],
                "s",
                "Above 1: the tiers do the work of more than one GPU.",
            ),
            Panel(
                "Prompt tokens",
                [
                    Query(f"sum by (tier) ({_rate(_HITS)})", "from {{tier}}"),
                    Query(f"sum by (tier) ({_rate(_RECOMPUTED)})", "computed, though in {{tier}}"),
                    Query(f"sum({_rate(_MISSES)})", "computed, in no tier"),
                ],
            ),
            Panel(
                "Why prompt tokens were computed",
                [Query(f"sum by (cause) ({_rate(_COMPUTED)})", "{{cause}}")],
                description="docs/misses.md explains each cause.",
            ),
            Panel(
                "Computed tokens that a larger CPU tier would have held",
                [
                    Query(
                        f"sum by (capacity) ({_rate(_engine('would_hit_tokens_total'))}) / "
                        f"ignoring (capacity) group_left sum({_rate(_COMPUTED)})",
                        "{{capacity}} the capacity",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Decisions about hits",
                [
                    Query(
                        f"sum by (tier, decision) ({_rate(_engine('load_decisions_total'))})",
                        "{{tier}} {{decision}}",
                    )
                ],
            ),
            Panel(
                "Lookups at daemons",
                [
                    Query(
                        f"sum by (outcome) ({_rate(_engine('lookups_total'))})",
                        "{{outcome}}",
                    )
                ],
            ),
            Panel("Lookup latency", _quantiles(_engine("lookup_seconds_bucket"), "tier"), "s"),
            Panel("Load latency", _quantiles(_engine("load_seconds_bucket"), "tier"), "s"),
            Panel("Store latency", _quantiles(_engine("store_seconds_bucket"), "tier"), "s"),
            Panel(
                "Bytes moved",
                [
                    Query(
                        f"sum by (tier) ({_rate(_engine('loaded_bytes_total'))})", "from {{tier}}"
                    ),
                    Query(f"sum by (tier) ({_rate(_engine('stored_bytes_total'))})", "to {{tier}}"),
                ],
                "Bps",
            ),
            Panel(
                "CPU tier",
                [
                    Query(f"sum by (instance) ({_engine('used_bytes')})", "{{instance}} used"),
                    Query(f"sum by (instance) ({_engine('capacity_bytes')})", "{{instance}} of"),
                ],
                "bytes",
            ),
            Panel(
                "Blocks not stored",
                [
                    Query(
                        f"sum by (tier, reason) ({_rate(_engine('dropped_blocks_total'))})",
                        "{{tier}} {{reason}}",
                    )
                ],
            ),
            Panel(
                "Failures",
                [
                    Query(
                        f"sum by (tier) ({_rate(_engine('load_failures_total'))})", "load, {{tier}}"
                    ),
                    Query(
                        f"sum by (daemon) ({_rate(_engine('daemon_errors_total'))})",
                        "calls to {{daemon}}",
                    ),
                ],
            ),
            Panel(
                "Speeds that decide what is loaded",
                [
                    Query(f"avg by (tier) ({_engine('load_bytes_per_second')})", "load, {{tier}}"),
                ],
                "Bps",
            ),
        ),
    ),
    Row(
        "Daemons",
        (
            Panel(
                "Health and version",
                [
                    Query(
                        f"{_daemon('up')} * on (instance) group_left (version) "
                        f"{_daemon('build_info')}",
                        "{{instance}} {{version}}",
                    )
                ],
            ),
            Panel(
                "Time since start",
                [Query(f"time() - {_daemon('start_time_seconds')}", "{{instance}}")],
                "s",
            ),
            Panel(
                "Hit rate of requested blocks",
                [
                    Query(
                        f"sum by (instance) ({_rate(_daemon('hit_blocks_total'))}) / (sum by "
                        f"(instance) ({_rate(_daemon('hit_blocks_total'))}) + sum by (instance) "
                        f"({_rate(_daemon('missed_blocks_total'))}))",
                        "{{instance}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Tiers",
                [
                    Query(f"sum by (tier) ({_daemon('used_bytes')})", "{{tier}} used"),
                    Query(f"sum by (tier) ({_daemon('capacity_bytes')})", "{{tier}} of"),
                ],
                "bytes",
            ),
            Panel(
                "Bytes by model",
                [
                    Query(
                        f"sum by (model, tier) ({_daemon('namespace_bytes')})",
                        "{{model}} {{tier}}",
                    )
                ],
                "bytes",
            ),
            Panel(
                "Bytes by namespace",
                [
                    Query(
                        f"topk(20, sum by (namespace, model) ({_daemon('namespace_bytes')}))",
                        "{{namespace}} {{model}}",
                    )
                ],
                "bytes",
            ),
            Panel(
                "Requests",
                [Query(f"sum by (op) ({_rate(_daemon('requests_total'))})", "{{op}}")],
                "reqps",
            ),
            Panel("Request latency", _quantiles(_daemon("request_seconds_bucket"), "op"), "s"),
            Panel(
                "Network",
                [
                    Query(f"sum({_rate(_daemon('received_bytes_total'))})", "received"),
                    Query(f"sum({_rate(_daemon('sent_bytes_total'))})", "sent"),
                ],
                "Bps",
            ),
            Panel("SSD reads", _quantiles(_daemon("ssd_read_seconds_bucket"), "instance"), "s"),
            Panel("SSD writes", _quantiles(_daemon("ssd_write_seconds_bucket"), "instance"), "s"),
            Panel(
                "Waiting to be written",
                [Query(f"sum by (tier) ({_daemon('pending_write_bytes')})", "{{tier}}")],
                "bytes",
            ),
            Panel(
                "Evictions and promotions",
                [
                    Query(
                        f"sum by (tier) ({_rate(_daemon('evicted_blocks_total'))})", "from {{tier}}"
                    ),
                    Query(
                        f"sum by (tier) ({_rate(_daemon('promoted_blocks_total'))})",
                        "promoted from {{tier}}",
                    ),
                ],
            ),
            Panel(
                "Errors",
                [
                    Query(f"sum by (code) ({_rate(_daemon('errors_total'))})", "{{code}}"),
                    Query(
                        f"sum by (tier) ({_rate(_daemon('damaged_blocks_total'))})",
                        "damaged, {{tier}}",
                    ),
                    Query(
                        f"sum by (tier) ({_rate(_daemon('failed_writes_total'))})",
                        "not written, {{tier}}",
                    ),
                ],
            ),
            Panel(
                "Clients",
                [
                    Query(f"sum({_daemon('sessions')})", "sessions"),
                    Query(f"sum({_daemon('attached_processes')})", "processes that map the memory"),
                ],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    return {
        "title": "Tiered KV cache",
        "uid": "tiered-kv",
        "tags": ["vllm", "kv-cache"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one crosshair on all panels
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    engines = "vllm:tiered_kv_capacity_bytes"
    for name, label, query in (
        ("model", "Model", f"label_values({engines}, model_name)"),
        ("engine", "Engine", f"label_values({engines}, instance)"),
        ("daemon", "Daemon", "label_values(tiered_kv_server_build_info, instance)"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": query,
            "definition": query,
            "refresh": 2,  # when the time range changes
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
        }
        y += 1
        x = 0
        height = _STAT_HEIGHT if row.panels[0].is_stat else _HEIGHT
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            number += 1
            yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": height})
            x += panel.width
        y += height


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.is_stat else {},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.is_stat,
                "range": not panel.is_stat,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def as_text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(as_text())
