"""Block copies on a GPU, against the same copies in plain numpy."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.cache_shapes import (
    SHAPES,
    Bytes,
    CacheShape,
    Ids,
    cache_shape,
    gathered,
    mixed_shape,
    random_bytes,
    random_pairs,
    scattered,
    slot_pitch,
)
from vllm_tiered_kv.errors import CudaError, NativeError
from vllm_tiered_kv.native import cuda

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

DEVICE = 0
SLEEP_CYCLES = 200_000_000  # about 0.1 s
MORE_SHAPES = (
    cache_shape("LBHNC", layers=28, blocks=40, heads=1, row=32_768),
    cache_shape("BLHNC", layers=28, blocks=20, heads=2, row=8192),
    cache_shape("LHBNC", layers=3, blocks=33, heads=4, row=2048, shuffle=4),
    cache_shape("LBHNC", layers=3, blocks=11, heads=1, row=20_008, shuffle=5),
    mixed_shape((65_536, 16_384, 16, 49_152), blocks=12, pads=(0, 16, 48, 4096)),
)


def ints(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


def on_device(data: Bytes) -> Any:
    """A copy in device memory. Complete on return: our streams do not wait for torch's."""
    tensor = torch.from_numpy(data.copy()).to(f"cuda:{DEVICE}")
    torch.cuda.synchronize(DEVICE)
    return tensor


def on_host(tensor: Any) -> Bytes:
    data: Bytes = tensor.cpu().numpy()
    return data


def layout_of(shape: CacheShape, memory: Any) -> cuda.CudaBlockLayout:
    return cuda.CudaBlockLayout(DEVICE, *shape.columns(memory.data_ptr()), shape.num_blocks)


@contextmanager
def pinned(data: Bytes) -> Iterator[Bytes]:
    """A copy of data in registered host memory."""
    room = mmap.mmap(-1, max(data.nbytes, 1))
    memory = np.frombuffer(room, dtype=np.uint8)[: data.nbytes]
    memory[:] = data
    cuda.host_register(memory.ctypes.data, memory.nbytes, DEVICE)
    try:
        yield memory
    finally:
        torch.cuda.synchronize(DEVICE)
        cuda.host_unregister(memory.ctypes.data, DEVICE)


@pytest.fixture
def stream() -> Iterator[cuda.Stream]:
    made = cuda.Stream(DEVICE)
    yield made
    made.close()


@pytest.mark.parametrize("ctas", [0, 3])
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES, ids=lambda shape: shape.name)
def test_staging_in_device_memory(shape: CacheShape, ctas: int, stream: cuda.Stream) -> None:
    num_slots = shape.num_blocks + 3
    for seed in range(2):
        memory = random_bytes(shape.nbytes, seed)
        slots = random_bytes(num_slots * slot_pitch(shape), seed + 1)
        memory_gpu, slots_gpu = on_device(memory), on_device(slots)
        layout = layout_of(shape, memory_gpu)
        assert layout.num_blocks == shape.num_blocks
        assert layout.num_runs == len(shape.lengths)
        assert layout.block_bytes == shape.block_bytes
        target = (slots_gpu.data_ptr(), slots_gpu.nbytes)

        ids, offsets = random_pairs(shape, num_slots, seed)
        cuda.gather(layout, ids, *target, offsets, stream.handle, ctas)
        stream.synchronize()
        slots = gathered(shape, memory, ids, slots, offsets)
        np.testing.assert_array_equal(on_host(slots_gpu), slots)
        np.testing.assert_array_equal(on_host(memory_gpu), memory)

        ids, offsets = random_pairs(shape, num_slots, seed + 2)
        cuda.scatter(layout, ids, *target, offsets, stream.handle, ctas)
        stream.synchronize()
        memory = scattered(shape, memory, ids, slots, offsets)
        np.testing.assert_array_equal(on_host(memory_gpu), memory)
        np.testing.assert_array_equal(on_host(slots_gpu), slots)


@pytest.mark.parametrize("ctas", [0, 1, 8])
@pytest.mark.parametrize("shape", SHAPES + MORE_SHAPES, ids=lambda shape: shape.name)
def test_directly_in_mapped_host_memory(shape: CacheShape, ctas: int, stream: cuda.Stream) -> None:
    num_slots = shape.num_blocks + 3
    memory = random_bytes(shape.nbytes, 1)
    memory_gpu = on_device(memory)
    layout = layout_of(shape, memory_gpu)
    with pinned(random_bytes(num_slots * slot_pitch(shape), 2)) as slots:
        target = (slots.ctypes.data, slots.nbytes)
        ids, offsets = random_pairs(shape, num_slots, 1)
        expected = gathered(shape, memory, ids, slots, offsets)
        cuda.gather(layout, ids, *target, offsets, stream.handle, ctas)
        stream.synchronize()
        np.testing.assert_array_equal(slots, expected)

        ids, offsets = random_pairs(shape, num_slots, 2)
        expected = scattered(shape, memory, ids, slots, offsets)
        before = slots.copy()
        cuda.scatter(layout, ids, *target, offsets, stream.handle, ctas)
        stream.synchronize()
        np.testing.assert_array_equal(on_host(memory_gpu), expected)
        np.testing.assert_array_equal(slots, before)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 2047, 2048, 2049, 2304, 2305, 5000])
def test_batches_around_what_one_launch_carries(count: int, stream: cuda.Stream) -> None:
    shape = cache_shape("LBHNC", layers=2, blocks=5000, heads=1, row=96)
    memory = random_bytes(shape.nbytes, count)
    slots = random_bytes(shape.num_blocks * slot_pitch(shape), 1)
    memory_gpu, slots_gpu = on_device(memory), on_device(slots)
    layout = layout_of(shape, memory_gpu)
    rng = np.random.default_rng(count)
    ids = rng.permutation(shape.num_blocks)[:count].astype(np.int64)
    offsets = rng.permutation(shape.num_blocks)[:count].astype(np.int64) * slot_pitch(shape)
    target = (slots_gpu.data_ptr(), slots_gpu.nbytes)
    cuda.gather(layout, ids, *target, offsets, stream.handle)
    stream.synchronize()
    slots = gathered(shape, memory, ids, slots, offsets)
    np.testing.assert_array_equal(on_host(slots_gpu), slots)
    backwards = ids[::-1].copy()
    cuda.scatter(layout, backwards, *target, offsets, stream.handle)
    stream.synchronize()
    memory = scattered(shape, memory, backwards, slots, offsets)
    np.testing.assert_array_equal(on_host(memory_gpu), memory)


def test_nothing_to_copy(stream: cuda.Stream) -> None:
    memory_gpu, slots_gpu = on_device(random_bytes(8192, 1)), on_device(random_bytes(64, 2))
    layout = layout_of(SHAPES[0], memory_gpu)
    cuda.gather(layout, ints(), slots_gpu.data_ptr(), 64, ints(), stream.handle)
    cuda.scatter(layout, ints(), slots_gpu.data_ptr(), 64, ints(), stream.handle)
    for copy in (cuda.copy_to_host, cuda.copy_to_device):
        copy(1, ints(), 1, ints(), 64, stream.handle)
    stream.synchronize()


@pytest.mark.parametrize(
    ("row", "pad", "start", "alignment"),
    [
        (64, 0, 256, 16),
        (8, 8, 256, 8),
        (64, 0, 264, 8),
        (64, 4, 256, 4),
        (4, 0, 256, 4),
        (6, 0, 256, 1),
        (64, 0, 257, 1),
        (64, 2, 256, 1),
    ],
)
@pytest.mark.parametrize("shift", [0, 8, 4, 1])
def test_vectors_as_wide_as_all_sides_allow(
    row: int, pad: int, start: int, alignment: int, shift: int, stream: cuda.Stream
) -> None:
    shape = cache_shape("LBHNC", layers=2, blocks=4, heads=1, row=row, pad=pad, start=start)
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(4 * slot_pitch(shape), 2)
    memory_gpu = on_device(memory)
    slots_gpu = on_device(np.concatenate([slots, slots]))
    layout = layout_of(shape, memory_gpu)
    assert layout.alignment == alignment
    ids, offsets = random_pairs(shape, 4, 3)
    # The target itself may be less aligned than the layout.
    target = slots_gpu[shift : shift + slots.nbytes]
    before = on_host(target).copy()
    cuda.gather(layout, ids, target.data_ptr(), target.nbytes, offsets, stream.handle)
    stream.synchronize()
    slots = gathered(shape, memory, ids, before, offsets)
    np.testing.assert_array_equal(on_host(target), slots)
    cuda.scatter(layout, ids[::-1].copy(), target.data_ptr(), target.nbytes, offsets, stream.handle)
    stream.synchronize()
    expected = scattered(shape, memory, ids[::-1], slots, offsets)
    np.testing.assert_array_equal(on_host(memory_gpu), expected)


@pytest.mark.parametrize("default_stream", [False, True])
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 65_536])
def test_ranges_to_host_and_back(nbytes: int, default_stream: bool, stream: cuda.Stream) -> None:
    count = 12
    # Some ranges continue their predecessor on both sides, some on one, most on none.
    src = ints(0, 1, 2, 9, 5, 6, 11, 3) * nbytes
    dst = ints(4, 5, 6, 0, 1, 9, 10, 11) * nbytes
    device_bytes = random_bytes(count * nbytes, 1)
    device_gpu = on_device(device_bytes)
    handle = 0 if default_stream else stream.handle

    def copied(source: Bytes, target: Bytes) -> Bytes:
        after = target.copy()
        for at, to in zip(src.tolist(), dst.tolist(), strict=True):
            after[to : to + nbytes] = source[at : at + nbytes]
        return after

    with pinned(random_bytes(count * nbytes, 2)) as host:
        expected = copied(device_bytes, host)
        cuda.copy_to_host(device_gpu.data_ptr(), src, host.ctypes.data, dst, nbytes, handle, DEVICE)
        torch.cuda.synchronize(DEVICE)
        np.testing.assert_array_equal(host, expected)
        expected = copied(host, device_bytes)
        cuda.copy_to_device(host.ctypes.data, src, device_gpu.data_ptr(), dst, nbytes, handle)
        torch.cuda.synchronize(DEVICE)
        np.testing.assert_array_equal(on_host(device_gpu), expected)


def test_gathered_blocks_are_scattered_back_unchanged(stream: cuda.Stream) -> None:
    shape = MORE_SHAPES[0]
    pitch, count = slot_pitch(shape), 16
    memory = random_bytes(shape.nbytes, 1)
    memory_gpu = on_device(memory)
    layout = layout_of(shape, memory_gpu)
    staging = cuda.DeviceBuffer(DEVICE, count * pitch)
    compute = torch.cuda.Stream(DEVICE)
    done = cuda.Event(DEVICE)
    ids = np.random.default_rng(1).permutation(shape.num_blocks)[:count].astype(np.int64)
    ring = np.arange(count, dtype=np.int64) * pitch
    offsets = np.random.default_rng(2).permutation(count + 4)[:count].astype(np.int64) * pitch
    with pinned(random_bytes((count + 4) * pitch, 2)) as slots:
        expected = gathered(shape, memory, ids, slots, offsets)
        gathered_event = cuda.Event(DEVICE)
        cuda.gather(layout, ids, staging.address, staging.nbytes, ring, compute.cuda_stream)
        gathered_event.record(compute.cuda_stream)
        # What was gathered is safe: the blocks may be overwritten while the DMA still runs.
        with torch.cuda.stream(compute):
            memory_gpu.zero_()
        stream.wait(gathered_event)
        cuda.copy_to_host(
            staging.address,
            ring,
            slots.ctypes.data,
            offsets,
            shape.block_bytes,
            stream.handle,
            DEVICE,
        )
        done.record(stream.handle)
        done.synchronize()
        assert done.query()
        np.testing.assert_array_equal(slots, expected)

        compute.synchronize()
        cuda.copy_to_device(
            slots.ctypes.data,
            offsets,
            staging.address,
            ring,
            shape.block_bytes,
            stream.handle,
            DEVICE,
        )
        cuda.scatter(layout, ids, staging.address, staging.nbytes, ring, stream.handle)
        stream.synchronize()
        expected = scattered(shape, np.zeros_like(memory), ids, slots, offsets)
        np.testing.assert_array_equal(on_host(memory_gpu), expected)
    staging.close()


def test_stream_waits_for_an_event_of_another(stream: cuda.Stream) -> None:
    shape = SHAPES[0]
    memory_gpu = on_device(np.zeros(shape.nbytes, dtype=np.uint8))
    slots_gpu = on_device(np.zeros(shape.num_blocks * slot_pitch(shape), dtype=np.uint8))
    layout = layout_of(shape, memory_gpu)
    ids = np.arange(shape.num_blocks, dtype=np.int64)
    offsets = ids * slot_pitch(shape)
    target = (slots_gpu.data_ptr(), slots_gpu.nbytes)
    cuda.gather(layout, ids, *target, offsets, stream.handle)  # loads the kernel
    stream.synchronize()
    compute, event, done = torch.cuda.Stream(DEVICE), cuda.Event(DEVICE), cuda.Event(DEVICE)
    assert event.query()
    with torch.cuda.stream(compute):
        memory_gpu.fill_(1)
        compute.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        memory_gpu.fill_(7)
    event.record(compute.cuda_stream)
    stream.wait(event)
    cuda.gather(layout, ids, *target, offsets, stream.handle)
    done.record(stream.handle)
    assert not event.query()
    assert not done.query()
    done.synchronize()
    assert event.query()
    for offset in offsets.tolist():
        assert (on_host(slots_gpu)[offset : offset + shape.block_bytes] == 7).all()


def test_ids_travel_by_value(stream: cuda.Stream) -> None:
    shape = SHAPES[0]
    memory = random_bytes(shape.nbytes, 1)
    slots = random_bytes(8 * slot_pitch(shape), 2)
    memory_gpu, slots_gpu = on_device(memory), on_device(slots)
    layout = layout_of(shape, memory_gpu)
    ids, offsets = ints(1, 4, 2), ints(5, 0, 3) * slot_pitch(shape)
    expected = gathered(shape, memory, ids, slots, offsets)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        torch.cuda._sleep(SLEEP_CYCLES)
    cuda.gather(layout, ids, slots_gpu.data_ptr(), slots_gpu.nbytes, offsets, stream.handle)
    ids[:] = 0
    offsets[:] = 0
    del ids, offsets, layout  # even the table of runs may go: freeing it waits
    gc.collect()
    stream.synchronize()
    np.testing.assert_array_equal(on_host(slots_gpu), expected)


def test_from_a_thread_that_never_chose_a_device() -> None:
    shape = SHAPES[0]
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(8 * slot_pitch(shape), 2)
    memory_gpu, slots_gpu = on_device(memory), on_device(slots)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            mine = cuda.Stream(DEVICE, low_priority=False)
            layout = layout_of(shape, memory_gpu)
            target = (slots_gpu.data_ptr(), slots_gpu.nbytes)
            cuda.gather(layout, ints(3), *target, ints(0), mine.handle)
            mine.synchronize()
            mine.close()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    expected = gathered(shape, memory, ints(3), slots, ints(0))
    np.testing.assert_array_equal(on_host(slots_gpu), expected)
    assert torch.cuda.current_device() == DEVICE


def test_torch_goes_on_after_our_errors(stream: cuda.Stream) -> None:
    room = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(CudaError, match=r"^cudaHostUnregister: "):
        cuda.host_unregister(room.ctypes.data, DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    with pytest.raises(
        CudaError, match=rf"^cudaMalloc: requested {4 * total} bytes, \d+ free on device {DEVICE}"
    ):
        cuda.DeviceBuffer(DEVICE, 4 * total)
    with pinned(room) as memory, pytest.raises(CudaError, match=r"^cudaHostRegister: "):
        cuda.host_register(memory.ctypes.data, memory.nbytes, DEVICE)
    assert int(torch.arange(10, device=f"cuda:{DEVICE}").sum()) == 45
    stream.synchronize()


def test_objects_close_once_and_then_refuse() -> None:
    stream, event = cuda.Stream(DEVICE), cuda.Event(DEVICE)
    buffer = cuda.DeviceBuffer(DEVICE, 1 << 20)
    assert buffer.nbytes == 1 << 20
    assert buffer.address % 256 == 0
    open_stream = cuda.Stream(DEVICE)
    for made in (stream, event, buffer):
        made.close()
        made.close()
    with pytest.raises(NativeError, match=r"^stream: is closed"):
        stream.synchronize()
    with pytest.raises(NativeError, match=r"^stream: is closed"):
        _ = stream.handle
    with pytest.raises(NativeError, match=r"^event: is closed"):
        event.record(open_stream.handle)
    with pytest.raises(NativeError, match=r"^event: is closed"):
        open_stream.wait(event)
    with pytest.raises(NativeError, match=r"^buffer: is closed"):
        _ = buffer.address
    open_stream.close()


@pytest.mark.parametrize("device", [-1, 1000])
def test_no_such_device(device: int) -> None:
    for make in (cuda.Stream, cuda.Event):
        with pytest.raises(NativeError, match=rf"^device: {device} is not in"):
            make(device)


@pytest.mark.parametrize("copy", [cuda.gather, cuda.scatter])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_ids": ints(0, 7)}, r"^slot_offsets: 1 entries for 2 block_ids"),
        ({"block_ids": ints(7)}, r"^block_ids\[0\]: 7 is not in \[0, 7\)"),
        ({"block_ids": ints(-1)}, r"^block_ids\[0\]: -1"),
        ({"block_ids": np.zeros(1, dtype=np.int32)}, r"^block_ids: dtype int32"),
        ({"slot_offsets": ints(32)}, r"^slot_offsets\[0\]: 32 is not a multiple of 64"),
        ({"slot_offsets": ints(1 << 20)}, r"^slot_offsets\[0\]: .* bytes of target"),
        ({"target_nbytes": 64}, r"^slot_offsets\[0\]: "),
        ({"target_nbytes": -1}, r"^target: negative"),
        ({"target_address": 0}, r"^target: address 0"),
        ({"ctas": -1}, r"^ctas: -1"),
    ],
)
def test_copy_refuses(copy: Any, changes: dict[str, Any], words: str, stream: cuda.Stream) -> None:
    shape = SHAPES[0]
    memory_gpu, slots_gpu = (
        on_device(random_bytes(shape.nbytes, 1)),
        on_device(random_bytes(1024, 2)),
    )
    arguments: dict[str, Any] = {
        "block_ids": ints(0),
        "target_address": slots_gpu.data_ptr(),
        "target_nbytes": slots_gpu.nbytes,
        "slot_offsets": ints(0),
        "stream_handle": stream.handle,
        "ctas": 0,
    }
    with pytest.raises(NativeError, match=words):
        copy(layout_of(shape, memory_gpu), **{**arguments, **changes})


def test_copy_refuses_collisions(stream: cuda.Stream) -> None:
    shape = SHAPES[0]
    memory_gpu, slots_gpu = (
        on_device(random_bytes(shape.nbytes, 1)),
        on_device(random_bytes(4096, 2)),
    )
    layout = layout_of(shape, memory_gpu)
    target = (slots_gpu.data_ptr(), slots_gpu.nbytes)
    with pytest.raises(NativeError, match=r"^slot_offsets: 0 and 64 overlap"):
        cuda.gather(layout, ints(0, 1), *target, ints(0, 64), stream.handle)
    with pytest.raises(NativeError, match=r"^block_ids: block 1 occurs twice"):
        cuda.scatter(layout, ints(1, 1), *target, ints(0, 1024), stream.handle)
    with pytest.raises(NativeError, match=r"^target: overlaps the memory of the layout"):
        cuda.gather(
            layout, ints(0), memory_gpu.data_ptr(), memory_gpu.nbytes, ints(0), stream.handle
        )


def test_layout_refuses_as_on_the_cpu() -> None:
    columns = list(SHAPES[0].columns(4096))
    columns[2] = columns[2] * 0
    with pytest.raises(NativeError, match=r"^run_bytes\[0\]: 0 is not positive"):
        cuda.CudaBlockLayout(DEVICE, *columns, 7)
    with pytest.raises(NativeError, match=r"^num_blocks: "):
        cuda.CudaBlockLayout(
            DEVICE, np.array([4096], dtype=np.uint64), ints(1), ints(1), ints(0), 2**32
        )


@pytest.mark.parametrize("copy", [cuda.copy_to_host, cuda.copy_to_device])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dst_offsets": ints(0)}, r"^dst_offsets: 1 entries for 2 src_offsets"),
        ({"src_offsets": ints(0, -1)}, r"^src_offsets\[1\]: -1 is negative"),
        ({"dst_offsets": ints(-64, 0)}, r"^dst_offsets\[0\]: -64 is negative"),
        ({"dst_offsets": ints(0, 63)}, r"^dst_offsets: 0 and 63 overlap"),
        ({"src_offsets": ints(0, 2**63 - 64)}, r"^src_offsets\[1\]: ends beyond"),
        ({"src_address": 0}, r"^src_address: "),
        ({"dst_address": -5}, r"^dst_address: "),
        ({"nbytes_each": 0}, r"^nbytes_each: 0"),
        ({"src_offsets": np.zeros(2)}, r"^src_offsets: dtype float64"),
    ],
)
def test_ranges_refuse(copy: Any, changes: dict[str, Any], words: str, stream: cuda.Stream) -> None:
    arguments: dict[str, Any] = {
        "src_address": 1 << 40,
        "src_offsets": ints(0, 64),
        "dst_address": 1 << 41,
        "dst_offsets": ints(0, 64),
        "nbytes_each": 64,
        "stream_handle": stream.handle,
    }
    with pytest.raises(NativeError, match=words):
        copy(**{**arguments, **changes})
