"""Writes the generated parts of docs/: `python3 tools/generate_docs.py`. Tests check them."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_tiered_kv.config import options_table
from vllm_tiered_kv.metrics.names import ALL, Kind
from vllm_tiered_kv.wire.reference import protocol_reference

DOCS = Path(__file__).parents[1] / "docs"


def metrics_table() -> str:
    lines = ["| metric | labels | meaning |", "| --- | --- | --- |"]
    for metric in ALL:
        suffix = "_total" if metric.kind is Kind.COUNTER else ""
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed_name}{suffix}` | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


GENERATED = {
    "configuration.md": options_table,
    "metrics.md": metrics_table,
    "protocol.md": protocol_reference,
}


def main() -> None:
    for name, table in GENERATED.items():
        path = DOCS / name
        text = re.sub(
            r"(<!-- generated -->\n).*?(<!-- end -->)",
            lambda match, table=table: match.group(1) + table() + match.group(2),
            path.read_text(),
            flags=re.DOTALL,
        )
        path.write_text(text)


if __name__ == "__main__":
    main()
