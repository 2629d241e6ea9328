"""Writes docs/benchmarks.md and its plots from the stored results: `python -m benchmarks.report`.

Nothing on that page is typed by hand; a unit test compares it with what the results give. Tables
need nothing but Python, plots need matplotlib (requirements/benchmark.txt).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import plots
from benchmarks.plots import Plot
from benchmarks.sections import (
    chats,
    cold,
    copies,
    daemon,
    index,
    peers,
    pinning,
    slow_tier,
    ssd,
)
from benchmarks.seeds import figures as seed_figures
from benchmarks.seeds import tables as seed_tables
from benchmarks.stored_results import Results

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

# A section is empty when there is no result for it. Add one module for a section, and its plots.
SECTIONS: list[Callable[[Results], str]] = [
    chats.section,
    peers.section,
    partial(seed_tables.section, plots_of=seed_figures.plots_of),
    cold.section,
    copies.section,
    daemon.section,
    ssd.section,
    index.section,
    pinning.section,
    slow_tier.section,
]
PLOTS: list[Callable[[Results], list[Plot]]] = [
    chats.plots,
    peers.plots,
    seed_figures.plots,
]

_HEAD = """\
# Benchmarks

<!-- Made by `python -m benchmarks.report` from benchmarks/results/. Do not edit. -->

Results of real runs. Each names its machine, its commit and the command that made it; the raw
samples are in `benchmarks/results/`. Ratios within one run mean something, times of different runs
or machines beside each other do not. [How to run them](../benchmarks/README.md).
"""


def page(results: Results) -> str:
    parts = [_HEAD, *(section(results) for section in SECTIONS)]
    return "\n".join(part for part in parts if part)


def all_plots(results: Results) -> list[Plot]:
    return [plot for make in PLOTS for plot in make(results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true", help="tables only, without matplotlib")
    args = parser.parse_args()
    results = Results.load()
    PAGE.write_text(page(results))
    if not args.no_plots:
        for plot in all_plots(results):
            if not plots.is_fresh(plot):
                plots.draw(plot)


if __name__ == "__main__":
    main()
