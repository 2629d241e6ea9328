"""The index of the SSD tier as it grows: memory a block, and how long a folder takes to open.

    python -m benchmarks.ssd_index --folder /mnt/nvme/scratch --out result.json

Opens folders whose journal is full of blocks, in the order of a shuffled use, over a data file that
is sparse: until the first answer, with the journal in the page cache. `bytes_per_block` is what the
process has grown by. Each run is a process of its own; times are medians, processor time beside
them, as others may be busy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.lookup import resident_bytes
from benchmarks.result_files import describe_environment, save
from benchmarks.ssd_tier import KIB, SparseDisk, key, make_large_folder
from vllm_tiered_kv.stores.ssd.store import SsdStore

BLOCK = 128 * KIB


def space_for(blocks: int) -> int:
    """The index has a share of it."""
    return blocks * BLOCK * 128 // 126


def measure_opening(folder: Path, blocks: int) -> dict[str, float]:
    before = resident_bytes()
    begin, used = time.perf_counter(), time.process_time()
    store = SsdStore(folder, space_for(blocks), disk=SparseDisk())
    assert store.match([key(0)]) == 1
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - used
    return {
        "blocks": store.recovery.blocks,
        "seconds_to_serving": round(seconds, 3),
        "cpu_seconds_to_serving": round(cpu_seconds, 3),
        "bytes_per_block": round((resident_bytes() - before) / store.recovery.blocks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on a disk")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000_000, 5_000_000, 10_000_000])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe_environment(), "index": []}
    raw: dict[str, Any] = {"runs": []}
    report["load_average_before"] = os.getloadavg()[0]  # others' work slows us
    spawn = get_context("spawn")
    for blocks in args.blocks:
        folder = args.folder / f"index-{blocks}"
        shutil.rmtree(folder, ignore_errors=True)
        with ProcessPoolExecutor(1, spawn) as child:
            child.submit(make_large_folder, folder, space_for(blocks), BLOCK).result()
        runs = []
        for _ in range(args.repeats):
            with ProcessPoolExecutor(1, spawn) as child:
                runs.append(child.submit(measure_opening, folder, blocks).result())
        shutil.rmtree(folder)
        row: dict[str, Any] = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
        report["index"].append(row)
        raw["runs"].append(runs)
        print(row, flush=True)
        save(args.out, report, raw)


if __name__ == "__main__":
    main()
