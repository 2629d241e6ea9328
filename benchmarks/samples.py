"""Raw measurements of engines that took turns, and what they amount to. No torch, no vLLM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One timed question to one engine."""

    group: int
    """Engines of one group ran side by side; only those are compared."""
    round: int
    turn: int
    mode: str
    kind: str
    """cold, device_hit, tier_hit, cold_batch or tier_batch."""
    ms: float
    requests: int
    hits: int
    """Requests whose prompt was not computed again."""
    equal: int | None = None
    """Requests with the tokens this engine gave before; None where there is no before."""


COLUMNS = tuple(field.name for field in fields(Sample))


class Samples:
    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples = list(samples)

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def where(self, **wanted: Any) -> Samples:
        return Samples(
            sample
            for sample in self._samples
            if all(getattr(sample, name) == value for name, value in wanted.items())
        )

    @property
    def ms(self) -> list[float]:
        return [sample.ms for sample in self._samples]

    def of(self, name: str) -> list[Any]:
        """The values of a column, each once, in order of appearance."""
        return list(dict.fromkeys(getattr(sample, name) for sample in self._samples))

    def real(self) -> Samples:
        """Without hits that were none: those say what computing costs."""
        return Samples(sample for sample in self._samples if sample.hits == sample.requests)

    def rows(self) -> list[list[Any]]:
        return [list(astuple(sample)) for sample in self._samples]

    @classmethod
    def from_rows(cls, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Samples:
        return cls(Sample(**dict(zip(columns, row, strict=True))) for row in rows)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Number, median, quartiles and range."""
    if len(values) > 1:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = middle = high = values[0]
    found = {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
    return {"n": len(values), **{name: round(value, 3) for name, value in found.items()}}


def paired_differences(
    samples: Samples, of: str, over: str, names: Sequence[str] = ("group", "round", "turn", "mode")
) -> list[float]:
    """`of` less `over` wherever both kinds were measured in the same turn."""

    def place(sample: Sample) -> tuple[Any, ...]:
        return tuple(getattr(sample, name) for name in names)

    base = {place(sample): sample.ms for sample in samples.where(kind=over)}
    return [s.ms - base[place(s)] for s in samples.where(kind=of) if place(s) in base]


def fast_mode_limit(values: Sequence[float]) -> float:
    """Where the slow mode of a bimodal time begins; infinity if there is only one mode.

    The limit is the cut that leaves the least variance of the logarithms on both sides (Otsu). It
    counts when it explains most of the variance (an even spread has three quarters explained by a
    cut in its middle), when each side has a tenth of the values, and when their medians differ by a
    quarter.
    """
    ordered = sorted(values)
    logs = [math.log(value) for value in ordered]
    tenth = max(1, math.ceil(len(ordered) / 10))
    cuts = [at for at in range(tenth, len(ordered) - tenth + 1) if at < len(ordered)]
    cuts = [at for at in cuts if ordered[at - 1] < ordered[at]]
    if not cuts:
        return math.inf
    inside = {at: _squares(logs[:at]) + _squares(logs[at:]) for at in cuts}
    cut = min(inside, key=inside.__getitem__)
    fast, slow = statistics.median(ordered[:cut]), statistics.median(ordered[cut:])
    if inside[cut] > 0.15 * _squares(logs) or slow < 1.25 * fast:
        return math.inf
    return (ordered[cut - 1] + ordered[cut]) / 2


def _squares(values: Sequence[float]) -> float:
    return statistics.pvariance(values) * len(values)
