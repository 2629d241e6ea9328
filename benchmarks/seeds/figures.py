"""The curves of the tables of which a line says more than a row, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.plots import Plot, Series
from benchmarks.seeds.cells import Cells
from benchmarks.seeds.tables import LOCAL_ROWS, REMOTE_ROWS, SCHEDULING, rounds
from benchmarks.stored_results import Result, Results

_SCHEDULING = {"sync": "synchronous", "async": "asynchronous"}
_SYSTEMS = {"vllm": "vllm", "tiered": "swap_out", "daemon": "transfer_out"}  # as in the table


def plots(results: Results) -> list[Plot]:
    return [plot for result in results.of("seeds_") for plot in plots_of(result)]


def plots_of(result: Result) -> list[Plot]:
    """Empty for a table without plots, and without what a run did not measure."""
    for table, make in _PLOTS.items():
        if result.benchmark.startswith(f"seeds_{table}"):
            return [plot for plot in make(result) if plot.series]
    return []


def _store_overhead(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    # Places of equal width: on a scale of numbers the small steps would lie upon each other.
    chunks = {str(chunk): chunk for chunk in cells.values("chunk")}
    for gpu_cache, shown in ((True, "on"), (False, "off")):
        lines = {
            f"{name}-{SCHEDULING[scheduling]}": [
                (
                    at,
                    cells.rate(
                        system=system, scheduling=scheduling, gpu_cache=gpu_cache, chunk=chunk
                    ),
                )
                for at, chunk in chunks.items()
            ]
            for system, name in _SYSTEMS.items()
            for scheduling in SCHEDULING
        }
        yield Plot(
            name=f"{result.name}-gpu-cache-{shown}",
            title=f"Requests per second while storing, GPU cache {shown}",
            x_label="num_batched_tokens",
            y_label="requests per second",
            series=_known(lines),
        )


def _hit_rates(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    for scheduling, shown in _SCHEDULING.items():
        lines = {
            column: [
                (percent, cells.rate(column=column, scheduling=scheduling, percent=percent))
                for percent in cells.values("percent")
            ]
            for column in cells.values("column")
        }
        yield Plot(
            name=f"{result.name}-{scheduling}",
            title=f"Requests per second by shared prefix, {shown} scheduling",
            x_label="shared prefix, % of the prompt",
            y_label="requests per second",
            series=_known(lines),
        )


def _long_prefill(result: Result) -> Iterator[Plot]:
    cells = Cells(result.data)
    outputs = {str(output): output for output in cells.values("output")}
    for place, rows, title in (
        ("local", LOCAL_ROWS, "Long prefill, without a daemon"),
        ("remote", REMOTE_ROWS, "Long prefill, with a daemon; engines restarted after round 3"),
    ):
        lines = {
            name: [(at, cells.rate(**labels, output=output)) for at, output in outputs.items()]
            for name, labels in rounds(rows)
        }
        yield Plot(
            name=f"{result.name}-{place}",
            title=title,
            x_label="output_len",
            y_label="requests per second",
            series=_known(lines),
            log_y=True,  # what is computed takes many times as long as what is loaded
        )


def _known(lines: dict[str, list[tuple[Any, float | None]]]) -> tuple[Series, ...]:
    """Lines through what was measured; none where nothing was."""
    found = []
    for label, points in lines.items():
        known = [(x, round(rate, 3)) for x, rate in points if rate is not None]
        if known:
            x, y = zip(*known, strict=True)
            found.append(Series(label, x, y))
    return tuple(found)


_PLOTS: dict[str, Callable[[Result], Iterator[Plot]]] = {
    "store_overhead": _store_overhead,
    "hit_rates": _hit_rates,
    "long_prefill": _long_prefill,
}
