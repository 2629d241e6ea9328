"""The arena and the CPU copier, with numpy arrays as the device."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.layout import StridedView, block_runs
from vllm_tiered_kv.core.transfer import GroupTransfer, int64_array
from vllm_tiered_kv.device.arena import Arena, memory_limit
from vllm_tiered_kv.device.cpu_copier import CpuCopier
from vllm_tiered_kv.errors import ConfigError, CudaError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native import memory

BLOCKS, LAYERS, PAGE = 6, 3, 40


class Device:
    """A copier with a small arena and the layers of a toy device."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.layers = [rng.integers(0, 255, (BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]
        views = [
            StridedView(f"l{i}", layer.ctypes.data, layer.shape, layer.strides, 1)
            for i, layer in enumerate(self.layers)
        ]
        runs = block_runs(views, BLOCKS)
        self.geometry = ArenaGeometry.for_blocks(10 * 128, [runs.block_bytes])
        self.arena = Arena(self.geometry.capacity_bytes)
        self.copier = CpuCopier({0: runs}, self.geometry, self.arena)

    def block(self, number: int) -> bytes:
        return b"".join(layer[number].tobytes() for layer in self.layers)

    def wait_for_load(self) -> list:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            _, loads = self.copier.poll()
            if loads:
                return loads
            time.sleep(0.001)
        raise AssertionError("the load never ended")


@pytest.fixture
def device():
    device = Device()
    yield device
    device.copier.close()
    device.arena.close()


def pairs(blocks: list[int], slots: list[int]) -> GroupTransfer:
    return GroupTransfer(0, int64_array(blocks), int64_array(slots))


def test_copier_store_then_load_restores_blocks(device: Device) -> None:
    before = [device.block(n) for n in range(BLOCKS)]
    device.copier.store(7, pairs([1, 4], [9, 0]))
    (done,), _ = device.copier.poll()
    assert (done.job_id, done.stored, done.reason) == (7, 2, None)
    assert device.arena.bytes_at(9 * 128, 120).tobytes() == before[1]
    device.copier.load("r", [pairs([3, 2], [9, 0])])
    (load,) = device.wait_for_load()
    assert (load.request_id, load.error) == ("r", None)
    assert [device.block(n) for n in range(BLOCKS)] == [
        before[0],
        before[1],
        before[4],
        before[1],
        before[4],
        before[5],
    ]


def test_copier_failed_store_is_reported_as_dropped(device: Device) -> None:
    device.copier.store(1, pairs([BLOCKS], [0]))
    (done,), _ = device.copier.poll()
    assert (done.stored, done.reason) == (0, DropReason.COPY_FAILED)


def test_copier_failed_load_is_reported_once_with_reason(device: Device) -> None:
    device.copier.load("r", [pairs([0], [10_000])])
    (load,) = device.wait_for_load()
    assert load.request_id == "r"
    assert "slot_offsets" in load.error
    assert device.copier.poll() == ([], [])


def test_copier_close_finishes_running_loads(device: Device) -> None:
    device.copier.load("r", [pairs([3], [0])])
    device.copier.close()
    device.copier.close()
    assert [load.request_id for load in device.copier.poll()[1]] == ["r"]


def test_group_transfer_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="block_ids and slots"):
        pairs([1], [])


def test_arena_pins_first_chunk_then_rest_in_background() -> None:
    pinned: list[tuple[int, int]] = []
    unpinned: list[int] = []
    gate = threading.Event()

    def pin(address: int, nbytes: int) -> None:
        if pinned:
            gate.wait(10)
        pinned.append((address, nbytes))

    arena = Arena(10_000, pin, unpinned.append, chunk_bytes=4096)
    assert arena.ready_bytes == 4096  # enough for the engine to start
    gate.set()
    deadline = time.monotonic() + 10
    while arena.ready_bytes < 10_000 and time.monotonic() < deadline:
        time.sleep(0.001)
    base = arena.region.address
    assert pinned == [(base, 4096), (base + 4096, 4096), (base + 8192, 10_000 - 8192)]
    arena.close()
    arena.close()
    assert sorted(unpinned) == [base, base + 4096, base + 8192]


def test_arena_populates_pages_before_pinning() -> None:
    """Otherwise the driver allocates the pages and blocks all other CUDA calls meanwhile."""
    page = mmap.PAGESIZE
    there: list[bool] = []

    def pin(address: int, nbytes: int) -> None:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(address // page * 8)
            entries = np.frombuffer(pagemap.read(nbytes // page * 8), np.uint64)
        there.extend((entries >> np.uint64(63)).astype(bool).tolist())

    spare = np.empty(2 * page, np.uint8)
    whole_page = -(-spare.ctypes.data // page) * page
    if not (os.path.exists("/proc/self/pagemap") and memory.populate(whole_page, page)):
        pytest.skip("this kernel provides no memory ahead of its use, or does not tell")
    arena = Arena(8 * page, pin, lambda address: None, chunk_bytes=2 * page)
    arena._pinner._thread.join()
    assert there == [True] * 8
    arena.close()


def test_arena_partly_pinned_is_used_in_part(caplog) -> None:
    def pin(address: int, nbytes: int) -> None:
        if len(calls) == 2:
            raise CudaError("cudaHostRegister: out of memory")
        calls.append(address)

    calls: list[int] = []
    arena = Arena(10_000, pin, lambda address: None, chunk_bytes=4096)
    arena._pinner._thread.join()
    assert arena.ready_bytes == 8192
    assert "ulimit -l" in caplog.text
    arena.close()


def test_arena_close_stops_pinning() -> None:
    arena = Arena(100 * 4096, lambda a, n: time.sleep(0.01), lambda a: None, chunk_bytes=4096)
    arena.close()
    assert arena.ready_bytes < arena.nbytes


def test_arena_above_memory_limit_is_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cpu_memory.*exceeds the memory of the machine"):
        Arena(memory_limit() + 1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["", "job", "job/step", "job/step/task"])
def test_memory_limit_is_lowest_of_all_cgroups(tmp_path: Path, version: int, limited: str) -> None:
    tree, name = (tmp_path, "memory.max")
    line = "0::/job/step/task"
    if version == 1:
        tree, name = tmp_path / "memory", "memory.limit_in_bytes"
        line = "4:cpu,cpuacct:/other\n7:memory:/job/step/task\n0::/job/step/task"
    (tree / "job/step/task").mkdir(parents=True)
    (tree / "job" / name).write_text("max" if version == 2 else str(2**63 - 4096))
    (tree / limited / name).write_text("4194304\n")
    (tree / "other").mkdir()
    (tree / "other" / name).write_text("4096")
    membership = tmp_path / "membership"
    membership.write_text(line + "\n")
    assert memory_limit(tmp_path, membership) == 4 << 20


def test_memory_limit_in_container_reads_cgroup_root(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4194304\n")
    membership = tmp_path / "membership"
    assert memory_limit(tmp_path, membership) == 4 << 20
    membership.write_text("0::/docker/of-the-host\n")
    assert memory_limit(tmp_path, membership) == 4 << 20
