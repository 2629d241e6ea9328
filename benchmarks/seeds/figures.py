"""The curves of the hit-rate table, as plain data."""

from __future__ import annotations

from benchmarks.plots import Plot, Series
from benchmarks.seeds.cells import Cells
from benchmarks.stored_results import Result, Results

_SCHEDULING = {"sync": "synchronous", "async": "asynchronous"}


def plots(results: Results) -> list[Plot]:
    return [
        plot
        for result in results.of("seeds_hit_rates")
        for plot in (_hit_rates(result, scheduling) for scheduling in _SCHEDULING)
        if plot.series
    ]


def _hit_rates(result: Result, scheduling: str) -> Plot:
    cells = Cells(result.data)
    lines = []
    for column in cells.values("column"):
        points = [
            (percent, cells.rate(column=column, scheduling=scheduling, percent=percent))
            for percent in cells.values("percent")
        ]
        known = [(percent, rate) for percent, rate in points if rate is not None]
        if known:
            x, y = zip(*known, strict=True)
            lines.append(Series(column, x, tuple(round(rate, 3) for rate in y)))
    return Plot(
        name=f"{result.name}-{scheduling}",
        title=f"Requests per second by shared prefix, {_SCHEDULING[scheduling]} scheduling",
        x_label="shared prefix, % of the prompt",
        y_label="requests per second",
        series=tuple(lines),
    )
