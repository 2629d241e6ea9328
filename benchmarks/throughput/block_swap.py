"""Swapping random blocks between layers and block-wise slots with our native copies.

On a GPU: a gather kernel into device memory, whole-block DMA from there, and the reverse. Without
one the same batches go from layers in host memory to slots in host memory.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from benchmarks.throughput.engines import Shape
from vllm_tiered_kv.core.layout import BlockRuns, StridedView, block_runs
from vllm_tiered_kv.native import cpu, cuda

Ids = NDArray[np.int64]
Copy = Callable[[Ids, Ids], None]
"""Queues or does the copy of blocks (first) and slots, given by their byte offsets (second)."""

_DEVICE = 0
_MARK = 0xA5


def measure(shape: Shape, batches: int, blocks: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds for all batches, after one round to warm up; wrong bytes are an error."""
    count = batches * blocks
    rng = np.random.default_rng(0)
    tasks = [
        (rng.permutation(count)[:blocks], rng.permutation(count)[:blocks] * shape.block_bytes)
        for _ in range(batches)
    ]
    opened = _on_cpu if cuda.why_unavailable() else _on_gpu
    times: dict[str, list[float]] = {"swap_out": [], "swap_in": []}
    with opened(shape, count, blocks) as (copies, wait, slots):

        def timed(name: str) -> float:
            begin = time.perf_counter()
            for block_ids, offsets in tasks:
                copies[name](block_ids, offsets)
            wait()
            return time.perf_counter() - begin

        filled = np.zeros(count, bool)
        filled[np.concatenate([offsets for _, offsets in tasks]) // shape.block_bytes] = True
        mark = _MARK
        for repetition in range(repetitions + 1):
            slots[:] = 0
            seconds = {"swap_out": timed("swap_out")}
            edges = slots.reshape(count, shape.block_bytes)[:, [0, -1]]
            assert ((edges == mark).all(axis=1) == filled).all(), "blocks did not arrive"
            mark ^= 0xFF  # what is swapped in now is looked for when it is swapped out again
            slots[:] = mark
            seconds["swap_in"] = timed("swap_in")
            if repetition:
                for name in times:
                    times[name].append(seconds[name])
    return times


def _layers(shape: Shape, address: int, count: int) -> BlockRuns:
    """Keys and values of each layer apart, block after block: the layout of the original tables."""
    plane = count * shape.page_bytes
    return block_runs(
        [
            StridedView(
                f"plane {n}",
                address + n * plane,
                (count, shape.page_bytes),
                (shape.page_bytes, 1),
                1,
            )
            for n in range(2 * shape.layers)
        ],
        count,
    )


@contextmanager
def _on_cpu(
    shape: Shape, count: int, blocks: int
) -> Iterator[tuple[dict[str, Copy], Callable[[], None], NDArray[np.uint8]]]:
    layers = np.full(count * shape.block_bytes, _MARK, np.uint8)
    slots = np.zeros_like(layers)
    runs = _layers(shape, layers.ctypes.data, count)
    layout = cpu.BlockLayout(*runs.arrays(), count)
    region = cpu.HostRegion(slots.ctypes.data, slots.nbytes)
    yield (
        {
            "swap_out": lambda ids, offsets: cpu.gather(layout, ids, region, offsets),
            "swap_in": lambda ids, offsets: cpu.scatter(layout, ids, region, offsets),
        },
        lambda: None,
        slots,
    )


@contextmanager
def _on_gpu(
    shape: Shape, count: int, blocks: int
) -> Iterator[tuple[dict[str, Copy], Callable[[], None], NDArray[np.uint8]]]:
    nbytes = count * shape.block_bytes
    dense = np.arange(blocks, dtype=np.int64) * shape.block_bytes
    with ExitStack() as stack:
        layers = cuda.DeviceBuffer(_DEVICE, nbytes)
        stack.callback(layers.close)
        staging = cuda.DeviceBuffer(_DEVICE, blocks * shape.block_bytes)
        stack.callback(staging.close)
        stream = cuda.Stream(_DEVICE)
        stack.callback(stream.close)
        slots = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # whole pages, as pinning wants them
        slots[:] = _MARK
        cuda.host_register(slots.ctypes.data, nbytes, _DEVICE)
        stack.callback(cuda.host_unregister, slots.ctypes.data, _DEVICE)
        layout = cuda.CudaBlockLayout(
            _DEVICE, *_layers(shape, layers.address, count).arrays(), count
        )
        each = np.arange(count, dtype=np.int64) * shape.block_bytes
        host = slots.ctypes.data
        cuda.copy_to_device(
            host, each, layers.address, each, shape.block_bytes, stream.handle, _DEVICE
        )
        stream.synchronize()

        def swap_out(ids: Ids, offsets: Ids) -> None:
            cuda.gather(layout, ids, staging.address, staging.nbytes, dense, stream.handle)
            cuda.copy_to_host(
                staging.address, dense, host, offsets, shape.block_bytes, stream.handle, _DEVICE
            )

        def swap_in(ids: Ids, offsets: Ids) -> None:
            cuda.copy_to_device(
                host, offsets, staging.address, dense, shape.block_bytes, stream.handle, _DEVICE
            )
            cuda.scatter(layout, ids, staging.address, staging.nbytes, dense, stream.handle)

        try:
            yield {"swap_out": swap_out, "swap_in": swap_in}, stream.synchronize, slots
        finally:
            with suppress(Exception):  # whatever failed before is what should be told
                stream.synchronize()
