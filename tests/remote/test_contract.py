"""The contract suite of all stores, over the client and a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.remote.any_engine import AnyEngine
from tests.stores.contract import StoreCase, StoreContract
from tests.stores.contract_capacity import CapacityContract
from vllm_tiered_kv.core.store import BlockStore


@contextmanager
def open_remote(folder: Path, capacity_bytes: int) -> Iterator[BlockStore]:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", str(capacity_bytes))
    with daemon_and_client(folder, capacity_bytes, *ssd) as store:
        yield store


@contextmanager
def open_small(folder: Path, capacity_bytes: int) -> Iterator[BlockStore]:
    with daemon_and_client(folder, capacity_bytes) as store:
        yield store


@contextmanager
def daemon_and_client(folder: Path, memory: int, *arguments: str) -> Iterator[BlockStore]:
    with DaemonProcess(folder, "--memory", str(memory), *arguments) as daemon:
        store = AnyEngine(daemon.endpoint, memory // 32)
        yield store
        store.close()


class TestContract(StoreContract):
    @pytest.fixture
    def case(self) -> StoreCase:
        return StoreCase("remote", open_remote)


class TestCapacity(CapacityContract):
    @pytest.fixture
    def case(self) -> StoreCase:
        return StoreCase("remote", open_small, exact_capacity=True)
