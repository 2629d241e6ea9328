"""Block copies in host memory, compared with the same copies in numpy."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cache_shapes import (
    SHAPES,
    Bytes,
    CacheShape,
    cache_shape,
    gathered,
    mixed_shape,
    random_bytes,
    random_pairs,
    scattered,
    slot_pitch,
)
from tests.patience import examples
from vllm_tiered_kv.errors import NativeError, TieredKVError
from vllm_tiered_kv.native.cpu import BlockLayout, HostRegion, gather, scatter


def layout_of(shape: CacheShape, memory: Bytes) -> BlockLayout:
    return BlockLayout(*shape.columns(memory.ctypes.data), shape.num_blocks)


def region_of(slots: Bytes) -> HostRegion:
    return HostRegion(slots.ctypes.data, slots.nbytes)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def check_both_ways(shape: CacheShape, seed: int, threads: int) -> None:
    """Gathers and scatters, and compares all bytes of both memories."""
    num_slots = shape.num_blocks + 3
    memory = random_bytes(shape.nbytes, seed)
    slots = random_bytes(num_slots * slot_pitch(shape), seed + 1)
    layout = layout_of(shape, memory)
    assert layout.num_blocks == shape.num_blocks
    assert layout.num_runs == len(shape.lengths)
    assert layout.block_bytes == shape.block_bytes

    block_ids, slot_offsets = random_pairs(shape, num_slots, seed)
    memory_before = memory.copy()
    expected = gathered(shape, memory, block_ids, slots, slot_offsets)
    gather(layout, block_ids, region_of(slots), slot_offsets, threads)
    np.testing.assert_array_equal(slots, expected)
    np.testing.assert_array_equal(memory, memory_before)

    block_ids, slot_offsets = random_pairs(shape, num_slots, seed + 2)
    slots_before = slots.copy()
    expected = scattered(shape, memory, block_ids, slots, slot_offsets)
    scatter(layout, block_ids, region_of(slots), slot_offsets, threads)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(slots, slots_before)


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_gather_scatter_match_numpy(shape: CacheShape, threads: int) -> None:
    for seed in range(3):
        check_both_ways(shape, seed, threads)


@examples(60)
@given(
    layout=st.sampled_from(["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "HLBNC"]),
    layers=st.integers(1, 4),
    blocks=st.integers(1, 9),
    heads=st.integers(1, 3),
    row=st.sampled_from([1, 2, 3, 8, 16, 17, 40, 64, 130]),
    itemsize=st.sampled_from([1, 2, 4]),
    pad=st.sampled_from([0, 1, 16, 24]),
    shuffle=st.none() | st.integers(0, 9),
    start=st.integers(1, 64),
    seed=st.integers(0, 2**16),
)
def test_gather_scatter_match_numpy_for_any_layout(
    layout: str,
    layers: int,
    blocks: int,
    heads: int,
    row: int,
    itemsize: int,
    pad: int,
    shuffle: int | None,
    start: int,
    seed: int,
) -> None:
    shape = cache_shape(layout, layers, blocks, heads, row * itemsize, pad, shuffle, start)
    check_both_ways(shape, seed, threads=2)


@pytest.mark.parametrize("threads", [0, 2, 5])
@pytest.mark.parametrize(
    "shape",
    [
        cache_shape("LBHNC", layers=28, blocks=40, heads=1, row=4096),
        cache_shape("BLHNC", layers=1, blocks=4, heads=1, row=1_000_001),
        mixed_shape((300_000, 7, 65_536, 500_001), blocks=6, pads=(0, 1, 0, 3)),
    ],
    ids=lambda shape: shape.name,
)
def test_gather_scatter_large_batches_use_helpers(shape: CacheShape, threads: int) -> None:
    check_both_ways(shape, seed=threads, threads=threads)


def test_gather_scatter_round_trip() -> None:
    shape = SHAPES[0]
    memory = random_bytes(shape.nbytes, 1)
    slots = np.zeros(shape.num_blocks * slot_pitch(shape), dtype=np.uint8)
    layout = layout_of(shape, memory)
    ids = np.arange(shape.num_blocks, dtype=np.int64)
    offsets = ids[::-1].copy() * slot_pitch(shape)
    gather(layout, ids, region_of(slots), offsets)
    other = np.zeros_like(memory)
    scatter(layout_of(shape, other), ids, region_of(slots), offsets)
    again = np.zeros_like(slots)
    gather(layout_of(shape, other), ids, region_of(again), offsets)
    np.testing.assert_array_equal(slots, again)


def test_gather_scatter_empty_batch_copies_nothing() -> None:
    shape = SHAPES[0]
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(64, 2)
    for copy in (gather, scatter):
        copy(layout_of(shape, memory), ints(), region_of(slots), ints())


def test_gather_scatter_repeated_sources_are_allowed() -> None:
    shape = SHAPES[0]
    memory = random_bytes(shape.nbytes, 1)
    slots = random_bytes(4 * slot_pitch(shape), 2)
    layout, pitch = layout_of(shape, memory), slot_pitch(shape)
    expected = gathered(shape, memory, ints(2, 2), slots, ints(0, pitch))
    gather(layout, ints(2, 2), region_of(slots), ints(0, pitch))
    np.testing.assert_array_equal(slots, expected)
    expected = scattered(shape, memory, ints(1, 3), slots, ints(pitch, pitch))
    scatter(layout, ints(1, 3), region_of(slots), ints(pitch, pitch))
    np.testing.assert_array_equal(memory, expected)


def test_gather_strided_id_arrays_are_supported() -> None:
    shape = SHAPES[0]
    memory = random_bytes(shape.nbytes, 1)
    slots = random_bytes(4 * slot_pitch(shape), 2)
    ids = np.arange(shape.num_blocks, dtype=np.int64)[::3]
    offsets = (np.arange(2 * len(ids), dtype=np.int64) // 2 * slot_pitch(shape))[::2]
    expected = gathered(shape, memory, ids, slots, offsets)
    gather(layout_of(shape, memory), ids, region_of(slots), offsets)
    np.testing.assert_array_equal(slots, expected)


def test_gather_scatter_from_several_threads() -> None:
    shape = cache_shape("LBHNC", layers=8, blocks=24, heads=1, row=16_384)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(4):
                check_both_ways(shape, seed=100 * seed + turn, threads=1 + seed % 4)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_helpers_work_after_fork() -> None:
    shape = cache_shape("LBHNC", layers=4, blocks=20, heads=1, row=65_536)
    check_both_ways(shape, seed=1, threads=4)
    child = os.fork()
    if child == 0:
        try:
            check_both_ways(shape, seed=2, threads=4)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    check_both_ways(shape, seed=3, threads=4)


# Invalid layouts. The base case has two interleaved runs of 16 bytes in blocks of 32.

BASE = {
    "addresses": np.array([4096, 4112], dtype=np.uint64),
    "block_strides": ints(32, 32),
    "run_bytes": ints(16, 16),
    "slot_offsets": ints(0, 16),
    "num_blocks": 4,
}


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("addresses", np.array([], dtype=np.uint64), "at least one run"),
        ("addresses", np.array([0, 4112], dtype=np.uint64), "null"),
        ("addresses", np.array([4096, 2**63], dtype=np.uint64), "address space"),
        ("addresses", np.array([4096, 2**63 - 64], dtype=np.uint64), "address space"),
        ("addresses", np.array([4096, 4111], dtype=np.uint64), "overlap"),
        ("addresses", np.array([4096, 4113], dtype=np.uint64), "overlap"),
        ("addresses", np.array([4096, 4112 + 33], dtype=np.uint64), "overlap"),
        ("addresses", ints(4096, 4112), "dtype int64, expected uint64"),
        ("addresses", [4096, 4112], "not a numpy array"),
        ("addresses", np.array([[4096, 4112]], dtype=np.uint64), "2 dimensions"),
        ("block_strides", ints(32), "1 entries for 2"),
        ("block_strides", ints(32, 15), "less than the run's 16 bytes"),
        ("block_strides", ints(32, 0), "not positive"),
        ("block_strides", ints(-32, 32), "not positive"),
        ("block_strides", np.array([32.0, 32.0]), "dtype float64"),
        ("run_bytes", ints(16, 16, 16), "3 entries for 2"),
        ("run_bytes", ints(16, 0), "not positive"),
        ("run_bytes", ints(16, -16), "not positive"),
        ("run_bytes", np.array([16, 16], dtype=np.int32), "dtype int32"),
        ("slot_offsets", ints(), "0 entries for 2"),
        ("slot_offsets", ints(0, 17), "gap"),
        ("slot_offsets", ints(0, 15), "overlaps"),
        ("slot_offsets", ints(0, 0), "overlaps"),
        ("slot_offsets", ints(16, 32), "gap"),
        ("slot_offsets", ints(-16, 0), "overlaps"),
        ("num_blocks", 0, "less than 1"),
        ("num_blocks", -1, "less than 1"),
    ],
)
def test_layout_invalid_arguments_are_refused(argument: str, value: object, words: str) -> None:
    arguments: dict[str, Any] = {**BASE, argument: value}
    with pytest.raises(NativeError, match=rf"^{argument}.*{words}") as caught:
        BlockLayout(**arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TieredKVError)


def test_layout_sums_out_of_range_are_refused() -> None:
    huge = 2**62
    with pytest.raises(NativeError, match=r"^(run_bytes|addresses)"):
        BlockLayout(
            np.array([1, huge + 1], dtype=np.uint64),
            ints(huge, huge),
            ints(huge, huge),
            ints(0, huge),
            1,
        )


def test_layout_single_block_ignores_strides() -> None:
    BlockLayout(np.array([64, 128], dtype=np.uint64), ints(1, 1), ints(64, 64), ints(0, 64), 1)


def collides(starts: list[int], strides: list[int], lengths: list[int], blocks: int) -> bool:
    images = [
        range(start + block * stride, start + block * stride + length)
        for start, stride, length in zip(starts, strides, lengths, strict=True)
        for block in range(blocks)
    ]
    return any(a.start < b.stop and b.start < a.stop for a, b in itertools.combinations(images, 2))


@examples(400)
@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_layout_overlap_detection_is_exact(
    data: st.DataObject, blocks: int, count: int, one_stride: bool
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    spare = st.integers(0, 20)
    if one_stride:
        strides = [max(lengths) + data.draw(spare)] * count
    else:
        strides = [length + data.draw(spare) for length in lengths]
    starts = data.draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    slot_offsets = ints(*itertools.accumulate(lengths[:-1], initial=0))

    def build() -> None:
        addresses = np.array(starts, dtype=np.uint64)
        BlockLayout(addresses, ints(*strides), ints(*lengths), slot_offsets, blocks)

    if collides(starts, strides, lengths, blocks):
        with pytest.raises(NativeError, match=r"^addresses: runs \d and \d overlap$"):
            build()
    else:
        build()


def test_layout_many_runs_are_checked_quickly() -> None:
    count = 20_000
    ids = np.arange(count, dtype=np.int64)
    addresses = (4096 + ids * 64).astype(np.uint64)
    every = np.full(count, 64, dtype=np.int64)
    layout = BlockLayout(addresses, every * count, every, ids * 64, 1000)
    assert layout.num_runs == count


# Invalid copies. The base case has four blocks of 32 bytes and four slots of 64.


@pytest.mark.parametrize("copy", [gather, scatter])
@pytest.mark.parametrize(
    ("block_ids", "slot_offsets", "words"),
    [
        (ints(0, 1), ints(0), r"^slot_offsets: 1 entries for 2 block_ids"),
        (ints(0), ints(0, 64), r"^slot_offsets: 2 entries for 1 block_ids"),
        (ints(0, 4), ints(0, 64), r"^block_ids\[1\]: 4 is not in \[0, 4\)"),
        (ints(-1), ints(0), r"^block_ids\[0\]: -1"),
        (ints(0), ints(32), r"^slot_offsets\[0\]: 32 is not a multiple of 64"),
        (ints(0), ints(-64), r"^slot_offsets\[0\]: -64"),
        (ints(0), ints(256), r"^slot_offsets\[0\]: .* ends beyond the 256 bytes of region"),
        (ints(0), ints(2**62), r"^slot_offsets\[0\]: .* ends beyond"),
        (np.array([0], dtype=np.int32), ints(0), r"^block_ids: dtype int32"),
        (ints(0), np.array([0.0]), r"^slot_offsets: dtype float64"),
        ([0], ints(0), r"^block_ids: not a numpy array"),
        (ints(0).reshape(1, 1), ints(0), r"^block_ids: 2 dimensions"),
    ],
)
def test_copy_invalid_batch_is_refused(
    copy: Any, block_ids: Any, slot_offsets: Any, words: str
) -> None:
    memory, slots = random_bytes(4 * 32, 1), random_bytes(4 * 64, 2)
    before = memory.copy(), slots.copy()
    layout = BlockLayout(
        np.array([memory.ctypes.data], dtype=np.uint64), ints(32), ints(32), ints(0), 4
    )
    with pytest.raises(NativeError, match=words):
        copy(layout, block_ids, region_of(slots), slot_offsets)
    np.testing.assert_array_equal(memory, before[0])
    np.testing.assert_array_equal(slots, before[1])


def test_gather_overlapping_slots_are_refused() -> None:
    shape = cache_shape("LBHNC", layers=1, blocks=4, heads=1, row=96)
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(1024, 2)
    layout = layout_of(shape, memory)
    for offsets in (ints(0, 64), ints(64, 0), ints(128, 128)):
        with pytest.raises(NativeError, match=r"^slot_offsets: \d+ and \d+ overlap"):
            gather(layout, ints(0, 1), region_of(slots), offsets)
    gather(layout, ints(0, 1), region_of(slots), ints(128, 0))


def test_scatter_repeated_block_is_refused() -> None:
    shape = SHAPES[0]
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(8 * slot_pitch(shape), 2)
    with pytest.raises(NativeError, match=r"^block_ids: block 5 occurs twice"):
        scatter(
            layout_of(shape, memory),
            ints(5, 1, 5),
            region_of(slots),
            np.arange(3) * slot_pitch(shape),
        )
    # Too many blocks for the bitmap of the check; no memory of the layout is accessed.
    vast = BlockLayout(np.array([2**40], dtype=np.uint64), ints(64), ints(64), ints(0), 2**30)
    with pytest.raises(NativeError, match=r"^block_ids: block 7 occurs twice"):
        scatter(vast, ints(7, 2**29, 7), region_of(slots), ints(0, 64, 128))


@pytest.mark.parametrize("copy", [gather, scatter])
def test_copy_invalid_region_is_refused(copy: Any) -> None:
    memory = random_bytes(4096, 1)
    address = memory.ctypes.data
    layout = BlockLayout(
        np.array([address + 1024, address + 2048], dtype=np.uint64),
        ints(64, 64),
        ints(64, 64),
        ints(0, 64),
        4,
    )
    one = (ints(0), ints(0))
    for start, nbytes in ((896, 129), (1024, 128), (1279, 128), (0, 4096), (2100, 128)):
        region = HostRegion(address + start, nbytes)
        with pytest.raises(NativeError, match=r"^region: overlaps the memory of the layout"):
            copy(layout, one[0], region, one[1])
    for start in (896, 1280, 2304):  # right before, between and right after
        copy(layout, one[0], HostRegion(address + start, 128), one[1])
    with pytest.raises(NativeError, match=r"^region: negative"):
        copy(layout, one[0], HostRegion(address, -1), one[1])
    with pytest.raises(NativeError, match=r"^region: address 0"):
        copy(layout, one[0], HostRegion(0, 128), one[1])
    with pytest.raises(NativeError, match=r"^region: ends beyond"):
        copy(layout, one[0], HostRegion(address, 2**63 - 1), one[1])


@pytest.mark.parametrize("threads", [-1, 257])
def test_copy_invalid_thread_count_is_refused(threads: int) -> None:
    shape = SHAPES[0]
    memory, slots = random_bytes(shape.nbytes, 1), random_bytes(slot_pitch(shape), 2)
    with pytest.raises(NativeError, match=r"^threads: "):
        gather(layout_of(shape, memory), ints(0), region_of(slots), ints(0), threads)
