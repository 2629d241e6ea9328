"""What a throughput table is made from: measurements by label."""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.result_files import describe_environment, flags, save, spread


class Record:
    """The measurements of one table. A run that is cut short leaves a file with those so far."""

    def __init__(
        self,
        table: str,
        sizes: Any,
        out: Path | None,
        budget_s: float | None,
        module: str | None = None,
    ) -> None:
        """`sizes` is a dataclass; `module` is what was run, where it was not the table alone."""
        self._out = out
        self._end = None if budget_s is None else time.monotonic() + budget_s
        self._begin = time.monotonic()
        self._cells: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._repetitions: dict[tuple[Any, ...], list[float]] = {}
        self._engines: dict[str, Any] = {}
        described = describe_environment()
        ran = module or f"benchmarks.throughput.{table}"
        described["command"] = " ".join(["python -m", ran, *flags()])
        self._content: dict[str, Any] = {
            "environment": described,
            "table": table,
            "sizes": asdict(sizes),
            "failed": {},
            "notes": {},
            "cells": [],
        }
        self.save()

    @property
    def over(self) -> bool:
        """Whether the time for this table is used up."""
        if self._end is None or time.monotonic() < self._end:
            return False
        self._content["stopped_by_budget"] = True
        return True

    @property
    def seconds_left(self) -> float:
        """Of the time for this table; endless where none was set."""
        return math.inf if self._end is None else self._end - time.monotonic()

    def add(self, seconds: float, requests: int = 1, **labels: Any) -> None:
        """One sample; samples with equal labels are repetitions of each other."""
        key = tuple(labels.items())
        if key not in self._cells:
            self._cells[key] = {**labels, "requests": requests}
            self._content["cells"].append(self._cells[key])
        cell, repetitions = self._cells[key], self._repetitions.setdefault(key, [])
        assert cell["requests"] == requests, f"{labels} with {requests} requests"
        repetitions.append(round(seconds, 6))
        cell["seconds"] = round(statistics.median(repetitions), 6)
        if len(repetitions) > 1:
            cell["range"] = [min(repetitions), max(repetitions)]
        shown = " ".join(f"{key}={value}" for key, value in labels.items())
        self.say(f"{shown}: {seconds:.4f} s, {requests / seconds:.2f}/s")
        self.save()

    def compare(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        """Keeps how much faster `other` was than `one`, by request, in each of their rounds."""
        first, second = (tuple(labels.items()) for labels in (one, other))
        if first not in self._cells or second not in self._cells:
            return
        speed = self._cells[second]["requests"] / self._cells[first]["requests"]
        pairs = zip(self._repetitions[first], self._repetitions[second], strict=False)
        ratios = [speed * before / after for before, after in pairs]
        self._cells[second]["ratios"] = spread(ratios)
        self.save()

    def loaded_blocks(self, labels: dict[str, Any], by_tier: dict[str, float]) -> None:
        """Where the blocks of the last sample with these labels came from."""
        loaded = {tier: count for tier, count in by_tier.items() if count}
        if loaded:
            self._cells[tuple(labels.items())]["loaded_blocks"] = loaded

    def engine(self, name: str, facts: dict[str, Any]) -> None:
        self._engines[name] = facts
        if "failed" in facts:
            self._content["failed"][name] = facts["failed"]
        self.save()

    def note(self, name: str, value: Any) -> None:
        self._content["notes"][name] = value
        self.save()

    def say(self, text: str) -> None:
        passed = time.monotonic() - self._begin
        print(f"[{self._content['table']} {passed:6.1f}] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._begin, 1)
        samples = [
            {"labels": dict(key), "seconds": seconds} for key, seconds in self._repetitions.items()
        ]
        save(self._out, self._content, {"engines": self._engines, "samples": samples})


_NOT_LABELS = ("requests", "seconds", "range", "ratios", "loaded_blocks")


class Cells:
    """The measurements of a stored table, found by their labels."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._cells = {_key(cell): cell for cell in data["cells"]}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def find(self, **labels: Any) -> dict[str, Any] | None:
        """What was measured under exactly these labels; None where a run did not get there."""
        return self._cells.get(_key(labels))

    def values(self, label: str) -> list[Any]:
        """All values of a label, in the order in which they were first measured."""
        return list(dict.fromkeys(c[label] for c in self._cells.values() if label in c))

    def seconds(self, **labels: Any) -> float | None:
        """The median of all repetitions."""
        cell = self.find(**labels)
        return None if cell is None else cell["seconds"]

    def range(self, **labels: Any) -> tuple[float, float] | None:
        """The shortest and the longest repetition, where there are several."""
        cell = self.find(**labels)
        if cell is None or "range" not in cell:
            return None
        low, high = cell["range"]
        return low, high

    def rate(self, **labels: Any) -> float | None:
        """Requests per second."""
        cell = self.find(**labels)
        return None if cell is None else cell["requests"] / cell["seconds"]

    def ratio(self, one: dict[str, Any], other: dict[str, Any]) -> float | None:
        """How many times as long a request of `one` takes as a request of `other`."""
        first, second = self.rate(**one), self.rate(**other)
        return None if first is None or second is None else second / first


def _key(labels: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset((name, value) for name, value in labels.items() if name not in _NOT_LABELS)
