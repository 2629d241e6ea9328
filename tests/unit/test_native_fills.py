"""Asynchronous copies: their results, when they are reported, and which buffers stay alive."""

from __future__ import annotations

import itertools
import select
import threading

import numpy as np
import pytest
import xxhash

from tests.cache_shapes import Bytes, random_bytes
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native.cpu import FillPool

SIZES = (0, 100, 70_000, 1 << 20, (1 << 20) + 3)
THREADS = 5


def views(arrays: list[Bytes]) -> list[memoryview]:
    return [memoryview(array) for array in arrays]


def sums(arrays: list[Bytes]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(array.tobytes()) for array in arrays]


def is_readable(pool: FillPool) -> bool:
    return bool(select.select([pool.descriptor], [], [], 0)[0])


def test_fill_pool_copies_and_hashes_blocks() -> None:
    pool = FillPool()
    batches = [[random_bytes(size, n) for size in SIZES] for n in range(4)]
    places = [[np.zeros_like(source) for source in batch] for batch in batches]
    for n, (batch, into) in enumerate(zip(batches, places, strict=True), 1):
        pool.start(n, views(into), views(batch), threads=3)
    pool.wait()
    assert dict(pool.collect()) == {n: sums(batch) for n, batch in enumerate(batches, 1)}
    for source, place in zip(itertools.chain(*batches), itertools.chain(*places), strict=True):
        np.testing.assert_array_equal(place, source)
    assert pool.collect() == []


def test_fill_pool_descriptor_is_readable_until_collected() -> None:
    pool = FillPool()
    assert not is_readable(pool)
    for ticket in (1, 2):
        pool.start(ticket, [memoryview(bytearray(1 << 20))], [memoryview(bytes(1 << 20))], 0)
    pool.wait()
    assert is_readable(pool)
    assert sorted(ticket for ticket, _ in pool.collect()) == [1, 2]
    assert not is_readable(pool)
    pool.start(3, [], [], 0)  # nothing to copy: finishes at once
    assert is_readable(pool)
    assert pool.collect() == [(3, [])]


def test_fill_pool_holds_buffers_until_collected() -> None:
    pool = FillPool()
    into, source = bytearray(100_000), bytearray(b"x" * 100_000)
    pool.start(1, [memoryview(into)], [memoryview(source)], 0)
    pool.wait()
    for held in (into, source):
        with pytest.raises(BufferError):
            held.append(0)
    pool.collect()
    assert into == source
    for held in (into, source):
        held.append(0)


def test_fill_pool_deleted_finishes_copies() -> None:
    pool = FillPool()
    into, source = bytearray(8 << 20), bytearray(b"x" * (8 << 20))
    pool.start(1, [memoryview(into)], [memoryview(source)], 0)
    del pool
    assert into == source
    into.append(0)  # possible only if the buffer is no longer exported


def test_fill_pool_invalid_copy_is_refused() -> None:
    pool = FillPool()
    into, source = bytearray(100), bytearray(100)
    for places, sources in (
        ([memoryview(into)], [memoryview(source)[:99]]),
        ([memoryview(into)], []),
        ([memoryview(into)[:50]], [memoryview(into)[25:75]]),
        ([memoryview(bytes(100))], [memoryview(source)]),
    ):
        with pytest.raises(NativeError):
            pool.start(1, places, sources, 0)
    del places, sources
    into.append(0)
    source.append(0)
    pool.start(1, [], [], 0)
    with pytest.raises(NativeError, match="ticket"):
        pool.start(1, [], [], 0)
    assert pool.collect() == [(1, [])]


def test_fill_pool_shared_by_many_threads() -> None:
    """Each thread collects the finished copies of all threads."""
    pool = FillPool()
    sources = [random_bytes(size, 7) for size in SIZES]
    expected = sums(sources)
    tickets = itertools.count(1)
    starting = threading.Lock()
    collected: list[tuple[int, list[int]]] = []

    def work() -> None:
        for _ in range(8):
            into = [np.zeros_like(source) for source in sources]
            with starting:
                pool.start(next(tickets), views(into), views(sources), threads=4)
            pool.wait()
            for place, source in zip(into, sources, strict=True):
                np.testing.assert_array_equal(place, source)
            collected.extend(pool.collect())

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ticket for ticket, _ in collected) == list(range(1, 8 * THREADS + 1))
    assert all(found == expected for _, found in collected)
