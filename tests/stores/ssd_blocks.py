"""Blocks whose bytes derive from their number, and helpers to put and check them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.stores.ssd.store import SsdStore

NAMESPACE = b"namespace-of-16b"
SIZES = (4096, 5000, 8192, 700)
SMALL = 200 << 10  # holds a few dozen of them


def key(number: int) -> StoreKey:
    return StoreKey(NAMESPACE + number.to_bytes(17, "little") + bytes(8))


def size(number: int) -> int:
    return SIZES[number % len(SIZES)]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(size(number))


def item(number: int, parent: int | None = None) -> PutItem:
    above = key(parent) if parent is not None else None
    return PutItem(key(number), above, memoryview(content(number)))


def put(store: SsdStore, *numbers: int, durability: Durability = Durability.MEMORY) -> None:
    """Puts blocks one by one: a batch that does not fit would lose its tail."""
    for number in numbers:
        assert store.put([item(number)], durability) == [PutResult.STORED]


def read(store: SsdStore, number: int) -> bytes | None:
    buffer = bytearray(size(number))
    [found] = store.get([key(number)], [memoryview(buffer)])
    return bytes(buffer) if found else None


def present(store: SsdStore, numbers: Iterable[int]) -> list[int]:
    wanted = list(numbers)
    return [
        n for n, here in zip(wanted, store.contains([key(n) for n in wanted]), strict=True) if here
    ]


def check(store: SsdStore) -> None:
    """Checks every invariant of the index and of the store."""
    with store._lock:
        store._index.check()
        assert len(store._index) <= store._budget.max_blocks
        counted = store._table.by_namespace.snapshot().values()
        assert sum(blocks for blocks, _ in counted) == len(store._index)
        assert sum(nbytes for _, nbytes in counted) == store._table.live_bytes


@contextmanager
def opened(folder: Path, capacity: int = SMALL, **options: Any) -> Iterator[SsdStore]:
    store = SsdStore(folder, capacity, io_threads=2, **options)
    try:
        yield store
    finally:
        store.close()
