"""Bandwidth of moving blocks between a GPU and pinned slots (P1), and what it costs compute (P2).

    python -m benchmarks.block_copy --out result.json

For every shape, with random blocks and random slots of a real arena:

- `memcpy`: one large copy, the limit.
- layer-outermost layout (`layers`): `staged` (out: a kernel gathers a few blocks into one half of a
  small buffer while the other half is on the bus; in: the reverse), `direct` (a kernel on mapped
  memory), and `pages`: one DMA descriptor for every page of every layer, in one batch, as vLLM's
  OffloadingConnector copies.
- block-outermost layout (`blocks`): `dma` of whole blocks where they lie.

`interference` is how much longer matrix products take beside such copies
(`benchmarks/copy_interference.py`).

    python -m benchmarks.block_copy --only-shards --out result.json

measures blocks that `portable_shards` divides instead: a rank that holds several shards keeps them
one after the other in a slot, so its blocks are copied in smaller pieces. `in 4` is such a rank
with four shards, `in 1` one whose blocks are not divided; `apart` are shards in slots of their own,
as in the memory of a daemon. Layouts have vLLM's names: B blocks, L layers, H heads, N tokens,
C values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.copy_interference import InterferenceBench
from benchmarks.result_files import describe_environment, save
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.staging import STAGING_BYTES

SHAPES = {  # layers, KV heads; head size 128, 2 bytes, K and V
    "Qwen2.5-32B": (64, 8),
    "Qwen2.5-7B": (28, 4),
    "Qwen2.5-3B": (36, 2),
    "glm-4-9b": (40, 4),
    "Llama-3.1-8B": (32, 8),
}
BATCH_BYTES = 512 << 20
REPEATS = 9
PACE = 16  # a paced store has this part of a batch
PACE_GB_PER_S = 5  # twice what a prefill of 40,000 tokens a second makes of the 7B shape
PACE_CYCLES = 1.3 / PACE_GB_PER_S - 1.3 / 55  # of a pause, for each byte, at 1.3 GHz


class Bench:
    """Layers of one shape in both layouts, an arena of twice the batch, and every way to copy."""

    def __init__(self, layers: int, heads: int, block_size: int) -> None:
        import torch

        from vllm_tiered_kv.device.arena import Arena
        from vllm_tiered_kv.native import cuda

        self.torch, self.cuda = torch, cuda
        self.heads, self.block_size = heads, block_size
        self.layers, self.page = layers, block_size * heads * 128 * 2 * 2
        self.block = layers * self.page
        self.count = BATCH_BYTES // self.block
        self.total = self.count * self.block
        blocks = self.count * 2
        # One memory seen in both layouts: only where the bytes of a block lie differs.
        self.memory = torch.randint(
            0, 255, (blocks * self.block,), dtype=torch.uint8, device="cuda"
        )
        self.arena = Arena(blocks * self.block, cuda.host_register, cuda.host_unregister)
        while self.arena.ready_bytes < self.arena.nbytes:
            time.sleep(0.001)
        rng = np.random.default_rng(0)
        self.ids = rng.permutation(blocks)[: self.count].astype(np.int64)
        self.slots = rng.permutation(blocks)[: self.count].astype(np.int64) * self.block
        self.dense = np.arange(self.count, dtype=np.int64) * self.block
        self.dense_memory = torch.empty(self.total, dtype=torch.uint8, device="cuda")
        self.stream = cuda.Stream(0, low_priority=True)
        self.ways_in: dict[str, Any] = {}
        self.ways_out: dict[str, Any] = {}
        self._open_ways(blocks)

    def _open_ways(self, blocks: int) -> None:
        from vllm_tiered_kv.core.layout import StridedView, block_runs
        from vllm_tiered_kv.device.inbound import Direct, Staged, WholeBlocks
        from vllm_tiered_kv.device.outbound import open_outbound

        cuda, layers = self.cuda, self.layers
        base = self.memory.data_ptr()
        self.layouts, self.runs = {}, {}
        for name, layer_step, block_step in (
            ("layers", blocks * self.page, self.page),
            ("blocks", self.page, self.block),
        ):
            views = [
                StridedView(f"l{n}", base + n * layer_step, (blocks, self.page), (block_step, 1), 1)
                for n in range(layers)
            ]
            self.runs[name] = block_runs(views, blocks)
            self.layouts[name] = cuda.CudaBlockLayout(0, *self.runs[name].arrays(), blocks)
        self.ways_out = {
            f"{name} {way}": open_outbound(
                0, {0: self.runs[name]}, {0: self.layouts[name]}, STAGING_BYTES
            )
            for name, way in (("layers", "staged"), ("blocks", "dma"))
        }
        by_layer = {0: self.layouts["layers"]}
        staging = cuda.DeviceBuffer(0, STAGING_BYTES)
        sizes = {0: self.block}
        self.ways_in = {"layers direct": Direct(by_layer)}
        if Staged.fits(staging.nbytes, sizes):
            self.ways_in["layers staged"] = Staged(0, by_layer, sizes, staging)
        self.ways_in["blocks dma"] = WholeBlocks(0, {0: self.runs["blocks"]})
        pages = np.arange(layers, dtype=np.int64)[None, :]
        self.slot_pages = (self.slots[:, None] + pages * self.page).ravel()
        self.layer_pages = (pages * blocks * self.page + self.ids[:, None] * self.page).ravel()

    def inbound(self) -> dict[str, Callable[[], None]]:
        region = self.arena.region

        def take(way: Any) -> Callable[[], None]:
            blocks = PinnedBlocks(0, self.ids, region, self.slots)
            return lambda: way.enqueue(blocks, self.stream)

        return {
            **{name: take(way) for name, way in self.ways_in.items()},
            "layers pages": lambda: self._copy(
                self.cuda.copy_to_device,
                (region.address, self.slot_pages),
                (self.memory.data_ptr(), self.layer_pages),
                self.page,
            ),
            "memcpy": self._memcpy_in(),
        }

    def outbound(self) -> dict[str, Callable[[], None]]:
        region = self.arena.region
        blocks = PinnedBlocks(0, self.ids, region, self.slots)

        def take(way: Any) -> Callable[[], None]:
            return lambda: way.enqueue(blocks, self.stream)

        return {
            **{name: take(way) for name, way in self.ways_out.items()},
            "layers direct": lambda: self.cuda.gather(
                self.layouts["layers"],
                self.ids,
                region.address,
                region.nbytes,
                self.slots,
                self.stream.handle,
                ctas=8,
            ),
            "layers pages": lambda: self._copy(
                self.cuda.copy_to_host,
                (self.memory.data_ptr(), self.layer_pages),
                (region.address, self.slot_pages),
                self.page,
            ),
            "memcpy": self._memcpy_out(),
        }

    def _memcpy_in(self) -> Callable[[], None]:
        return lambda: self._copy(
            self.cuda.copy_to_device,
            (self.arena.region.address, self.dense),
            (self.dense_memory.data_ptr(), self.dense),
            self.block,
        )

    def _memcpy_out(self) -> Callable[[], None]:
        return lambda: self._copy(
            self.cuda.copy_to_host,
            (self.dense_memory.data_ptr(), self.dense),
            (self.arena.region.address, self.dense),
            self.block,
        )

    def paced(self) -> dict[str, Callable[[], None]]:
        """Stores with pauses between them, as an engine makes them that has to compute first."""

        count = self.count // PACE
        blocks = PinnedBlocks(0, self.ids[:count], self.arena.region, self.slots[:count])

        def run(way: Any) -> Callable[[], None]:
            def store() -> None:
                way.enqueue(blocks, self.stream)
                with self.torch.cuda.stream(self.torch.cuda.ExternalStream(self.stream.handle)):
                    self.torch.cuda._sleep(int(PACE_CYCLES * count * self.block))

            return store

        return {
            f"{name}, about {PACE_GB_PER_S} GB/s": run(way) for name, way in self.ways_out.items()
        }

    def rates(self, ways: dict[str, Callable[[], None]]) -> dict[str, float]:
        """GB/s of each; they take turns."""
        torch = self.torch
        stream = torch.cuda.ExternalStream(self.stream.handle)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, work in ways.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                work()
                end.record(stream)
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
        return {
            name: round(self.total / statistics.median(taken[1:]) / 1e6, 2)
            for name, taken in times.items()
        }

    def close(self) -> None:
        self.torch.cuda.synchronize()
        for way in (*self.ways_in.values(), *self.ways_out.values()):
            way.close()
        self.arena.close()

    def _copy(
        self, copy: Any, source: tuple[int, Any], target: tuple[int, Any], nbytes: int
    ) -> None:
        copy(
            *source,
            *target,
            nbytes,
            self.stream.handle,
            device=0,
            host_piece_bytes=self.arena.region.piece_bytes,
        )


def strided_views(
    layout: str, layers: int, heads: int, tokens: int, blocks: int, base: int
) -> list[Any]:
    """The layers of one memory in one of vLLM's layouts, 256 values of two bytes for each head and
    token."""
    from vllm_tiered_kv.core.layout import StridedView

    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": 256}
    strides, step = {}, 1
    for dimension in reversed(layout):
        strides[dimension] = step
        step *= sizes[dimension]
    return [
        StridedView(
            f"l{layer}",
            base + layer * strides["L"] * 2,
            tuple(sizes[dimension] for dimension in "BHNC"),
            tuple(strides[dimension] for dimension in "BHNC"),
            2,
        )
        for layer in range(layers)
    ]


class ShardBench(Bench):
    """Blocks that are divided into shards, and every way the connector copies them."""

    def _open_ways(self, blocks: int) -> None:
        from vllm_tiered_kv.core.layout import block_runs
        from vllm_tiered_kv.device.inbound import Direct, Staged, WholeBlocks
        from vllm_tiered_kv.device.outbound import open_outbound

        cuda = self.cuda
        self.apart: dict[str, tuple[Any, int]] = {}
        for layout in ("BLHNC", "LBNHC"):
            views = strided_views(
                layout, self.layers, self.heads, self.block_size, blocks, self.memory.data_ptr()
            )
            for shards in (n for n in (1, 2, 4, 8) if self.heads % n == 0):
                divided = [[view.shard(n, shards) for view in views] for n in range(shards)]
                whole = {0: block_runs([view for part in divided for view in part], blocks)}
                tables = {0: cuda.CudaBlockLayout(0, *whole[0].arrays(), blocks)}
                name = f"{layout} in {shards}"
                self.ways_in[f"{name} direct"] = Direct(tables)
                if WholeBlocks.fits(whole):
                    self.ways_in[f"{name} dma"] = WholeBlocks(0, whole)
                else:
                    self.ways_in[f"{name} staged"] = Staged(
                        0, tables, {0: self.block}, cuda.DeviceBuffer(0, STAGING_BYTES)
                    )
                self.ways_out[f"{name} out"] = open_outbound(0, whole, tables, STAGING_BYTES)
                if shards > 1:
                    parts = {n: block_runs(part, blocks) for n, part in enumerate(divided)}
                    of_parts = {
                        n: cuda.CudaBlockLayout(0, *part.arrays(), blocks)
                        for n, part in parts.items()
                    }
                    lengths = {n: part.block_bytes for n, part in parts.items()}
                    staging = cuda.DeviceBuffer(0, STAGING_BYTES)
                    staged = Staged(0, of_parts, lengths, staging)
                    self.ways_in[f"{name} apart staged"] = staged
                    self.apart[f"{name} apart staged"] = (staged, shards)

    def inbound(self) -> dict[str, Callable[[], None]]:
        region = self.arena.region
        whole = [PinnedBlocks(0, self.ids, region, self.slots)]

        def take(way: Any, parts: list[PinnedBlocks]) -> Callable[[], None]:
            def work() -> None:
                for part in parts:
                    way.enqueue(part, self.stream)

            return work

        ways = {}
        for name, way in self.ways_in.items():
            parts = whole
            if name in self.apart:
                count = self.apart[name][1]
                step = self.block // count
                parts = [
                    PinnedBlocks(n, self.ids, region, self.slots + n * step) for n in range(count)
                ]
            ways[name] = take(way, parts)
        return {**ways, "memcpy": self._memcpy_in()}

    def outbound(self) -> dict[str, Callable[[], None]]:
        blocks = PinnedBlocks(0, self.ids, self.arena.region, self.slots)

        def take(way: Any) -> Callable[[], None]:
            return lambda: way.enqueue(blocks, self.stream)

        ways = {name: take(way) for name, way in self.ways_out.items()}
        return {**ways, "memcpy": self._memcpy_out()}


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """The goals of P1: the way the connector takes, of one large copy and of page-wise DMA."""
    told: dict[str, float] = {}
    for way, layout in (("in", "layers"), ("in", "blocks"), ("out", "layers"), ("out", "blocks")):
        rates = result[way]
        ours = max(
            rate
            for name, rate in rates.items()
            if name.startswith(layout) and name != "layers pages"
        )
        told[f"{layout} {way} of memcpy"] = round(ours / rates["memcpy"], 3)
        told[f"{layout} {way} of pages"] = round(ours / rates["layers pages"], 2)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument(
        "--interference-shape",
        default="Qwen2.5-7B/16",
        help="shape whose copies run beside matrix products",
    )
    parser.add_argument("--only-interference", action="store_true", help="leave out other shapes")
    parser.add_argument(
        "--only-shards", action="store_true", help="measure blocks divided into shards, only"
    )
    args = parser.parse_args()
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "unit": "GB/s",
        "batch_bytes": BATCH_BYTES,
        "shapes": {},
    }
    if args.only_shards:
        for name, (layers, heads) in SHAPES.items():
            shards = ShardBench(layers, heads, 16)
            report["shapes"][f"{name}/16"] = {
                "block_bytes": shards.block,
                "in": shards.rates(shards.inbound()),
                "out": shards.rates(shards.outbound()),
            }
            shards.close()
            print(f"{name}/16", json.dumps(report["shapes"][f"{name}/16"]), flush=True)
            save(args.out, report)
        return
    for block_size in (16, 64):
        for name, (layers, heads) in SHAPES.items():
            if args.only_interference and f"{name}/{block_size}" != args.interference_shape:
                continue
            bench = Bench(layers, heads, block_size)
            result: dict[str, Any] = {
                "block_bytes": bench.block,
                "blocks": bench.count,
                "in": bench.rates(bench.inbound()),
                "out": bench.rates(bench.outbound()),
            }
            result["ratios"] = ratios(result)
            report["shapes"][f"{name}/{block_size}"] = result
            if f"{name}/{block_size}" == args.interference_shape:
                ways = {f"in: {n}": w for n, w in bench.inbound().items()}
                ways |= {f"out: {n}": w for n, w in bench.outbound().items()}
                ways |= {f"out: {n}": w for n, w in bench.paced().items()}
                report["interference"] = InterferenceBench(bench.stream.handle).measure(ways)
                print("interference", json.dumps(report["interference"]), flush=True)
            bench.close()
            print(f"{name}/{block_size}", json.dumps(result), flush=True)
            save(args.out, report)


if __name__ == "__main__":
    main()
