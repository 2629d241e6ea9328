"""KVCache beside its disk: tokens of 5 MiB that are updated and queried, through files and daemon.

    python -m benchmarks.token_cache --folder /mnt/nvme/scratch --out result.json

A token has 80 layers with 32 KiB of keys and as much of values, scattered over the memory of the
caller. Every call moves one prompt of `--prompt` tokens, `--callers` of them at a time. Updates are
counted until everything is on the disk. Queries read what the memory no longer has: before them the
daemon is restarted, and the files leave the page cache; the result says how much of them was there
still. The disk's own speed is that of fio, or of plain system calls where fio is not installed: as
many bytes, in transfers of one token, O_DIRECT, with 16 threads, and until everything is on the
disk. Disks change their speed, so all of them take turns in every round, and ratios are of the same
round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save, spread
from benchmarks.ssd_tier import FioKind, FioRun, aligned_buffers
from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.api import FileCacheConfig, KVCache, KVTensor, MemoryCacheConfig

LAYERS, TENSOR_BYTES = 80, 32 << 10
TOKEN_BYTES = LAYERS * 2 * TENSOR_BYTES
THREADS = 16  # of the disk's own speed
DAEMON_MEMORY = 4 << 30
MIB = 1 << 20

Actions = tuple[Callable[[], None], Callable[[], int], Callable[[], None]]
"""Stores everything; empties the memory and returns the bytes that stay; reads everything."""


class Caller:
    """A thread of the program, with memory for one prompt to store and one to read."""

    def __init__(self, number: int, length: int) -> None:
        rng = np.random.default_rng(number)
        shape = (length * LAYERS * 2, TENSOR_BYTES)
        self.source = rng.integers(256, size=shape, dtype=np.uint8)
        self.into = np.zeros(shape, np.uint8)
        order = rng.permutation(len(self.source)).reshape(length, LAYERS, 2)
        self.to_store, self.to_read = (
            [[(KVTensor.of(rows[k]), KVTensor.of(rows[v])) for k, v in layers] for layers in order]
            for rows in (self.source, self.into)
        )


class Prompts:
    """The prompts of a run. Each is stored and read by the same caller."""

    def __init__(self, count: int, length: int, callers: int) -> None:
        self._length = length
        self._callers = [Caller(number, length) for number in range(callers)]
        self._count = count // callers * callers
        self.nbytes = self._count * length * TOKEN_BYTES

    def update(self, cache: KVCache) -> None:
        self._share_out(lambda by, tokens: cache.update(None, tokens, by.to_store))
        if not cache.flush():
            raise RuntimeError("the flush failed")

    def query(self, cache: KVCache) -> None:
        self._share_out(lambda by, tokens: cache.query(tokens, by.to_read))

    def _share_out(self, work: Callable[[Caller, list[int]], int]) -> None:
        def of_caller(at: int) -> None:
            for number in range(at, self._count, len(self._callers)):
                tokens = list(range(number * self._length, (number + 1) * self._length))
                done = work(self._callers[at], tokens)
                if done != self._length:
                    raise RuntimeError(f"{done} of {self._length} tokens are there")

        with ThreadPoolExecutor(len(self._callers)) as pool:
            list(pool.map(of_caller, range(len(self._callers))))

    def check(self) -> None:
        for caller in self._callers:
            if not np.array_equal(caller.source, caller.into):
                raise RuntimeError("the last prompt was read with wrong bytes")
            caller.into[:] = 0


def mib_per_s(action: Callable[[], None], nbytes: int) -> float:
    begin = time.perf_counter()
    action()
    return nbytes / MIB / (time.perf_counter() - begin)


# ---- ways ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_files(folder: Path, prompts: Prompts, chunk: int) -> Iterator[Actions]:
    config = FileCacheConfig(root=folder / "files", namespace="benchmark", chunk_size=chunk)
    with KVCache(config, TENSOR_BYTES, layer=LAYERS) as cache:
        yield (
            lambda: prompts.update(cache),
            lambda: evict(folder / "files"),
            lambda: prompts.query(cache),
        )
    shutil.rmtree(folder / "files")


def evict(folder: Path) -> int:
    """Takes the files below the folder out of the page cache; returns the bytes that stay."""
    left = 0
    for path in folder.rglob("*.blk"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            left += _resident(fd)
        finally:
            os.close(fd)
    return left


def _resident(fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapped))
        if libc.mincore(address, length, ctypes.c_void_p(pages.ctypes.data)) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        del view
        return int((pages & 1).sum()) * mmap.PAGESIZE


@contextlib.contextmanager
def in_daemon(folder: Path, prompts: Prompts, chunk: int) -> Iterator[Actions]:
    space = prompts.nbytes * 5 // 4 + (1 << 30)
    disk = ("--ssd", str(folder / "ssd"), "--ssd-space", str(space))
    with (
        tempfile.TemporaryDirectory() as sockets,
        DaemonProcess(Path(sockets), "--memory", str(DAEMON_MEMORY), *disk) as daemon,
    ):
        wait_until_populated(daemon)
        config = MemoryCacheConfig(
            servers=daemon.ipc,
            namespace="benchmark",
            chunk_size=chunk,
            durability="disk",
            timeout=60,
            connect_timeout=30,
        )

        def update() -> None:
            with KVCache(config, TENSOR_BYTES, layer=LAYERS) as cache:
                prompts.update(cache)

        def query() -> None:
            with KVCache(config, TENSOR_BYTES, layer=LAYERS) as cache:
                prompts.query(cache)

        def restart() -> int:
            wait_until_populated(daemon.restart())
            return 0  # its disk is not read through the page cache

        yield update, restart, query
    shutil.rmtree(folder / "ssd")


def wait_until_populated(daemon: DaemonProcess) -> None:
    """A daemon takes its memory from the kernel in the background, which needs a core meanwhile."""
    end = time.monotonic() + 60
    while daemon.rss_bytes() < DAEMON_MEMORY and time.monotonic() < end:
        time.sleep(0.1)


WAYS = {"files": in_files, "daemon": in_daemon}


class PlainDisk:
    """Transfers of one token by plain system calls, for machines without fio."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._offsets = range(0, nbytes, TOKEN_BYTES)
        self._buffers = [aligned_buffers(TOKEN_BYTES, 1)[0] for _ in range(THREADS)]
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)

    def gb_per_s(self, action: str) -> float:
        fd = os.open(self._path, os.O_RDWR | os.O_DIRECT)
        begin = time.perf_counter()
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda first: self._transfer(fd, action, first), range(THREADS)))
            os.fsync(fd)
        finally:
            os.close(fd)
        return len(self._offsets) * TOKEN_BYTES / (time.perf_counter() - begin) / 1e9

    def _transfer(self, fd: int, action: str, first: int) -> None:
        buffer = self._buffers[first]
        for offset in self._offsets[first::THREADS]:
            if action == "read":
                done = os.preadv(fd, [buffer], offset)
            else:
                done = os.pwrite(fd, buffer, offset)
            if done != TOKEN_BYTES:
                raise RuntimeError(f"{done} bytes of {TOKEN_BYTES} were transferred")

    def close(self) -> None:
        self._path.unlink()


# ---- the run -------------------------------------------------------------------------------------


def measure(
    folder: Path, prompts: Prompts, ways: list[tuple[str, int]], has_fio: bool
) -> dict[str, Any]:
    """One round: MiB/s of each way and of the disk, by action."""
    nbytes = prompts.nbytes
    found: dict[str, Any] = {}
    kind = FioKind("psync", THREADS, 1)
    path = folder / "disk"
    disk = FioRun(path, nbytes, TOKEN_BYTES, kind, kind) if has_fio else PlainDisk(path, nbytes)
    try:
        found["disk"] = {
            action: disk.gb_per_s(how) * 1e9 / MIB
            for action, how in (("update", "write"), ("query", "read"))
        }
    finally:
        disk.close()
    for name, chunk in ways:
        with WAYS[name](folder, prompts, chunk) as (update, forget, query):
            speeds = {"update": mib_per_s(update, nbytes)}
            speeds["resident_share"] = forget() / nbytes
            speeds["query"] = mib_per_s(query, nbytes)
            prompts.check()
        found[f"{name}, chunks of {chunk}"] = speeds
        print(name, chunk, {key: round(value, 3) for key, value in speeds.items()}, flush=True)
    return found


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in rounds[0]:
        row: dict[str, Any] = {}
        for action in ("query", "update"):
            speeds = [one[name][action] for one in rounds]
            row[f"{action}_mib_per_s"] = spread(speeds)
            ratios = [one[name][action] / one["disk"][action] for one in rounds]
            row[f"{action}_of_disk"] = round(statistics.median(ratios), 3)
        if name != "disk":
            row["resident_share"] = round(max(one[name]["resident_share"] for one in rounds), 4)
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--tokens", type=int, default=2048, help="of 5 MiB, in all")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of one call")
    parser.add_argument("--callers", type=int, default=4, help="threads that call at a time")
    parser.add_argument("--chunks", default="1,16", help="tokens per file or block")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    has_fio = shutil.which("fio") is not None
    chunks = [int(chunk) for chunk in args.chunks.split(",")]
    ways = [(name, chunk) for name in args.ways.split(",") for chunk in chunks]
    prompts = Prompts(args.tokens // args.prompt, args.prompt, args.callers)
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "token_bytes": TOKEN_BYTES,
        "bytes": prompts.nbytes,
        "prompt_tokens": args.prompt,
        "callers": args.callers,
        "disk_by": "fio" if has_fio else "system calls",
        "load_average_before": os.getloadavg()[0],
    }
    rounds = []
    for number in range(args.repeats):
        turn = number % len(ways)
        rounds.append(measure(args.folder, prompts, ways[turn:] + ways[:turn], has_fio))
        ordered = ["disk", *(f"{name}, chunks of {chunk}" for name, chunk in ways)]
        rounds[-1] = {name: rounds[-1][name] for name in ordered}
        report["rows"] = summary(rounds)
        save(args.out, report, {"rounds": rounds})


if __name__ == "__main__":
    main()
