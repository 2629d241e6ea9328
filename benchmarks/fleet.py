"""Engines that live side by side; one that fails is left out and the others go on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineFailed, EngineProcess, EngineSpec

_REPLY_TIMEOUT_S = 120.0  # far more than any question here takes; a run has a budget
_MARGIN_MIB = 1024  # what a connector takes on the device beside a plain engine


class Fleet:
    """Starts, keeps and ends engines by name. Context manager: none of them outlives it."""

    def __init__(self, spec: Callable[[str], EngineSpec], folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self.running: dict[str, EngineProcess] = {}
        self.described: dict[str, dict[str, Any]] = {}
        """What the result says about each engine, failed ones included."""

    def start(self, names: Sequence[str]) -> None:
        """Ends the engines not named, keeps those that run, starts the others together."""
        self._end([name for name in self.running if name not in names])
        fresh = [name for name in names if name not in self.described]
        for name in fresh:
            spec = self._spec(name)
            self.running[name] = EngineProcess(spec, self._folder, _REPLY_TIMEOUT_S)
        for name in fresh:
            engine = self.running[name]
            try:
                engine.wait_ready()
            except EngineFailed as error:
                self.fail(error)
            else:
                self.described[name] = {
                    "started_s": round(engine.started_s, 2),
                    "facts": {k: v for k, v in engine.facts().items() if k != "pid"},
                }

    def fail(self, error: EngineFailed) -> None:
        """Leaves an engine out of all that follows."""
        say(str(error))
        self.described[error.name] = {
            **self.described.get(error.name, {}),
            "failed": error.what[:300],
        }
        engine = self.running.pop(error.name, None)
        if engine is not None:
            engine.close()

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self.running[name].hang_up()
        for name in names:
            self.running.pop(name).close()

    @contextlib.contextmanager
    def left_out_on_failure(self) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            self.fail(error)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(list(self.running))


def how_many_fit(most: int) -> int:
    """Engines the device has room for, judged by the one that is running now."""
    sizes = device_memory_mib()
    if sizes is None:
        return most
    used, total = sizes
    return max(1, min(most, total // (used + _MARGIN_MIB)))


def device_memory_mib() -> tuple[int, int] | None:
    """Used and total memory of the first GPU, or None without one."""
    command = [
        "nvidia-smi",
        "--query-gpu=memory.used,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    used, total = done.stdout.splitlines()[0].split(",")
    return int(used), int(total)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
