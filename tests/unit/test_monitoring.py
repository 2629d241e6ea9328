"""The dashboard and the alerts name metrics and labels that exist, and say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import dashboard
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics import names, server_names
from vllm_tiered_kv.metrics.names import Metric

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"

METRICS: dict[str, Metric] = {
    name: metric for metric in (*names.ALL, *server_names.ALL) for name in metric.exposed_names
}
# Of Prometheus, and of vLLM for all metrics of an engine.
COMMON = {"instance", "job", "le", "model_name", "engine"}
_NAME = re.compile(r"(?:vllm:tiered_kv_|tiered_kv_server_)\w+")
_SELECTED = re.compile(r"((?:vllm:tiered_kv_|tiered_kv_server_)\w+)\{([^}]*)\}")
_GROUPED = re.compile(r"\b(?:by|on|group_left) \(([^)]*)\)")


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def queries() -> Iterator[tuple[str, str]]:
    """Each query, and the text beside it in which labels are named."""
    for rule in rules():
        yield rule["expr"], " ".join(rule["annotations"].values())
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def test_dashboard_is_up_to_date() -> None:
    assert dashboard.TARGET.read_text() == dashboard.as_text(), "run python -m tools.dashboard"
    json.loads(dashboard.as_text())


def test_first_panel_is_the_prefill_time_saved() -> None:
    panels = [one for one in dashboard.dashboard()["panels"] if one["type"] != "row"]
    assert names.SAVED_SECONDS.exposed_names[0] in panels[0]["targets"][0]["expr"]
    assert panels[0]["gridPos"] == {"x": 0, "y": 1, "w": 6, "h": 5}


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(("expr", "text"), list(queries()))
def test_every_name_and_label_in_a_query_exists(expr: str, text: str) -> None:
    found = set(_NAME.findall(expr))
    assert found
    assert found <= set(METRICS), found - set(METRICS)
    labels = COMMON.union(*(METRICS[name].labels for name in found))
    for name, selector in _SELECTED.findall(expr):
        used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
        assert set(used) <= COMMON.union(METRICS[name].labels), (name, used)
    for grouped in _GROUPED.findall(expr):
        assert set(re.findall(r"\w+", grouped)) <= labels, grouped
    for label in re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text):
        assert label in labels, label
    assert expr.count("(") == expr.count(")")


def test_values_of_labels_in_alerts_exist() -> None:
    values = {
        "outcome": {outcome.value for outcome in names.LookupOutcome},
        "reason": {reason.value for reason in names.DropReason},
        "code": {code.value for code in ErrorCode},
    }
    text = ALERTS.read_text()
    for label, known in values.items():
        used = re.findall(rf'{label}!?="(\w+)"', text)
        assert used, label
        assert set(used) <= known


def test_every_metric_with_a_fault_is_watched_by_an_alert() -> None:
    watched = {name for rule in rules() for name in _NAME.findall(rule["expr"])}
    for metric in (
        *(names.DIFFERING_BLOCKS, names.DAEMON_UP, names.LOAD_FAILURES),
        *(server_names.HEALTHY, server_names.DAMAGED, server_names.NOT_KEPT),
        *(server_names.BACKING_ABSENT, server_names.ERRORS),
    ):
        assert set(metric.exposed_names) & watched, metric.name


def test_every_alert_says_what_it_means_and_is_described_for_operators() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    found = [rule["alert"] for rule in rules()]
    assert len(found) == len(set(found)) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")
        assert f"`{rule['alert']}`" in page
