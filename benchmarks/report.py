"""Writes the pages on benchmarks and their plots from the stored results.

`python -m benchmarks.report` writes docs/benchmarks.md, which has what a user asks,
docs/benchmarks-details.md, which has everything, and the rows in README.md. No number there is
typed by hand; a unit test compares the pages with what the results give. Tables need nothing but
Python, plots need matplotlib (requirements/benchmark.txt).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import plots
from benchmarks.plots import Plot
from benchmarks.result_files import Results
from benchmarks.sections import (
    chats,
    connectors,
    copies,
    eviction,
    fleet,
    overview,
    published,
    throughput,
    tiers,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
DETAILS = ROOT / "docs" / "benchmarks-details.md"
README = ROOT / "README.md"

# A section is empty when there is no result for it.
SECTIONS: list[Callable[[Results], str]] = [
    chats.section,
    connectors.section,
    throughput.section,
    copies.token_section,
    copies.block_section,
    copies.shard_section,
    tiers.daemon_section,
    tiers.ssd_section,
    tiers.distributed_section,
    tiers.token_cache_section,
    eviction.section,
    tiers.lookup_section,
    tiers.pinning_section,
    tiers.load_or_compute_section,
    tiers.compute_once_section,
    fleet.section,
    published.section,
]
PLOTS: list[Callable[[Results], list[Plot]]] = [
    chats.plots,
    connectors.plots,
    throughput.plots,
    fleet.plots,
    eviction.plots,
]

_HEAD = """\
# Benchmarks

<!-- Made by `python -m benchmarks.report` from benchmarks/results/. Do not edit. -->

Results of real runs. Each names its machine, its commit and the command that made it at that
commit; programs may have other names since. Compare times within a table only.
[The details](benchmarks-details.md) have all runs, the goals and which of them were not reached,
and how fast blocks are copied, found and evicted.
[How to run them](../benchmarks/README.md).
"""
_DETAILS_HEAD = """\
# Benchmarks in detail

<!-- Made by `python -m benchmarks.report` from benchmarks/results/. Do not edit. -->

All stored results, with the goals that were set for them; [benchmarks](benchmarks.md) has what a
user asks. Each names its machine, its commit and the command that made it at that commit; programs
may have other names since. Ratios within one run mean something, times of different runs or
machines beside each other do not. [How to run them](../benchmarks/README.md).
"""


def page(results: Results) -> str:
    return "\n".join(part for part in [_HEAD, *overview.sections(results)] if part)


def details(results: Results) -> str:
    parts = [_DETAILS_HEAD, *(section(results) for section in SECTIONS)]
    return "\n".join(part for part in parts if part)


def readme(results: Results, text: str) -> str:
    """README.md with the rows of these results."""
    return re.sub(
        r"(?<=<!-- generated: results -->\n).*?(?=<!-- end -->)",
        lambda _: overview.headline(results),
        text,
        flags=re.DOTALL,
    )


def all_plots(results: Results) -> list[Plot]:
    return [plot for make in PLOTS for plot in make(results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-plots", action="store_true", help="tables only, without matplotlib")
    args = parser.parse_args()
    results = Results.load()
    PAGE.write_text(page(results))
    DETAILS.write_text(details(results))
    README.write_text(readme(results, README.read_text()))
    if not args.no_plots:
        for plot in all_plots(results):
            if not plots.is_fresh(plot):
                plots.draw(plot)


if __name__ == "__main__":
    main()
