"""Bandwidth of moving blocks between a GPU's layers and pinned slots, against one large memcpy.

    python -m benchmarks.block_copy --out result.json

For every shape: random blocks and random slots; `staged` is gather into device memory followed by
whole-block DMA (and the reverse), `direct N` a kernel of N thread blocks on mapped pinned memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment

SHAPES = {  # layers, KV heads; head size 128, 2 bytes, K and V
    "Qwen2.5-32B": (64, 8),
    "Qwen2.5-7B": (28, 4),
    "Qwen2.5-3B": (36, 2),
    "glm-4-9b": (40, 4),
    "Llama-3.1-8B": (32, 8),
}
CTAS = (4, 8, 16, 32, 64)
BATCH_BYTES = 512 << 20
REPEATS = 7


def measure(layers: int, heads: int, block_size: int) -> dict[str, Any]:
    import torch

    from vllm_tiered_kv.core.layout import StridedView, block_runs
    from vllm_tiered_kv.native import cuda

    page = block_size * heads * 128 * 2 * 2
    block = layers * page
    count = BATCH_BYTES // block
    blocks = count * 2
    memory = torch.randint(0, 255, (layers, blocks, page), dtype=torch.uint8, device="cuda")
    views = [
        StridedView(f"l{i}", memory[i].data_ptr(), (blocks, page), (page, 1), 1)
        for i in range(layers)
    ]
    runs = block_runs(views, blocks)
    layout = cuda.CudaBlockLayout(0, *runs.arrays(), blocks)
    arena = torch.empty(count * 2 * block, dtype=torch.uint8, pin_memory=True)
    staging = torch.empty(count * block, dtype=torch.uint8, device="cuda")
    rng = np.random.default_rng(0)
    ids = rng.permutation(blocks)[:count].astype(np.int64)
    slots = rng.permutation(count * 2)[:count].astype(np.int64) * block
    dense = np.arange(count, dtype=np.int64) * block
    stream = torch.cuda.Stream()
    handle = int(stream.cuda_stream)
    total = count * block

    def rate(work: Any) -> float:
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            work()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return round(total / statistics.median(times[1:]) / 1e6, 2)

    def memcpy(out: bool) -> None:
        with torch.cuda.stream(stream):
            if out:
                arena[:total].copy_(staging, non_blocking=True)
            else:
                staging.copy_(arena[:total], non_blocking=True)

    def staged_out() -> None:
        cuda.gather(layout, ids, staging.data_ptr(), total, dense, handle)
        cuda.copy_to_host(staging.data_ptr(), dense, arena.data_ptr(), slots, block, handle)

    def staged_in() -> None:
        cuda.copy_to_device(arena.data_ptr(), slots, staging.data_ptr(), dense, block, handle)
        cuda.scatter(layout, ids, staging.data_ptr(), total, dense, handle)

    def direct(copy: Any, ctas: int) -> float:
        return rate(
            lambda: copy(layout, ids, arena.data_ptr(), arena.numel(), slots, handle, ctas=ctas)
        )

    result: dict[str, Any] = {
        "block_bytes": block,
        "blocks": count,
        "memcpy": {"d2h": rate(lambda: memcpy(True)), "h2d": rate(lambda: memcpy(False))},
        "gather_on_device": rate(
            lambda: cuda.gather(layout, ids, staging.data_ptr(), total, dense, handle)
        ),
        "staged": {"d2h": rate(staged_out), "h2d": rate(staged_in)},
    }
    for ctas in CTAS:
        result[f"direct {ctas}"] = {
            "d2h": direct(cuda.gather, ctas),
            "h2d": direct(cuda.scatter, ctas),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment.describe(), "unit": "GB/s", "shapes": {}}
    for block_size in (16, 64):
        for name, (layers, heads) in SHAPES.items():
            result = measure(layers, heads, block_size)
            report["shapes"][f"{name}/{block_size}"] = result
            limit = result["memcpy"]
            best_h2d = max(
                v["h2d"] for k, v in result.items() if k == "staged" or k.startswith("direct")
            )
            print(
                f"{name:14} {block_size:3}  memcpy {limit['d2h']:5.1f} {limit['h2d']:5.1f}  "
                f"staged {result['staged']['d2h']:5.1f} {result['staged']['h2d']:5.1f}  "
                + "  ".join(
                    f"d{c} {result[f'direct {c}']['d2h']:4.1f} {result[f'direct {c}']['h2d']:4.1f}"
                    for c in CTAS
                )
                + f"  best in/limit {best_h2d / limit['h2d']:.2f}",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
