"""What the timed prompts of `connectors.py` amount to: times by mode, ratios beside goals.

Needs neither torch nor vLLM.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from benchmarks.result_files import spread


@dataclass(frozen=True)
class Sample:
    """One timed prompt to one engine."""

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


KINDS = ("cold", "device_hit", "tier_hit", "cold_batch", "tier_batch")


@dataclass(frozen=True)
class Goal:
    """One ratio or difference of one group, and what it should be."""

    id: str
    what: str
    value: float
    limit: float
    at_most: bool
    unit: str
    group: int

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def derive(samples: Samples, to_device_ms: float | None) -> dict[str, Any]:
    """All that is computed from the samples; `to_device_ms` is one prompt at PCIe speed.

    Without a GPU it is None, and there are no goals: what a tiny model on a CPU does is no merit.
    """
    groups = [samples.where(group=group) for group in samples.of("group")]
    found = [goal for group in groups for goal in goals(group, to_device_ms)]
    return {
        "groups": [_group(group) for group in groups],
        "goals": [
            {**asdict(goal), "value": round(goal.value, 4), "reached": goal.reached}
            for goal in found
        ],
    }


def _group(samples: Samples) -> dict[str, Any]:
    limit = fast_mode_limit(samples.where(kind="device_hit").ms or [1.0])
    modes: dict[str, Any] = {}
    for mode in samples.of("mode"):
        mine = samples.where(mode=mode)
        found: dict[str, Any] = {}
        for kind in KINDS:
            some = mine.where(kind=kind)
            if len(some):
                found[kind] = spread(some.ms)
            if len(some) and kind.startswith("tier"):
                found[kind] |= _counts(some)
        fast = [ms for ms in mine.where(kind="device_hit").ms if ms <= limit]
        if fast:
            found["device_hit_fast"] = spread(fast)
        costs = load_costs(mine)
        if costs:
            found["load_cost"] = spread(costs)
        found["cold_throughput"] = cold_throughput(samples, mode)
        modes[mode] = found
    return {
        "group": samples.of("group")[0],
        # How the device's hits split into a fast and a slow mode, over all engines of the group.
        "fast_mode_limit_ms": round(limit, 3) if math.isfinite(limit) else None,
        "modes": modes,
    }


def _counts(samples: Samples) -> dict[str, int]:
    return {
        "requests": sum(sample.requests for sample in samples),
        "hits": sum(sample.hits for sample in samples),
        "equal": sum(sample.equal or 0 for sample in samples),
    }


def load_costs(samples: Samples) -> list[float]:
    """Tier hit less device hit of the same turn, for hits that were real."""
    return paired_differences(samples.real(), "tier_hit", "device_hit")


def goals(samples: Samples, to_device_ms: float | None) -> list[Goal]:
    """Those whose engines ran in this group."""
    if to_device_ms is None:
        return []
    group = samples.of("group")[0]
    found: list[Goal] = []

    def goal(id: str, what: str, value: float | None, limit: float, unit: str = "x") -> None:
        if value is not None:
            found.append(Goal(id, what, value, limit, id in ("P3", "P4"), unit, group))

    goal("P3", "device hit: tiered less nothing, fast mode", _p3(samples), 0.3, "ms")
    cost = _median(load_costs(samples.where(mode="tiered")))
    goal("P4", "load cost over bytes at PCIe speed", _ratio(cost, to_device_ms), 1.25)
    for other, p4, p5 in (("offloading", 0.5, 1.8), ("offloading_blhnc", 0.75, 1.3)):
        theirs = _median(load_costs(samples.where(mode=other)))
        goal("P4", f"load cost over that of {other}", _ratio(cost, theirs), p4)
        batch = [_median(samples.where(mode=m, kind="tier_batch").ms) for m in (other, "tiered")]
        goal("P5", f"batch from the tier: {other} over tiered", _ratio(*batch), p5)
    goal("P6", "cold throughput: tiered over vllm", cold_throughput(samples, "tiered"), 0.995)
    return found


def cold_throughput(samples: Samples, mode: str) -> float | None:
    """Of `vllm` alone in the same round, median over rounds."""
    cold = samples.where(kind="cold_batch")
    alone = {sample.round: sample.ms for sample in cold.where(mode="vllm")}
    ratios = [alone[s.round] / s.ms for s in cold.where(mode=mode) if s.round in alone]
    return _median(ratios)


def _p3(samples: Samples) -> float | None:
    hits = samples.where(kind="device_hit")
    if not len(hits):
        return None
    limit = fast_mode_limit(hits.ms)
    fast = [
        _median([ms for ms in hits.where(mode=mode).ms if ms <= limit])
        for mode in ("tiered", "nothing")
    ]
    return fast[0] - fast[1] if fast[0] is not None and fast[1] is not None else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(of: float | None, over: float | None) -> float | None:
    return of / over if of is not None and over else None
