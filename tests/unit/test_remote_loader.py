"""Loads from a daemon, over a socket and from memory that is leased for the copy."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.remote.engine import block_keys, content, items
from tests.unit.test_leased_blocks import IDENTITY, NBYTES, RANKS, shard
from vllm_tiered_kv.connector.worker.remote_loader import RemoteLoader
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.layout import BlockRuns, Run
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.core.transfer import (
    Fetched,
    Int64Array,
    ProbeJob,
    RemoteTransfer,
    int64_array,
)
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.cpu_copier import CpuChannel
from vllm_tiered_kv.native import cpu as native
from vllm_tiered_kv.remote.store import RemoteStore

KEYS = block_keys("loaded", 600)  # more than a piece: a load is cut into several
SHARD = shard(RANKS[0])


class SlowChannel(CpuChannel):
    """Every piece but one waits; something can be done to the source after each copy."""

    def __init__(self, layout: native.BlockLayout) -> None:
        super().__init__({0: layout}, 1)
        self.go_on = threading.Event()
        self.go_on.set()
        self.copied = lambda region, offsets: None

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: native.HostRegion, offsets: Int64Array
    ) -> None:
        if 0 not in block_ids:
            assert self.go_on.wait(30)
        super().scatter(group_id, block_ids, region, offsets)
        self.copied(region, offsets)


class Loads:
    def __init__(self, daemon: DaemonProcess, attached: bool) -> None:
        self.address = daemon.ipc
        self.store = RemoteStore(daemon.ipc, IDENTITY, timeout_s=10.0, connect_timeout_s=10.0)
        stored = self.store.put(items(SHARD.keys(KEYS), NBYTES))
        assert set(stored) == {PutResult.STORED}
        stores = {daemon.ipc: self.store}
        self.regions = SharedRegions(stores if attached else {}, None, None)
        end = time.monotonic() + 30
        while attached and not self.regions.of(daemon.ipc):
            assert time.monotonic() < end
            time.sleep(0.01)
        self.device = np.zeros((len(KEYS), NBYTES), np.uint8)
        runs = BlockRuns((Run(self.device.ctypes.data, NBYTES, NBYTES, 0),), len(KEYS))
        self.channel = SlowChannel(native.BlockLayout(*runs.arrays(), len(KEYS)))
        self.loader = RemoteLoader(
            stores, SHARD, self.regions, lambda: self.channel, Arena, 2 << 20, 2, timeout_s=20.0
        )

    def start(self, keys: list[BlockKey]) -> None:
        ids = int64_array(list(range(len(keys))))
        self.loader.load("r", [RemoteTransfer(0, self.address, ids, tuple(keys), None)])

    def wait(self) -> str | None:
        end = time.monotonic() + 60
        while not (done := self.loader.poll()):
            assert time.monotonic() < end
            time.sleep(0.002)
        (one,) = done
        return one.error

    def is_right(self) -> bool:
        wanted = b"".join(content(key, NBYTES) for key in SHARD.keys(KEYS))
        return self.device.tobytes() == wanted

    def close(self) -> None:
        self.channel.go_on.set()
        self.loader.close()
        self.regions.close()
        self.store.close()


@pytest.fixture(params=["socket", "memory"])
def loads(request: pytest.FixtureRequest) -> Iterator[Loads]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "16MiB") as daemon:
            made = Loads(daemon, attached=request.param == "memory")
            yield made
            made.close()


def test_blocks_arrive(loads: Loads) -> None:
    loads.start(KEYS)
    assert loads.wait() is None
    assert loads.is_right()


def test_block_that_left_fails_the_load(loads: Loads) -> None:
    assert loads.store.delete(SHARD.keys(KEYS)[-1:]) == 1
    loads.start(KEYS)
    error = loads.wait()
    assert error is not None
    assert "no longer there" in error


def test_load_is_over_with_its_last_piece(loads: Loads) -> None:
    loads.channel.go_on.clear()
    loads.start(KEYS)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert loads.loader.poll() == []
        time.sleep(0.01)
    loads.channel.go_on.set()
    assert loads.wait() is None
    assert loads.is_right()


@pytest.mark.parametrize("loads", ["memory"], indirect=True)
def test_leased_blocks_that_changed_are_not_used(loads: Loads) -> None:
    """As if the daemon had given their place to another block while they were copied."""
    region = loads.regions.of(loads.address)
    assert region is not None
    arena = region.memory.arena

    def overwrite(_: native.HostRegion, offsets: Int64Array) -> None:
        arena.next_generation(int(offsets[-1]))

    loads.channel.copied = overwrite
    loads.start(KEYS[:4])
    assert loads.wait() == "blocks changed while they were copied"


@pytest.mark.parametrize("way", ["tcp", "ipc"])
def test_memory_to_land_in_is_there_before_the_first_load(daemon: DaemonProcess, way: str) -> None:
    """Where blocks come over a network; mapped memory needs none."""
    opened: list[int] = []

    def open_landing(nbytes: int) -> Arena:
        opened.append(nbytes)
        return Arena(nbytes)

    address = daemon.endpoint if way == "tcp" else daemon.ipc
    with contextlib.closing(RemoteStore(address, IDENTITY)) as store:
        regions = SharedRegions({}, None, None)
        channel = CpuChannel({}, 1)
        loader = RemoteLoader(
            {address: store}, SHARD, regions, lambda: channel, open_landing, 2 << 20, 2, 20.0
        )
        loader.close()  # once all its threads have come to where they wait
        regions.close()
    assert opened == ([1 << 20] * 2 if way == "tcp" else [])


# ---- probes ---------------------------------------------------------------------------------


def probed(loads: Loads) -> Fetched:
    end = time.monotonic() + 60
    while not (ended := loads.loader.take_probed()):
        assert time.monotonic() < end
        time.sleep(0.002)
    (name,) = ended
    assert name == "probe"
    return ended[name]


def test_probe_fetches_and_writes_nowhere(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_kv.connector.worker.remote_loader._PROBE_S", 60.0)
    loads.loader.probe(ProbeJob("probe", 0, loads.address, tuple(KEYS)))
    fetched = probed(loads)
    assert fetched.nbytes == len(KEYS) * NBYTES
    assert fetched.seconds > 0
    assert not loads.device.any()
    assert loads.loader.poll() == []
    loads.start(KEYS)
    assert loads.wait() is None
    assert loads.is_right()


def test_probe_of_evicted_blocks_measures_nothing(loads: Loads) -> None:
    assert loads.store.delete(SHARD.keys(KEYS)[-1:]) == 1
    loads.loader.probe(ProbeJob("probe", 0, loads.address, tuple(KEYS)))
    assert probed(loads) == Fetched()


@pytest.mark.parametrize("comes_first", [True, False])
def test_probe_beside_a_load_measures_nothing(loads: Loads, comes_first: bool) -> None:
    loads.channel.go_on.clear()
    if comes_first:
        loads.start(KEYS)
    loads.loader.probe(ProbeJob("probe", 0, loads.address, tuple(KEYS)))
    if not comes_first:
        loads.start(KEYS)
    loads.channel.go_on.set()
    assert probed(loads) == Fetched()


def test_probes_end_with_the_loader(loads: Loads) -> None:
    for _ in range(20):
        loads.loader.probe(ProbeJob("probe", 0, loads.address, tuple(KEYS)))
    loads.loader.close()
    assert "probe" in loads.loader.take_probed()


def test_slow_daemon_is_probed_in_part(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_kv.connector.worker.remote_loader._PROBE_S", 0.0)
    loads.loader.probe(ProbeJob("probe", 0, loads.address, tuple(KEYS)))
    assert probed(loads).nbytes == 0
