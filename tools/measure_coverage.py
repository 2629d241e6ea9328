"""Measures which lines and branches the tests reach, per folder of the package.

    python -m tools.measure_coverage                  # every suite that can run here
    python -m tools.measure_coverage unit daemon      # only these

Processes that the tests start count too, unless they are killed, which loses their data. A failing
test does not end the measurement, but makes it fail. So does a total below `fail_under` of
pyproject.toml, if every suite ran. That limit detects suites that silently stop running; whether
tests detect faults is checked by `tools.mutants`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "coverage"
PACKAGE = "vllm_tiered_kv"
WORST_FILES = 15

PYTEST_OPTIONS = (
    "-q -p no:cacheprovider -p tools.coverage_of_workers --dist loadfile --no-loadscope-reorder"
)
# With the same numbers of processes as in the Makefile.
SUITES = {
    "unit": ("-n", "2", "tests/unit"),
    "daemon": ("-n", "4", "tests/stores", "tests/remote", "tests/daemon"),
    "engine": ("-n", "2", "tests/engine", "tests/conformance"),
}


@dataclass
class Reached:
    """Covered and total lines and branches, of one file or folder."""

    lines: int = 0
    lines_reached: int = 0
    branches: int = 0
    branches_reached: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        self.lines += summary["num_statements"]
        self.lines_reached += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_reached += summary["covered_branches"]

    def row(self, name: str) -> str:
        lines = _percent(self.lines_reached, self.lines)
        branches = _percent(self.branches_reached, self.branches)
        return f"{name:42} {self.lines:6} {lines:>7} {self.branches:9} {branches:>7}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def coverage(*arguments: str) -> int:
    environment = {
        **os.environ,
        # Absolute, because tests start processes in other folders.
        "COVERAGE_FILE": str(FOLDER / "data"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "coverage", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def report() -> None:
    path = FOLDER / "coverage.json"
    if coverage("combine", "--quiet") or coverage(
        "json", "--quiet", "--fail-under=0", "-o", str(path)
    ):
        raise SystemExit("no coverage data was recorded")
    rooms: dict[str, Reached] = defaultdict(Reached)
    files: dict[str, Reached] = defaultdict(Reached)
    total = Reached()
    for name, entry in json.loads(path.read_text())["files"].items():
        inside = Path(name).relative_to(PACKAGE) if name.startswith(PACKAGE) else Path(name)
        room = inside.parts[0] + "/" if len(inside.parts) > 1 else inside.name
        for reached in (rooms[room], files[str(inside)], total):
            reached.add(entry["summary"])
    header = f"{'':42} {'lines':>6} {'reached':>7} {'branches':>9} {'taken':>7}"
    print(f"\n{header}")
    for name in sorted(rooms):
        print(rooms[name].row(name))
    print(total.row("all"))
    print(f"\nleast reached\n{header}")
    with_code = [item for item in files.items() if item[1].lines]
    by_share = sorted(with_code, key=lambda item: item[1].lines_reached / item[1].lines)
    for name, reached in by_share[:WORST_FILES]:
        print(reached.row(name))
    print(f"\nline by line: {sys.executable} -m coverage html --data-file={FOLDER / 'data'}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(SUITES))
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    suites = options.suites or [
        suite for suite in SUITES if suite != "engine" or importlib.util.find_spec("vllm")
    ]
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    failed = []
    for suite in suites:
        print(f"measuring {suite}", flush=True)
        if coverage("run", "-m", "pytest", *PYTEST_OPTIONS.split(), *SUITES[suite]):
            failed.append(suite)
    report()
    if failed:
        print(f"tests failed in {', '.join(failed)}; the coverage above is incomplete")
    too_low = set(suites) == set(SUITES) and coverage("report", "--format=total") != 0
    if too_low:
        print("the total is below fail_under of pyproject.toml")
    return 1 if failed or too_low else 0


if __name__ == "__main__":
    sys.exit(main())
