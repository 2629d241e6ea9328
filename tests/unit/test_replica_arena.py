"""One arena for several ranks, which are threads here and open each other's memory like processes.

`tests/engine/test_mla_ranks.py` has real ones.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_kv.device import sealed_memory
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.replica_arena import Replicas, open_replica_arena, share_memory

NBYTES = 1 << 20


class Meeting:
    """An all-gather among threads."""

    def __init__(self, ranks: int) -> None:
        self._said: list[object] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)
        self.change: Callable[[int, Any], Any] = lambda rank, told: told

    def gather_as(self, rank: int) -> Callable[[object], list[object]]:
        def gather(told: object) -> list[object]:
            self._said[rank] = self.change(rank, told)
            self._barrier.wait()
            heard = list(self._said)
            self._barrier.wait()
            return heard

        return gather


def open_all(meeting: Meeting, ranks: int, replicas: int) -> list[tuple[Arena, bool]]:
    def open_one(rank: int) -> tuple[Arena, bool]:
        mine = Replicas(rank, rank % replicas, replicas, meeting.gather_as(rank))
        fd = share_memory(NBYTES, mine)
        return open_replica_arena(NBYTES, replicas, fd, None, None), fd is not None

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(open_one, range(ranks)))


def write(arena: Arena, value: int) -> None:
    arena.bytes_at(4096, 100)[:] = value


def read(arena: Arena) -> set[int]:
    return set(arena.bytes_at(4096, 100).tolist())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_replica_arena_is_shared_only_by_replicas() -> None:
    opened = open_all(Meeting(4), ranks=4, replicas=2)
    assert all(is_shared for _, is_shared in opened)
    arenas = [arena for arena, _ in opened]
    assert [arena.nbytes for arena in arenas] == [NBYTES] * 4
    write(arenas[1], 7)
    write(arenas[2], 9)
    assert [read(arena) for arena in arenas] == [{7}, {7}, {9}, {9}]
    arenas[0].close()  # the other ranks keep the memory
    assert read(arenas[1]) == {7}
    for arena in arenas:
        arena.close()
    assert "tiered-kv-replicas" not in Path("/proc/self/maps").read_text()


def elsewhere(rank: int, told: Any) -> Any:
    """Simulates a first rank on another host: its pid does not exist here."""
    return dataclasses.replace(told, pid=2**22 + 1) if hasattr(told, "pid") else told


def impostor(rank: int, told: Any) -> Any:
    """Simulates an unrelated process with the same pid and another file at the descriptor."""
    if not hasattr(told, "pid"):
        return told
    fd = os.memfd_create("other")
    os.ftruncate(fd, NBYTES)
    impostor.opened.append(fd)
    return dataclasses.replace(told, fd=fd)


impostor.opened = []


def no_memory(rank: int, told: Any) -> Any:
    return None if hasattr(told, "pid") else told


@pytest.mark.parametrize("change", [elsewhere, impostor, no_memory])
def test_replica_arena_without_access_is_split(
    change: Callable[[int, Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    meeting = Meeting(2)
    meeting.change = change
    opened = open_all(meeting, ranks=2, replicas=2)
    for fd in impostor.opened:
        os.close(fd)
    impostor.opened.clear()
    assert [is_shared for _, is_shared in opened] == [False, False]
    arenas = [arena for arena, _ in opened]
    assert [arena.nbytes for arena in arenas] == [NBYTES // 2] * 2
    write(arenas[0], 7)
    assert read(arenas[1]) == {0}
    for arena in arenas:
        arena.close()
    assert "cannot share memory" in caplog.text


def test_share_memory_one_failure_applies_to_all_ranks() -> None:
    """It applies to ranks of other shards too, because slot ids are the same on all ranks."""
    meeting = Meeting(4)
    meeting.change = lambda rank, told: elsewhere(rank, told) if rank < 2 else told
    opened = open_all(meeting, ranks=4, replicas=2)
    assert [is_shared for _, is_shared in opened] == [False] * 4
    assert {arena.nbytes for arena, _ in opened} == {NBYTES // 2}
    for arena, _ in opened:
        arena.close()


def test_share_memory_unavailable_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(sealed_memory.os, "ftruncate", refuse)
    opened = open_all(Meeting(2), ranks=2, replicas=2)
    assert [is_shared for _, is_shared in opened] == [False, False]
    for arena, _ in opened:
        arena.close()


def test_share_memory_cannot_be_resized() -> None:
    sizes = []

    def shrink(rank: int, told: Any) -> Any:
        if hasattr(told, "fd"):
            with pytest.raises(PermissionError):
                os.ftruncate(told.fd, 4096)
            sizes.append(os.fstat(told.fd).st_size)
        return told

    meeting = Meeting(2)
    meeting.change = shrink
    for arena, is_shared in open_all(meeting, ranks=2, replicas=2):
        assert is_shared
        arena.close()
    assert sizes == [NBYTES]
