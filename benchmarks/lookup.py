"""What the scheduler pays: keys and lookup of a long prompt, and the index as it grows.

    python -m benchmarks.lookup --out result.json

Needs neither a GPU nor vLLM. Times are medians; `bytes_per_block` is what the process has grown by
while the index was filled. Each index is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save
from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group, loadable_tokens
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey, RankTag, root_digest
from vllm_tiered_kv.core.store import PutItem, PutResult, store_key
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.native.cpu import extend_keys
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.placement import Cluster

BLOCK_SIZE = 16
PROMPT_TOKENS = 100_000
CHAIN = 256  # blocks in each stored sequence
_REMOTE_BLOCK = 4096  # bytes; a lookup does not depend on it


def median_ms(work: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e3, 3)


def chain_of(number: int) -> list[BlockKey]:
    """Keys of one of many sequences that have nothing in common."""
    tokens = np.arange(number, number + CHAIN * BLOCK_SIZE)
    root = root_digest(number.to_bytes(32, "little"))
    keys, _ = extend_keys(root, tokens, 0, len(tokens), BLOCK_SIZE, None, b"\0")
    return [BlockKey(key) for key in keys]


def store(index: BlockIndex, chain: list[BlockKey]) -> None:
    plan = index.reserve_missing(chain, 0, len(chain), 0)
    assert not plan.dropped
    assert all(index.commit_all(plan.slots))


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_prompt() -> dict[str, float]:
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    root = root_digest(bytes(32))
    keys, _ = extend_keys(root, tokens, 0, PROMPT_TOKENS, BLOCK_SIZE, None, b"\0")
    chain = [BlockKey(key) for key in keys]
    index = BlockIndex(ArenaGeometry(64 * (len(chain) + 1), (64,)), "lru")
    store(index, chain)
    group = Group(0, BLOCK_SIZE, 64, 0)
    hash_ms = median_ms(
        lambda: extend_keys(root, tokens, 0, PROMPT_TOKENS, BLOCK_SIZE, None, b"\0")
    )
    lookup_ms = median_ms(
        lambda: loadable_tokens(index, [group], [chain], 0, PROMPT_TOKENS, BLOCK_SIZE)
    )
    return {
        "tokens": PROMPT_TOKENS,
        "keys_ms": hash_ms,
        "lookup_ms": lookup_ms,
        "together_ms": round(hash_ms + lookup_ms, 3),
        "touch_ms": median_ms(lambda: index.touch(chain)),
    }


def measure_remote() -> dict[str, float]:
    """A lookup of the same prompt in a daemon that holds it: what the scheduler's thread spends on
    it, and how long the answer takes."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
    keys, _ = extend_keys(root_digest(bytes(32)), tokens, 0, PROMPT_TOKENS, BLOCK_SIZE, None, b"\0")
    chain = [BlockKey(key) for key in keys]
    identity = EngineIdentity(bytes(32), (_REMOTE_BLOCK,), "benchmark", "benchmark")
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "256MiB") as daemon:
            cluster = Cluster([daemon.endpoint], identity)
            stored = [store_key(bytes(32), key, RankTag()) for key in chain]
            payload = memoryview(bytes(_REMOTE_BLOCK))
            results = cluster.stores[daemon.endpoint].put(
                [
                    PutItem(key, stored[n - 1] if n else None, payload)
                    for n, key in enumerate(stored)
                ]
            )
            assert set(results) == {PutResult.STORED}
            lookups = RemoteLookups(cluster, [RankTag()], 10.0, 0.0, Recorder())
            answers = []
            started = []
            for _ in range(15):
                begin = time.perf_counter()
                lookup = lookups.start([chain], [0])
                started.append(time.perf_counter() - begin)
                found = lookup.future.result().positions()
                answers.append(time.perf_counter() - begin)
                assert found == [range(len(chain))]
            lookups.close()
            cluster.close()
    return {
        "tokens": PROMPT_TOKENS,
        "scheduler_ms": round(statistics.median(started) * 1e3, 3),
        "answer_ms": round(statistics.median(answers) * 1e3, 3),
    }


def measure_index(blocks: int, eviction: str) -> dict[str, float]:
    chains = blocks // CHAIN
    before = resident_bytes()
    index = BlockIndex(ArenaGeometry(64 * blocks, (64,)), eviction)
    for number in range(chains):
        store(index, chain_of(number))
    held = resident_bytes() - before
    rng = random.Random(1)
    picked = [chain_of(rng.randrange(chains)) for _ in range(20)]
    lookups = median_ms(lambda: [index.match_prefix(chain) for chain in picked])
    fresh = (chain_of(number) for number in range(chains, 2 * chains))
    evicting = [[next(fresh) for _ in range(4)] for _ in range(7)]  # made before the clock runs
    turns = iter(evicting)

    def store_next() -> None:
        for chain in next(turns):
            store(index, chain)

    stores = median_ms(store_next, len(evicting))
    index.check()
    assert index.take_evicted()[0] == len(evicting) * 4 * CHAIN
    return {
        "blocks": blocks,
        "bytes_per_block": round(held / blocks),
        "lookup_us_per_block": round(lookups * 1e3 / (20 * CHAIN), 3),
        "store_with_eviction_us": round(stores * 1e3 / (4 * CHAIN), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[10_240, 102_400, 1_024_000, 10_240_000],
        help="sizes of the index",
    )
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": describe_environment(), "prompt": measure_prompt()}
    print(report["prompt"])
    report["remote"] = measure_remote()
    print("remote", report["remote"])
    report["index"] = {}
    for eviction in ("lru", "s3fifo"):
        rows = []
        for blocks in args.blocks:
            with ProcessPoolExecutor(1, get_context("spawn")) as child:
                rows.append(child.submit(measure_index, blocks, eviction).result())
        report["index"][eviction] = rows
        for row in rows:
            print(eviction, row)
    save(args.out, report)


if __name__ == "__main__":
    main()
