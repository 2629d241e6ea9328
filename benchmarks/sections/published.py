"""Tables that wde and vineyard publish, and where ours are: `benchmarks/published.json` has theirs
as they are, with what they say of the conditions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.result_files import Results
from benchmarks.sections.markdown import table

FILE = Path(__file__).parents[1] / "published.json"
_HEAD = """\
## Tables of wde and vineyard

Two projects publish tables of the same kinds of measurements, which ours follow in rows and
columns. Theirs are below as published, ours are in the sections named here. Machines, models'
weights and engines differ, so that only ratios within a table can be compared.
"""


def section(results: Results) -> str:
    published: list[dict[str, Any]] = json.loads(FILE.read_text())
    rows = [[one["title"], one["of"], _ours(one, results)] for one in published]
    parts = [_HEAD, table(["table", "of", "ours"], rows)]
    for one in published:
        source = f"[{one['of']}]({one['page']})"
        parts += [
            f"### {one['title']} ({one['of']})\n",
            f"Published by {source}, not measured here. {one['conditions']}\n",
            table(one["header"], one["rows"]),
        ]
    return "\n".join(parts)


def _ours(one: dict[str, Any], results: Results) -> str:
    title, benchmark = one["ours"]
    found = results.of(benchmark) if benchmark else []
    if not found:
        return f"none. {one['missing']}".rstrip()
    return f"*{title}* above, {', '.join(sorted({result.machine for result in found}))}"
