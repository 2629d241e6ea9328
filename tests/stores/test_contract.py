"""One contract, every store. A new store adds an `open_…` and a line to `CASES`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.stores.contract import StoreCase, StoreContract
from tests.stores.contract_capacity import CapacityContract
from tests.stores.memory_blocks import MemoryBlocks
from tests.stores.shared_dir_cases import ScannedDir
from vllm_tiered_kv.core.store import BlockStore
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings
from vllm_tiered_kv.stores.ssd.store import SsdStore


@contextmanager
def open_shared_dir(folder: Path, capacity_bytes: int) -> Iterator[BlockStore]:
    store = ScannedDir(SharedDirSettings(str(folder / "shared"), capacity_bytes, threads=4))
    yield store
    store.close()


@contextmanager
def open_memory(folder: Path, capacity_bytes: int) -> Iterator[BlockStore]:
    store = MemoryBlocks(capacity_bytes)
    yield store
    store.check()
    store.close()


@contextmanager
def open_ssd(folder: Path, capacity_bytes: int) -> Iterator[BlockStore]:
    store = SsdStore(folder / "ssd", capacity_bytes, io_threads=4)
    yield store
    store.close()


CASES = [
    StoreCase("memory", open_memory, exact_capacity=True),
    StoreCase("shared_dir", open_shared_dir, persistent=True, describes=True),
    StoreCase("ssd", open_ssd, exact_capacity=True, persistent=True, describes=True),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> StoreCase:
    return request.param


class TestContract(StoreContract):
    pass


class TestCapacity(CapacityContract):
    pass
