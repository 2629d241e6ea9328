"""The JSON results of real runs that are kept beside the benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Result:
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
    """All of them, ordered by name."""

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
        """Results whose names begin so: `of("peers")` finds peers-h200 and peers_tiny-laptop."""
        return [result for result in self.all if result.benchmark.startswith(benchmark)]
