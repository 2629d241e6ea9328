"""How long the copy of a sampled token waits behind blocks on their way to the host.

    python -m benchmarks.token_copy --out result.json       needs a GPU

vLLM copies each sampled token to the host before it can answer. Blocks that are stored meanwhile
share the bus with it. Here 640 blocks of the 7B shape (587 MB) are sent to pinned memory in several
ways, and a few bytes on a stream of their own, a moment later.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import describe_environment, save, spread
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.dma_lanes import DmaLanes
from vllm_tiered_kv.native import cuda as native

BLOCK_BYTES = 28 * 32 << 10
BLOCKS = 640
REPEATS = 20
_BEGUN_S = 0.002  # the blocks are under way by then, and for some time to come


def measure() -> dict[str, Any]:
    import torch

    staging = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.zeros(BLOCKS * BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    sources = np.arange(BLOCKS, dtype=np.int64) * BLOCK_BYTES
    targets = np.random.default_rng(0).permutation(BLOCKS).astype(np.int64) * BLOCK_BYTES
    stream, lanes = native.Stream(0), DmaLanes(0)

    def plainly(first: Int64Array, second: Int64Array, nbytes: int) -> None:
        native.copy_to_host(
            staging.data_ptr(), first, host.data_ptr(), second, nbytes, stream.handle, device=0
        )

    def singly() -> None:
        for number in range(BLOCKS):
            plainly(sources[number : number + 1], targets[number : number + 1], BLOCK_BYTES)

    def in_lanes() -> None:
        source, target = staging.data_ptr(), host.data_ptr()
        lanes.copy(native.copy_to_host, stream, source, sources, target, targets, BLOCK_BYTES, 0)

    whole = np.zeros(1, dtype=np.int64)
    ways: dict[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "one memcpy": lambda: plainly(whole, whole, staging.nbytes),
        "one batch": lambda: plainly(sources, targets, BLOCK_BYTES),
        "single copies": singly,
        "lanes, as stores are": in_lanes,
    }
    token = torch.zeros(64, dtype=torch.int32, device="cuda")
    answer = torch.zeros(64, dtype=torch.int32, pin_memory=True)
    token_stream = torch.cuda.Stream()
    found: dict[str, Any] = {}
    for name, enqueue in ways.items():
        waited, taken = [], []
        for repeat in range(REPEATS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            enqueue()
            time.sleep(_BEGUN_S)
            asked = time.perf_counter()
            with torch.cuda.stream(token_stream):
                answer.copy_(token, non_blocking=True)
                token_stream.synchronize()
            had = time.perf_counter()
            stream.synchronize()
            if repeat:  # the first finds out
                waited.append((had - asked) * 1e3)
                taken.append((time.perf_counter() - begin) * 1e3)
        found[name] = {"token_ms": spread(waited), "blocks_ms": spread(taken)}
    lanes.close()
    stream.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    report = {"environment": describe_environment(), "ways": measure()}
    save(args.out, report)
    print(json.dumps(report["ways"], indent=1))


if __name__ == "__main__":
    main()
