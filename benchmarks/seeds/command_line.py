"""`python -m benchmarks.seeds.<table>`: the flags that all tables have, and one for each size."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.seeds.record import Record
from benchmarks.seeds.workbench import Workbench

Sizes = TypeVar("Sizes")


def run_table(
    table: str,
    measure: Callable[[Workbench, Record, Sizes], None],
    sizes: Sizes,
    tiny: Sizes,
    text: str | None,
) -> None:
    """The `main` of a table. `sizes` and `tiny` are dataclasses of numbers and tuples of them."""
    parser = argparse.ArgumentParser(description=(text or table).splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help="small, for a machine without GPU")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after so long")
    for name, value in dataclasses.asdict(sizes).items():  # type: ignore[call-overload]
        if isinstance(value, str):
            continue
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=f"size_{name}",
            type=_numbers if isinstance(value, (tuple, list)) else type(value),
            help=f"[{value}]",
        )
    args = parser.parse_args()
    chosen: Any = tiny if args.tiny else sizes
    given = {
        name.removeprefix("size_"): value
        for name, value in vars(args).items()
        if name.startswith("size_") and value is not None
    }
    record = Record(table, dataclasses.replace(chosen, **given), args.out, args.budget)
    with Workbench(args.tiny) as bench:
        measure(bench, record, dataclasses.replace(chosen, **given))
    record.save()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
