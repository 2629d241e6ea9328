"""Native calls from many threads at once, each with memory of its own beside shared helpers.

Every thread checks its own bytes. `make tsan` runs this on a build that also reports the races
which happened to do no harm.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from tests.cache_shapes import Bytes, cache_shape, gathered, random_bytes, scattered, slot_pitch
from vllm_tiered_kv.native import _cpu
from vllm_tiered_kv.native.cpu import (
    BlockLayout,
    HostRegion,
    checksum,
    copy_and_hash,
    extend_keys,
    gather,
    hash_buffers,
    scatter,
    sha256,
    xxh3_64,
)

THREADS = 5
ROUNDS = 8
# Several pieces per block, so that helper threads are used.
SHAPE = cache_shape("LBHNC", layers=3, blocks=9, heads=2, row=40_000)


def copy_both_ways(number: int) -> Callable[[], None]:
    memory = random_bytes(SHAPE.nbytes, number)
    slots = random_bytes(SHAPE.num_blocks * slot_pitch(SHAPE), number + 1)
    layout = BlockLayout(*SHAPE.columns(memory.ctypes.data), SHAPE.num_blocks)
    region = HostRegion(slots.ctypes.data, slots.nbytes)
    rng = np.random.default_rng(number)

    def once() -> None:
        ids = rng.permutation(SHAPE.num_blocks).astype(np.int64)
        offsets = rng.permutation(SHAPE.num_blocks).astype(np.int64) * slot_pitch(SHAPE)
        expected = gathered(SHAPE, memory, ids, slots, offsets)
        gather(layout, ids, region, offsets, threads=4)
        np.testing.assert_array_equal(slots, expected)
        backwards = ids[::-1].copy()
        expected = scattered(SHAPE, memory, backwards, slots, offsets)
        scatter(layout, backwards, region, offsets, threads=4)
        np.testing.assert_array_equal(memory, expected)

    return once


def sum_many(number: int) -> Callable[[], None]:
    data = random_bytes(1 << 21, number)
    each = 300_000
    offsets = np.arange(6, dtype=np.int64) * each
    expected = [xxhash.xxh3_64_intdigest(data[at : at + each].tobytes()) for at in offsets]

    def once() -> None:
        region = HostRegion(data.ctypes.data, data.nbytes)
        assert checksum(region, offsets, each, threads=4).tolist() == expected

    return once


def views(arrays: list[Bytes]) -> list[memoryview]:
    return [memoryview(array) for array in arrays]


def copy_with_sums(number: int) -> Callable[[], None]:
    sources = [random_bytes(size, number) for size in (100, 70_000, 1 << 20)]
    into = [np.zeros_like(source) for source in sources]
    expected = [xxhash.xxh3_64_intdigest(source.tobytes()) for source in sources]

    def once() -> None:
        for room in into:
            room[:] = 0
        assert copy_and_hash(views(into), views(sources), threads=3) == expected
        assert hash_buffers(views(sources), threads=3) == expected
        for room, source in zip(into, sources, strict=True):
            np.testing.assert_array_equal(room, source)

    return once


def make_keys(number: int) -> Callable[[], None]:
    tokens = np.arange(number, number + 16 * 40, dtype=np.int64)
    parent = hashlib.sha256(bytes([number])).digest()
    extras = {3: b"picture", 7: bytes(500)}
    expected = extend_keys(parent, tokens, 0, len(tokens), 16, extras, b"\0")
    data = random_bytes(100_000, number).tobytes()

    def once() -> None:
        assert extend_keys(parent, tokens.tolist(), 0, len(tokens), 16, extras, b"\0") == expected
        assert sha256(data) == hashlib.sha256(data).digest()
        assert xxh3_64(data) == xxhash.xxh3_64_intdigest(data)

    return once


KINDS = (copy_both_ways, sum_many, copy_with_sums, make_keys)


def run_together(work: list[Callable[[], None]], rounds: int) -> None:
    start = threading.Barrier(len(work))
    failures: list[BaseException] = []

    def repeat(once: Callable[[], None]) -> None:
        start.wait()
        try:
            for _ in range(rounds):
                once()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=repeat, args=(once,)) for once in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_threads_with_one_kind_of_call(kind: Callable[[int], Callable[[], None]]) -> None:
    run_together([kind(number) for number in range(THREADS)], ROUNDS)


def test_threads_with_all_kinds_of_calls() -> None:
    run_together([kind(number) for number in range(2) for kind in KINDS], ROUNDS)


def test_threads_reading_shared_memory() -> None:
    """Several threads gather, checksum and hash the same source at the same time."""
    memory = random_bytes(SHAPE.nbytes, 1)
    layout = BlockLayout(*SHAPE.columns(memory.ctypes.data), SHAPE.num_blocks)
    ids = np.arange(SHAPE.num_blocks, dtype=np.int64)
    offsets = ids * slot_pitch(SHAPE)
    empty = np.zeros(SHAPE.num_blocks * slot_pitch(SHAPE), dtype=np.uint8)
    expected = gathered(SHAPE, memory, ids, empty, offsets)

    def reader() -> Callable[[], None]:
        slots = empty.copy()
        region = HostRegion(slots.ctypes.data, slots.nbytes)

        def once() -> None:
            slots[:] = 0
            gather(layout, ids, region, offsets, threads=3)
            np.testing.assert_array_equal(slots, expected)
            xxh3_64(memory)

        return once

    run_together([reader() for _ in range(THREADS)], ROUNDS)


def test_threads_while_instruction_set_changes() -> None:
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            _cpu._force_portable(True)
            _cpu._force_portable(False)
            stop.wait(0.0005)

    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        run_together([kind(5) for kind in (sum_many, copy_with_sums, make_keys)], ROUNDS)
    finally:
        stop.set()
        flipping.join()
        _cpu._force_portable(False)
