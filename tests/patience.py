"""How long tests wait for other threads and processes, and how many examples they try."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hypothesis import settings

Said = TypeVar("Said")


def eventually(ask: Callable[[], Said], seconds: float = 60.0) -> Said:
    """Asks until the answer is not empty, zero or False, and returns it."""
    end = time.monotonic() + seconds
    while not (said := ask()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return said


def stop(pid: int) -> None:
    """Sends SIGSTOP and returns when no thread of the process runs any more. Until the thread that
    gets the signal is scheduled, the others still answer."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        found = set()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    eventually(lambda: states() <= {"T", "Z"})


def examples(count: int, **more: Any) -> settings:
    """So many in `make test-all`, where hypothesis tries 100 unless told; fewer where its profile
    tries fewer, as in `make test`."""
    from hypothesis import settings

    profile = settings.default
    assert profile is not None
    return settings(max_examples=max(1, count * profile.max_examples // 100), **more)


def mostly_slow(cases: Iterable[Any], quick: int) -> list[Any]:
    """For `parametrize`: the first ones are part of every run, the others are marked slow."""
    import pytest

    return [
        case if number < quick else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def in_turn(*axes: Mapping[str, Any]) -> list[Any]:
    """For `parametrize`: all combinations of these values, by name. Part of every run are those in
    which the last value follows from the others, so that each value of an axis is tried with one
    after the other of the last axis; the rest are marked slow."""
    import pytest

    cases = []
    for chosen in itertools.product(*(enumerate(axis.items()) for axis in axes)):
        *others, last = (number for number, _ in chosen)
        cases.append(
            pytest.param(
                *(value for _, (_, value) in chosen),
                id="-".join(name for _, (name, _) in chosen),
                marks=() if last == sum(others) % len(axes[-1]) else pytest.mark.slow,
            )
        )
    return cases
