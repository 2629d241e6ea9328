"""Writes the generated parts of docs/; tests check that they are up to date.

python -m tools.generate_docs
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result_files import Results
from benchmarks.sections import fleet
from tools.fleet_sizes import break_even_table, examples_table, sizes_table
from tools.model_table import (
    feature_tests_table,
    models_table,
    named_table,
    named_tests_table,
)
from tools.protocol_reference import protocol_reference
from vllm_tiered_kv.api import deployment
from vllm_tiered_kv.config import ENV_PREFIX, TieredKVConfig
from vllm_tiered_kv.connector.scheduler.request_control import RequestControl
from vllm_tiered_kv.metrics import names, server_names
from vllm_tiered_kv.metrics.names import Kind, Metric
from vllm_tiered_kv.options import show_default
from vllm_tiered_kv.server.options import ServerOptions

DOCS = Path(__file__).parents[1] / "docs"


def metrics_table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| metric | labels | meaning |", "| --- | --- | --- |"]
    for metric in metrics:
        shown = [metric.exposed_name] if metric.kind is Kind.HISTOGRAM else metric.exposed_names
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = "Histogram of seconds. " if metric.kind is Kind.HISTOGRAM else ""
        lines.append(f"| `{shown[0]}` | {labels} | {kind}{metric.help} |")
    return "\n".join(lines) + "\n"


def options_table(cls: type[Any], env_prefix: str | None = None) -> str:
    """Returns a table of options, with their environment variables if there is a prefix."""
    environment = ["environment"] if env_prefix else []
    columns = ["option", "type", "default", *environment, "meaning"]
    rows = [columns, ["---"] * len(columns)]
    for option in dataclasses.fields(cls):
        default = show_default(option)
        variable = [f"`{env_prefix}{option.name.upper()}`"] if env_prefix else []
        rows.append(
            [
                f"`{option.name}`",
                option.metadata["kind"].description,
                f"`{default}`" if default else "",
                *variable,
                option.metadata["help"],
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# By page; further parts of one page are named after a "#".
GENERATED: dict[str, Callable[[], str]] = {
    "configuration.md": partial(options_table, TieredKVConfig, ENV_PREFIX),
    "deploy.md": lambda: options_table(deployment.DeploymentOptions).replace("option", "key", 1),
    "deploy.md#servers": lambda: options_table(deployment.ModelServerOptions).replace(
        "option", "key", 1
    ),
    "metrics.md": lambda: metrics_table(names.ALL),
    "metrics.md#daemon": lambda: metrics_table(server_names.ALL),
    "models.md": models_table,
    "models.md#names": named_table,
    "model-tests.md": feature_tests_table,
    "model-tests.md#names": named_tests_table,
    "operations.md#sizes": sizes_table,
    "protocol.md": protocol_reference,
    "scaling.md#sizes": sizes_table,
    "scaling.md#break-even": break_even_table,
    "scaling.md#examples": examples_table,
    "scaling.md#placement": lambda: fleet.placement_table(Results.load()),
    "scaling.md#hot": lambda: fleet.hot_table(Results.load()),
    "scaling.md#moved": lambda: fleet.moved_table(Results.load()),
    "scaling.md#failures": lambda: fleet.failure_table(Results.load()),
    "requests.md": lambda: options_table(RequestControl).replace("| option |", "| key |", 1),
    "server.md": partial(options_table, ServerOptions),
}


def main() -> None:
    for name, table in GENERATED.items():
        page, _, part = name.partition("#")
        path = DOCS / page
        marker = f"generated: {part}" if part else "generated"
        text = path.read_text()
        found = re.search(rf"(?<=<!-- {marker} -->\n).*?(?=<!-- end -->)", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"{page} has no section marked <!-- {marker} -->")
        path.write_text(text[: found.start()] + table() + text[found.end() :])


if __name__ == "__main__":
    main()
