"""Writes the generated parts of docs/: `python3 tools/generate_docs.py`. Tests check them."""

from __future__ import annotations

import re
from pathlib import Path

from tools.model_table import models_table
from vllm_tiered_kv.config import options_table
from vllm_tiered_kv.metrics import names, server_names
from vllm_tiered_kv.metrics.names import Kind, Metric
from vllm_tiered_kv.server.options import options_table as server_options_table
from vllm_tiered_kv.wire.reference import protocol_reference

DOCS = Path(__file__).parents[1] / "docs"


def metrics_table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| metric | labels | meaning |", "| --- | --- | --- |"]
    for metric in metrics:
        suffix = "_total" if metric.kind is Kind.COUNTER else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed_name}{suffix}` | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


# By page; the second part of one page has a name of its own behind a "#".
GENERATED = {
    "configuration.md": options_table,
    "metrics.md": lambda: metrics_table(names.ALL),
    "metrics.md#daemon": lambda: metrics_table(server_names.ALL),
    "models.md": models_table,
    "protocol.md": protocol_reference,
    "server.md": server_options_table,
}


def main() -> None:
    for name, table in GENERATED.items():
        page, _, part = name.partition("#")
        path = DOCS / page
        marker = f"generated: {part}" if part else "generated"
        text = path.read_text()
        found = re.search(rf"(?<=<!-- {marker} -->\n).*?(?=<!-- end -->)", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"{page} has no place marked {marker!r}")
        path.write_text(text[: found.start()] + table() + text[found.end() :])


if __name__ == "__main__":
    main()
