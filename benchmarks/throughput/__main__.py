"""All tables in one go, with as few engine starts as there can be.

    python -m benchmarks.throughput --out-dir results/ --suffix h200

Engines of one table that the next one needs too go on living. Each table writes a file of its own;
one that fails does not keep the others from being measured.
"""

from __future__ import annotations

import argparse
import time
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.throughput import (
    documents,
    hit_rates,
    long_prefill,
    memory_and_wire,
    prefill_and_swap,
    store_overhead,
)
from benchmarks.throughput.engine_pool import EnginePool
from benchmarks.throughput.record import Record

TABLES: tuple[ModuleType, ...] = (
    prefill_and_swap,  # its starts fill vLLM's compile cache for all the others
    store_overhead,
    hit_rates,
    long_prefill,
    documents,
    memory_and_wire,
)

_STARTS_EARLY = ("hit_rates", "documents")  # if the table before has room for its engines


def _sizes(table: ModuleType, tiny: bool) -> Any:
    return table.TINY_SIZES if tiny else table.SIZES


def main() -> None:
    by_name = {table.__name__.rpartition(".")[2]: table for table in TABLES}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, required=True, help="where the JSON files go")
    parser.add_argument("--suffix", default="", help="for the names of the files")
    parser.add_argument("--tiny", action="store_true", help="small, for a machine without GPU")
    parser.add_argument("--only", default=",".join(by_name), help="tables, comma-separated")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop after so long")
    args = parser.parse_args()
    end = None if args.budget is None else time.monotonic() + args.budget
    ending = f"-{args.suffix}.json" if args.suffix else ".json"
    names = args.only.split(",")
    failed: list[str] = []
    with EnginePool(args.tiny) as pool:
        for name, following in zip(names, [*names[1:], None], strict=True):
            table = by_name[name]
            sizes = _sizes(table, args.tiny)
            left = None if end is None else max(0.0, end - time.monotonic())
            out = args.out_dir / f"throughput_{name}{ending}"
            record = Record(name, sizes, out, left, module="benchmarks.throughput")
            if record.over:
                record.save()
                continue
            try:
                pool.expect(list)
                if following in _STARTS_EARLY:
                    after = by_name[following]
                    pool.expect(partial(after.specs, pool, _sizes(after, args.tiny)))
                table.measure(pool, record, sizes)
            except Exception:
                traceback.print_exc()
                record.note("failed", traceback.format_exc().splitlines()[-1])
                failed.append(name)
            record.save()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the other tables are written")


if __name__ == "__main__":
    main()
