"""Opens and closes all that a worker pins and takes of a GPU, round after round, in one process.

    python -m tests.gpu.opened_and_closed DAEMON_ADDRESS ROUNDS [--keep-arenas]

Prints what the process and the machine hold after each round, as a line of JSON. Every other round
closes while memory is still being pinned. `--keep-arenas` forgets to close what was pinned.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

from tests.remote.engine import IDENTITY
from vllm_tiered_kv.config import CopyStrategy
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import StridedView, block_runs
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.cuda_copier import CudaCopier
from vllm_tiered_kv.native import cuda
from vllm_tiered_kv.remote.store import RemoteStore

ARENA_BYTES = 2 << 30
STAGING_BYTES = 64 << 20


def one_round(address: str, wait: bool) -> Arena:
    """The arena is still open; all else is closed."""
    pin = functools.partial(cuda.host_register, device=0)
    unpin = functools.partial(cuda.host_unregister, device=0)
    layers = [torch.zeros((64, 1 << 16), dtype=torch.uint8, device="cuda") for _ in range(8)]
    views = [
        StridedView(f"l{n}", layer.data_ptr(), tuple(layer.shape), layer.stride(), 1)
        for n, layer in enumerate(layers)
    ]
    runs = block_runs(views, 64)
    geometry = ArenaGeometry.for_blocks(ARENA_BYTES, [runs.block_bytes])
    arena = Arena(geometry.capacity_bytes, pin, unpin)
    stream = torch.cuda.current_stream().cuda_stream
    copier = CudaCopier(
        {0: runs}, geometry, arena, 0, lambda: stream, STAGING_BYTES, CopyStrategy.AUTO
    )
    store = RemoteStore(address, IDENTITY, timeout_s=20.0, connect_timeout_s=20.0)
    regions = SharedRegions({address: store}, pin, unpin)
    try:
        end = time.monotonic() + 60
        while wait and not (regions.of(address) and arena.ready_bytes == arena.nbytes):
            assert time.monotonic() < end, "memory was never pinned"
            time.sleep(0.01)
    finally:
        copier.close()
        regions.close()
        store.close()
    return arena


def held() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "available_bytes": int(memory["MemAvailable"].split()[0]) << 10,
        "device_free_bytes": torch.cuda.mem_get_info()[0],
        "file_descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def main() -> None:
    address, rounds = sys.argv[1], int(sys.argv[2])
    kept = []
    for number in range(rounds):
        arena = one_round(address, wait=number % 2 == 0)
        if "--keep-arenas" in sys.argv:
            kept.append(arena)
        else:
            arena.close()
        print(json.dumps(held()), flush=True)


if __name__ == "__main__":
    main()
