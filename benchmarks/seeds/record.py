"""What a table is made from: samples by label, written to JSON as they come."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import environment


class Record:
    """The samples of one table. A run that is cut short leaves a file with those so far."""

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
        described = environment.describe()
        ran = module or f"benchmarks.seeds.{table}"
        described["command"] = " ".join(["python -m", ran, *environment.flags()])
        self._content: dict[str, Any] = {
            "environment": described,
            "table": table,
            "sizes": asdict(sizes),
            "engines": {},
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

    def add(self, seconds: float, requests: int = 1, **labels: Any) -> None:
        """One sample; samples with equal labels are repetitions of each other."""
        cell = self._cells.get(tuple(labels.items()))
        if cell is None:
            cell = {**labels, "requests": requests, "seconds": []}
            self._cells[tuple(labels.items())] = cell
            self._content["cells"].append(cell)
        assert cell["requests"] == requests, f"{labels} with {requests} requests"
        cell["seconds"].append(round(seconds, 6))
        shown = " ".join(f"{key}={value}" for key, value in labels.items())
        self.say(f"{shown}: {seconds:.4f} s, {requests / seconds:.2f}/s")
        self.save()

    def detail(self, labels: dict[str, Any], **facts: Any) -> None:
        """Facts about the last sample with these labels, such as where its blocks came from."""
        cell = self._cells[tuple(labels.items())]
        for key, value in facts.items():
            cell.setdefault(key, []).append(value)

    def engine(self, name: str, facts: dict[str, Any]) -> None:
        self._content["engines"][name] = facts
        self.save()

    def note(self, name: str, value: Any) -> None:
        self._content["notes"][name] = value
        self.save()

    def say(self, text: str) -> None:
        passed = time.monotonic() - self._begin
        print(f"[{self._content['table']} {passed:6.1f}] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._begin, 1)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            # Moved into place: whoever reads it while it grows finds it whole.
            aside = self._out.with_name(self._out.name + ".new")
            aside.write_text(json.dumps(self._content, indent=1) + "\n")
            aside.replace(self._out)
