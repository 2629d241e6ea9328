"""Tables that wde and vineyard publish, and where ours are: `benchmarks/published.json` has theirs
as they are, with what they say of the conditions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import table

FILE = Path(__file__).parents[1] / "published.json"
_HEAD = """\
## Tables of wde and vineyard

Two projects publish tables of the same kinds of measurements, which ours follow in rows and
columns. Theirs stand as published behind ours, in the sections named here. Machines, models'
weights and engines differ, so that only ratios within a table can be compared.
"""


def section(results: Results) -> str:
    rows = [[one["title"], one["of"], _ours(one, results)] for one in _tables()]
    alone = [_as_published(one, "###") for one in _tables() if not _found(one, results)]
    return "\n".join([_HEAD, table(["table", "of", "ours"], rows), *alone])


def beside(benchmark: str) -> list[str]:
    """The published tables that a section with results of this benchmark ends with."""
    return [_as_published(one, "####") for one in _tables() if one["ours"][1] == benchmark]


def _tables() -> list[dict[str, Any]]:
    published: list[dict[str, Any]] = json.loads(FILE.read_text())
    return published


def _as_published(one: dict[str, Any], heading: str) -> str:
    source = f"[{one['of']}]({one['page']})"
    return "\n".join(
        [
            f"{heading} {one['title']} ({one['of']})\n",
            f"Published by {source}, not measured here. {one['conditions']}\n",
            table(one["header"], one["rows"]),
        ]
    )


def _found(one: dict[str, Any], results: Results) -> Sequence[Result]:
    benchmark = one["ours"][1]
    return results.of(benchmark) if benchmark else []


def _ours(one: dict[str, Any], results: Results) -> str:
    found = _found(one, results)
    if not found:
        return f"none. {one['missing']}".rstrip()
    machines = ", ".join(sorted({result.machine for result in found}))
    return f"*{one['ours'][0]}* above, {machines}"
