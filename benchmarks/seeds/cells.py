"""The samples of a table's JSON, found by their labels."""

from __future__ import annotations

import statistics
from typing import Any

_NOT_LABELS = ("requests", "seconds", "cached", "cached_tokens", "loaded_blocks")


class Cells:
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
        cell = self.find(**labels)
        return None if cell is None else statistics.median(cell["seconds"])

    def rate(self, **labels: Any) -> float | None:
        """Requests per second."""
        cell = self.find(**labels)
        return None if cell is None else cell["requests"] / statistics.median(cell["seconds"])

    def times(self, one: dict[str, Any], other: dict[str, Any]) -> float | None:
        """How many times the time of `other` is that of `one`: the median over repetitions, which
        were measured side by side."""
        first, second = self.find(**one), self.find(**other)
        if first is None or second is None:
            return None
        # A run that was cut short may have one repetition more of the first.
        pairs = zip(_each(first), _each(second), strict=False)
        return statistics.median(a / b for a, b in pairs)


def _each(cell: dict[str, Any]) -> list[float]:
    return [seconds / cell["requests"] for seconds in cell["seconds"]]


def _key(labels: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset((name, value) for name, value in labels.items() if name not in _NOT_LABELS)
