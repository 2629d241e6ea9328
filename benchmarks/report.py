"""Writes docs/benchmarks.md and its plots from the stored results: `python -m benchmarks.report`.

Nothing on that page is typed by hand; a unit test compares it with what the results give. Tables
need nothing but Python, plots need matplotlib (requirements/benchmark.txt).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import plots
from benchmarks.plots import Plot
from benchmarks.result_files import Results
from benchmarks.sections import chats, connectors, copies, fleet, throughput, tiers

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

# A section is empty when there is no result for it.
SECTIONS: list[Callable[[Results], str]] = [
    chats.section,
    connectors.section,
    throughput.section,
    copies.token_section,
    copies.block_section,
    tiers.daemon_section,
    tiers.ssd_section,
    tiers.token_cache_section,
    tiers.lookup_section,
    tiers.pinning_section,
    tiers.load_or_compute_section,
    fleet.section,
]
PLOTS: list[Callable[[Results], list[Plot]]] = [
    chats.plots,
    connectors.plots,
    throughput.plots,
    fleet.plots,
]

_HEAD = """\
# Benchmarks

<!-- Made by `python -m benchmarks.report` from benchmarks/results/. Do not edit. -->

Results of real runs. Each names its machine, its commit and the command that made it at that
commit; programs may have other names since. Ratios within one run mean something, times of
different runs or machines beside each other do not. [How to run them](../benchmarks/README.md).
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
