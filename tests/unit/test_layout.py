"""Byte runs derived from shapes and strides, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry, aligned
from vllm_tiered_kv.core.layout import StridedView, block_runs

ORDERS = {  # physical order of the logical dimensions L, B, H, N, C
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def cache(order: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Returns a logical [L, B, H, N, C] view of memory in `order`, with distinct elements."""
    physical = np.arange(np.prod(shape), dtype=np.int32).reshape([shape[d] for d in order])
    return physical.transpose(np.argsort(order))


def view(name: str, array: np.ndarray) -> StridedView:
    item = array.itemsize
    return StridedView(
        name,
        array.__array_interface__["data"][0],
        array.shape,
        tuple(s // item for s in array.strides),
        item,
    )


def read(runs, block: int, memory: np.ndarray) -> np.ndarray:
    base = memory.__array_interface__["data"][0]
    flat = memory.view(np.uint8).reshape(-1)
    slot = np.zeros(runs.block_bytes, np.uint8)
    for run in runs.runs:
        start = run.address - base + block * run.block_stride
        slot[run.slot_offset : run.slot_offset + run.nbytes] = flat[start : start + run.nbytes]
    return slot.view(np.int32)


@examples(60)
@given(
    st.sampled_from(sorted(ORDERS)),
    st.tuples(*[st.integers(1, 4)] * 4, st.integers(1, 5)),
    st.integers(1, 3),
)
def test_block_runs_match_numpy_elements(name: str, shape: tuple, ratio: int) -> None:
    layers, blocks = shape[0], shape[1]
    logical = cache(ORDERS[name], shape)
    base = logical
    while base.base is not None:
        base = base.base
    runs = block_runs([view(f"l{i}", logical[i]) for i in range(layers)], blocks)
    assert runs.block_bytes == logical[:, 0].size * 4
    for block in range(blocks):
        assert sorted(read(runs, block, base)) == sorted(logical[:, block].reshape(-1))
    first = [tuple(read(runs, block, base) - logical[0, block].min()) for block in range(blocks)]
    if name.startswith("LB"):  # every block has the same layout in its slot
        assert len(set(first)) == 1


def test_block_runs_block_outermost_is_one_run() -> None:
    logical = cache(ORDERS["BLHNC"], (3, 5, 2, 4, 8))
    runs = block_runs([view(f"l{i}", logical[i]) for i in range(3)], 5)
    assert len(runs.runs) == 1
    assert runs.runs[0].nbytes == runs.runs[0].block_stride == 3 * 2 * 4 * 8 * 4


def test_block_runs_kernel_blocks_belong_to_their_block() -> None:
    memory = np.arange(6 * 10, dtype=np.int32).reshape(6, 10)  # 3 blocks of 2 kernel blocks
    runs = block_runs([view("l", memory)], 3)
    assert list(read(runs, 1, memory)) == list(range(20, 40))


def test_block_runs_skip_padding_between_blocks() -> None:
    memory = np.arange(4 * 10, dtype=np.int32).reshape(4, 10)
    runs = block_runs([view("l", memory[:, :7])], 4)
    assert [run.nbytes for run in runs.runs] == [28]
    assert list(read(runs, 2, memory)) == list(range(20, 27))


def test_block_runs_shared_memory_counts_once() -> None:
    memory = np.zeros((4, 8), np.int32)
    assert block_runs([view("a", memory), view("b", memory)], 4).block_bytes == 32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (StridedView("x", 0, (5, 4), (4, 1), 2), "not a multiple of 4 blocks"),
        (StridedView("x", 0, (4, 0), (4, 1), 2), "empty dimension"),
        (StridedView("x", 0, (4, 4), (4, -1), 2), "must be positive"),
        (StridedView("x", 0, (4, 4, 4), (16, 2, 1), 2), "overlap"),
    ],
)
def test_block_runs_invalid_view_is_refused(bad: StridedView, message: str) -> None:
    with pytest.raises(ValueError, match=f"layer x.*{message}"):
        block_runs([bad], 4)


def test_arena_geometry_single_class_wastes_nothing() -> None:
    geometry = ArenaGeometry.for_blocks(1000 * 64 + 63, [64, 50])
    assert (geometry.num_slabs, geometry.slots_per_slab) == (1000, 1)
    assert list(geometry.offsets(np.array([0, 3]), 0)) == [0, 192]


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=4), st.integers(50, 4000))
def test_arena_geometry_slots_are_disjoint_and_in_bounds(sizes: list[int], factor: int) -> None:
    capacity = max(sizes) * factor + 64 * len(sizes)
    geometry = ArenaGeometry.for_blocks(capacity, sizes)
    for size in sizes:
        cls = geometry.class_of_block(size)
        per_slab = geometry.slots_in_slab(cls)
        assert per_slab >= 1
        assert per_slab <= geometry.slots_per_slab
        slots = np.array(
            [
                s * geometry.slots_per_slab + i
                for s in (0, geometry.num_slabs - 1)
                for i in range(per_slab)
            ]
        )
        offsets = geometry.offsets(slots, cls)
        assert offsets.max() + aligned(size) <= geometry.num_slabs * geometry.slab_bytes <= capacity
        assert (offsets % 64 == 0).all()


def test_arena_geometry_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one block"):
        ArenaGeometry.for_blocks(100, [128])
