"""Each case of a benchmark in a process of its own, results written as they come."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MARK = "RESULT "


def tell(result: dict[str, Any]) -> None:
    """What a child has measured, to its parent."""
    print(_MARK + json.dumps(result))


def run(
    module: str, cases: Sequence[str], report: dict[str, Any], key: str, out: Path | None
) -> None:
    """Runs `python -m module --child CASE` with this process's arguments for each case.

    A run that is cut short leaves a file with the cases so far.
    """
    report[key] = {}
    for case in cases:
        done = subprocess.run(
            [sys.executable, "-m", module, "--child", case, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        result = json.loads(lines[-1][len(_MARK) :]) if lines else {"failed": done.returncode}
        report[key][case] = result
        print(case, json.dumps(result), flush=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n")


def milliseconds(values: list[float]) -> dict[str, float]:
    """Median and range of times in seconds."""
    return {
        "median": round(statistics.median(values) * 1e3, 3),
        "min": round(min(values) * 1e3, 3),
        "max": round(max(values) * 1e3, 3),
    }
