"""The SSD tier against its disk: reads and writes of blocks beside fio, and recovery.

    python -m benchmarks.ssd_tier --folder /mnt/nvme/scratch --out result.json

fio does the same transfers: as many blocks of the same size, O_DIRECT, a file that is reserved
before. In every round each of us writes, then each reads, then each writes again, the first one
last in the next round; ratios are of the same round, since disks change their speed. The store is
used as a daemon uses it: as many callers, with batches as large. Writing includes making everything
durable at the end, for both. fio runs twice: with as many threads as the store has, each of which
reuses one buffer (psync); and with as many callers and places in memory as we use (libaio), because
where a disk is virtual its bytes are copied, and a buffer that stays in the cache is filled faster
than blocks that all go to places of their own. Recovery opens a folder whose index says 100 GB of
blocks are there, over a data file that is sparse, until the first answer.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save
from vllm_tiered_kv.cache.durable_index import BlockRows
from vllm_tiered_kv.core.arena_geometry import SlabGeometry
from vllm_tiered_kv.core.store import MAX_KEY_BYTES, PutItem, PutResult, StoreKey
from vllm_tiered_kv.options import parse_size
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.folder import read_superblock
from vllm_tiered_kv.stores.ssd.journal import Journal
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, put_records
from vllm_tiered_kv.stores.ssd.store import SsdStore

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = {"Qwen2.5-3B": 576 * KIB, "Llama-3.1-8B": 2 * MIB, "Qwen2.5-32B": 4 * MIB}
# As `server.demotion`, `server.write_behind` and `server.tiered_store` do.
WRITERS, WRITE_BYTES = 16, 16 * MIB
READERS, READ_BLOCKS = 16, 8
RECOVERED_BYTES = 100 * 10**9
RECOVERED_BLOCK = 576 * KIB
NAMESPACE = bytes(16)
_KEPT_FREE = 256  # slots a full store may keep free
ACTIONS = ("write", "read", "replace")


def write_blocks(block: int) -> int:
    """In one call."""
    return max(1, WRITE_BYTES // block)


def key(number: int) -> StoreKey:
    return StoreKey(NAMESPACE + number.to_bytes(17, "little") + bytes(8))


class OwnRun:
    """A fresh store that is filled, read, and filled again with eviction."""

    def __init__(self, folder: Path, space: int, block: int, threads: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self.store = SsdStore(folder, space, io_threads=threads)
        budget = self.store._budget
        slots = budget.num_slabs * (budget.slab_bytes // block)
        self._batch = write_blocks(block)
        whole = math.lcm(self._batch, READ_BLOCKS)
        self.blocks = (slots - _KEPT_FREE) // whole * whole
        self.nbytes = self.blocks * block
        self._order = list(range(self.blocks))
        random.Random(0).shuffle(self._order)
        self._to_write = [aligned_buffers(block, self._batch) for _ in range(WRITERS)]
        self._to_fill = [aligned_buffers(block, READ_BLOCKS) for _ in range(READERS)]

    def gb_per_s(self, action: str) -> float:
        begin = time.perf_counter()
        getattr(self, action)()
        return self.nbytes / (time.perf_counter() - begin) / 1e9

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self._folder)

    def _share_out(
        self, places: list[list[memoryview]], work: Callable[[list[memoryview], int], None]
    ) -> None:
        """Every batch once, by all callers together."""
        starts = deque(range(0, self.blocks, len(places[0])))

        def caller(buffers: list[memoryview]) -> None:
            while True:
                try:
                    start = starts.popleft()
                except IndexError:
                    return
                work(buffers, start)

        with ThreadPoolExecutor(len(places)) as pool:
            for future in [pool.submit(caller, buffers) for buffers in places]:
                future.result()

    def write(self, first: int = 0) -> None:
        def put(buffers: list[memoryview], start: int) -> None:
            keys = range(first + start, first + start + len(buffers))
            items = [PutItem(key(n), None, buffer) for n, buffer in zip(keys, buffers, strict=True)]
            assert self.store.put(items) == [PutResult.STORED] * len(buffers)

        self._share_out(self._to_write, put)
        self.store.flush()

    def replace(self) -> None:
        self.write(self.blocks)

    def read(self) -> None:
        def get(buffers: list[memoryview], start: int) -> None:
            keys = [key(number) for number in self._order[start : start + len(buffers)]]
            assert all(self.store.get(keys, buffers))

        self._share_out(self._to_fill, get)


def aligned_buffers(block: int, count: int) -> list[memoryview]:
    memory = mmap.mmap(-1, count * block)
    for start in range(0, len(memory), MIB):
        memory[start : start + MIB] = random.randbytes(min(MIB, len(memory) - start))
    whole = memoryview(memory)
    return [whole[at * block : (at + 1) * block] for at in range(count)]


@dataclass(frozen=True)
class FioKind:
    """How fio keeps the disk busy."""

    engine: str
    jobs: int
    depth: int  # transfers of a job at a time, each with a buffer of its own


class FioRun:
    """The same transfers by fio, in one file of its own, each job its share."""

    def __init__(self, path: Path, nbytes: int, block: int, to_write: FioKind, to_read: FioKind):
        self._path = path
        self._blocks = nbytes // block
        self._block = block
        self._kinds = {"write": to_write, "randread": to_read}

    def gb_per_s(self, action: str) -> float:
        how = "randread" if action == "read" else "write"
        kind = self._kinds[how]
        share = self._blocks // kind.jobs * self._block
        command = [
            "fio", "--name=blocks", f"--filename={self._path}", f"--rw={how}",
            f"--bs={self._block}", "--direct=1", f"--ioengine={kind.engine}",
            f"--iodepth={kind.depth}", "--thread", f"--numjobs={kind.jobs}", f"--size={share}",
            f"--offset_increment={share}", "--fallocate=native", "--output-format=json",
            "--end_fsync=1", "--refill_buffers=0", "--norandommap=0",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        nbytes = sum(job["read" if action == "read" else "write"]["io_bytes"] for job in jobs)
        seconds = max(job["job_runtime"] for job in jobs) / 1000  # until the last one, as for us
        return float(nbytes / seconds / 1e9)

    def close(self) -> None:
        self._path.unlink()


def measure_speed(
    folder: Path, space: int, block: int, threads: int, repeats: int, with_fio: bool
) -> dict[str, Any]:
    of_threads = FioKind("psync", threads, 1)
    writing = FioKind("libaio", WRITERS, write_blocks(block))
    reading = FioKind("libaio", READERS, READ_BLOCKS)
    kinds = {"fio": (of_threads, of_threads), "fio_with_as_many_places": (writing, reading)}
    if not with_fio:
        kinds.clear()
    runs: dict[str, list[float]] = {}
    direct = True
    nbytes = 0
    for number in range(repeats):
        own = OwnRun(folder / "store", space, block, threads)
        nbytes, direct = own.nbytes, own.store.direct_io
        fios = {
            f"{name}_": FioRun(folder / name, nbytes, block, *kind) for name, kind in kinds.items()
        }
        speeds = {"": own.gb_per_s, **{name: run.gb_per_s for name, run in fios.items()}}
        order = list(speeds)
        for _ in range(number % len(order)):
            order.append(order.pop(0))
        for action in ACTIONS:
            for name in order:
                speed = round(speeds[name](action), 3)
                runs.setdefault(f"{name}{action}", []).append(speed)
        own.close()
        for fio in fios.values():
            fio.close()
    row: dict[str, Any] = {"block_bytes": block, "bytes": nbytes, "direct_io": direct, "runs": runs}
    for action in ACTIONS:
        row[f"{action}_gb_per_s"] = round(statistics.median(runs[action]), 3)
        for name in kinds:
            pairs = zip(runs[action], runs[f"{name}_{action}"], strict=True)
            ratios = sorted(round(ours / fio, 3) for ours, fio in pairs)
            row[f"{action}_of_{name}"] = round(statistics.median(ratios), 3)
            row[f"{action}_of_{name}_spread"] = [ratios[0], ratios[-1]]
    return row


class SparseDisk(OsDisk):
    """Reserves nothing: a large index needs no large disk."""

    def allocate(self, fd: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "sparse on purpose")


def make_large_folder(folder: Path, space: int, block: int = RECOVERED_BLOCK) -> int:
    """A folder whose index is full of blocks that were never written; how many."""
    disk = SparseDisk()
    SsdStore(folder, space, disk=disk).close()
    superblock = read_superblock(folder)
    assert superblock is not None
    budget = Budget.divide(space, superblock.slab_bytes)
    geometry = SlabGeometry(budget.data_bytes, budget.slab_bytes, ALIGNMENT)
    per_slab = geometry.slots_in_slab(geometry.add_class(block))
    count = budget.num_slabs * per_slab
    numbers = np.arange(count)
    keys = np.zeros((count, MAX_KEY_BYTES), np.uint8)
    at = len(NAMESPACE)
    keys[:, at : at + 8] = numbers.view(np.uint8).reshape(count, 8)
    parents = np.roll(keys, 1, axis=0)
    sizes = np.full(count, len(key(0)), np.uint8)
    is_head = numbers % 256 == 0
    parents[is_head] = 0
    slots = numbers // per_slab * geometry.slots_per_slab + numbers % per_slab
    rng = np.random.default_rng(0)
    checksums = rng.integers(1 << 63, size=count, dtype=np.uint64)
    lengths = np.full(count, block, np.uint32)
    parent_sizes = np.where(is_head, 0, sizes).astype(np.uint8)
    records = put_records(BlockRows(keys, sizes, parents, parent_sizes, slots, lengths, checksums))
    rng.shuffle(records)  # the order of use is not that of the slots
    Journal.create(disk, folder, superblock.store, 1000, records).close()
    return count


def measure_recovery(folder: Path, repeats: int) -> dict[str, Any]:
    path = folder / "large"
    shutil.rmtree(path, ignore_errors=True)
    blocks = make_large_folder(path, RECOVERED_BYTES)
    seconds: list[float] = []
    cold: list[float] = []
    for number in range(2 * repeats):
        if number % 2:  # every other time from the disk
            fd = os.open(path / "journal", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        begin = time.perf_counter()
        store = SsdStore(path, RECOVERED_BYTES, disk=SparseDisk())
        assert store.match([key(0)]) == 1
        (cold if number % 2 else seconds).append(round(time.perf_counter() - begin, 3))
        found = sum(store.contains([key(n) for n in range(blocks)]))
        assert found == store.recovery.blocks == blocks
        store.close()
    journal = (path / "journal").stat().st_size
    shutil.rmtree(path)
    return {
        "bytes": RECOVERED_BYTES,
        "blocks": blocks,
        "journal_bytes": journal,
        "seconds_to_serving": statistics.median(seconds),
        "seconds_to_serving_cold_journal": statistics.median(cold),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--space", default="2GiB", help="size of the store for each run")
    parser.add_argument("--threads", type=int, default=16, help="of the store and of fio")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", default=",".join(BLOCK_BYTES), help="comma-separated")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with_fio = shutil.which("fio") is not None
    if not with_fio:
        print("fio is not installed: no comparison with it", file=sys.stderr)
    report: dict[str, Any] = {"environment": describe_environment(), "threads": args.threads}
    report["load_average_before"] = os.getloadavg()[0]  # others' work slows us more than fio
    report["recovery"] = measure_recovery(args.folder, args.repeats)
    print(report["recovery"])
    raw: dict[str, Any] = {"speed": {}}
    report["speed"] = {}
    space = parse_size("--space", args.space)
    for shape in args.shapes.split(","):
        block = BLOCK_BYTES[shape]
        row = measure_speed(args.folder, space, block, args.threads, args.repeats, with_fio)
        raw["speed"][shape] = row.pop("runs")
        report["speed"][shape] = row
        print(shape, row, flush=True)
        save(args.out, report, raw)


if __name__ == "__main__":
    main()
