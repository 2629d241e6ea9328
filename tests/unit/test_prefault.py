"""Populating memory ahead of its use keeps its content."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from vllm_tiered_kv.device.pinning import BackgroundPinner, Prefaulter
from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.native import memory
from vllm_tiered_kv.native.cpu import HostRegion


def resident_bytes(fd: int) -> int:
    return Path(f"/proc/self/fd/{fd}").stat().st_blocks * 512


def test_prefaulter_populates_arena_and_keeps_bytes() -> None:
    arena = SharedArena.create(96 << 20)
    arena.view(70 << 20, 5)[:] = b"bytes"
    assert resident_bytes(arena.fd) < 8 << 20
    prefaulter = Prefaulter(arena.region)
    for _ in range(1000):
        if resident_bytes(arena.fd) >= 96 << 20:
            break
        time.sleep(0.01)
    assert resident_bytes(arena.fd) >= 96 << 20
    prefaulter.close()
    prefaulter.close()
    assert bytes(arena.view(70 << 20, 5)) == b"bytes"
    assert not any(arena.view(0, 4096))
    arena.close()


def test_populate_invalid_address_returns_false() -> None:
    assert not memory.populate(0, 4096)
    Prefaulter(HostRegion(4096, 4096)).close()


def test_pinner_failing_to_start_thread_unpins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses to pin memory twice, so leftover pins would make every retry fail."""
    pinned: set[int] = set()

    def pin(address: int, length: int) -> None:
        assert address not in pinned
        pinned.add(address)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    arena = SharedArena.create(1 << 20)
    with monkeypatch.context() as out_of_threads:
        out_of_threads.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            BackgroundPinner(arena.region, pin, pinned.remove, "")
    assert not pinned
    pinner = BackgroundPinner(arena.region, pin, pinned.remove, "")
    assert pinner.ready_bytes == arena.region.nbytes
    pinner.close()
    assert not pinned
    arena.close()
