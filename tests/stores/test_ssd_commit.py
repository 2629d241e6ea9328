"""Group commit: which blocks are reported as durable when the disk fails in between."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.stores.ssd_blocks import check, item, key, opened, put
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy

PATIENCE_S = 30.0


class FailsOnce(OsDisk):
    """A disk on which one sync of the data file is delayed and then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.syncing = threading.Event()
        self.fail = threading.Event()
        self._data = -1

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if path.name == "data":
            self._data = fd
        return fd

    def sync(self, fd: int) -> None:
        if fd == self._data and self.armed:
            self.armed = False
            self.syncing.set()
            assert self.fail.wait(PATIENCE_S)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


def test_put_during_failing_sync_is_not_durable(tmp_path: Path) -> None:
    """The system reports lost pages once; the next sync succeeds without reporting them."""
    disk = FailsOnce()
    with (
        opened(tmp_path / "store", disk=disk, retry_seconds=0.05) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        disk.armed = True
        first = threads.submit(store.put, [item(1)], Durability.DISK)
        assert disk.syncing.wait(PATIENCE_S)
        second = threads.submit(store.put, [item(2)], Durability.DISK)
        while not store.contains([key(2)])[0]:
            pass
        disk.fail.set()
        assert first.result(PATIENCE_S) == [PutResult.FAILED]
        assert second.result(PATIENCE_S) == [PutResult.FAILED]
        assert store.contains([key(1), key(2)]) == [False, False]
        while store.put([item(3)], Durability.DISK) != [PutResult.STORED]:
            pass
        check(store)
    with opened(tmp_path / "store") as store:
        assert store.contains([key(1), key(2), key(3)]) == [False, False, True]


class Interrupted(FailsOnce):
    """A disk that runs a callback after a write, before the write returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fail.set()
        self.is_full = False  # no room for the journal
        self.behind_a_write: Callable[[], None] | None = None

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if fd != self._data and self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, data, offset)
        if fd == self._data and self.behind_a_write is not None:
            happen, self.behind_a_write = self.behind_a_write, None
            happen()
        return count


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.DISK])
def test_put_sealed_after_failing_sync_is_not_kept(tmp_path: Path, durability: Durability) -> None:
    """The success of a later sync does not cover what an earlier one lost."""
    disk = Interrupted()
    with opened(tmp_path / "store", disk=disk, retry_seconds=0.0) as store:

        def fail_and_recover() -> None:
            disk.armed = True
            assert not store.flush()
            while not store.flush():
                pass

        disk.behind_a_write = fail_and_recover
        assert store.put([item(1)], durability) == [PutResult.FAILED]
        assert store.contains([key(1)]) == [False]
        put(store, 1, durability=Durability.DISK)
        check(store)


def test_record_queued_while_journal_is_broken_can_be_lost(tmp_path: Path) -> None:
    """Its record is not queued, because the next journal generation is to contain it."""
    disk = Interrupted()
    with opened(tmp_path / "store", disk=disk, retry_seconds=3600.0) as store:

        def fill_up() -> None:
            disk.is_full = True
            assert not store.flush()
            disk.is_full = False

        put(store, 1)
        disk.behind_a_write = fill_up
        put(store, 2)
        disk.armed = True
        assert not store.flush()
        assert store.contains([key(2)]) == [False]
        while not store.flush():
            pass
        check(store)


def test_durable_put_succeeds_after_recovered_sync(tmp_path: Path) -> None:
    disk = Interrupted()
    with opened(tmp_path / "store", disk=disk, retry_seconds=0.05) as store:
        put(store, 1, durability=Durability.DISK)
        disk.armed = True
        assert store.put([item(2)], Durability.DISK) == [PutResult.FAILED]
        eventually(lambda: store._committer.is_writable)
        assert store.put([item(1)], Durability.DISK) == [PutResult.PRESENT]


def test_flush_after_failed_flush_covers_remaining_blocks(tmp_path: Path) -> None:
    """The system tells of lost pages once, whatever the policy: only without them is a later sync
    worth anything."""
    disk = Interrupted()
    never = FsyncPolicy.NEVER
    with opened(tmp_path / "store", disk=disk, retry_seconds=0.0, fsync=never) as store:
        put(store, 1, durability=Durability.DISK)
        assert store.flush()
        put(store, 2, durability=Durability.DISK)

        def flush_in_vain() -> None:
            disk.armed = True
            assert not store.flush()

        disk.behind_a_write = flush_in_vain
        assert store.put([item(3)]) == [PutResult.FAILED]
        while not store.flush():
            pass
        assert store.contains([key(1), key(2), key(3)]) == [True, False, False]
        check(store)
    with opened(tmp_path / "store") as store:
        assert store.contains([key(1), key(2), key(3)]) == [True, False, False]


@pytest.mark.parametrize("fsync", FsyncPolicy)
def test_flush_reports_unreported_loss(tmp_path: Path, fsync: FsyncPolicy) -> None:
    """A block that was stored and then lost was not made durable."""
    disk = Interrupted()
    with opened(tmp_path / "store", disk=disk, retry_seconds=0.0, fsync=fsync) as store:
        put(store, 1)
        disk.armed = True
        with store._lock:
            store._committer._rewrite = True
            store._committer.kick()
        eventually(lambda: not store.contains([key(1)])[0])
        eventually(lambda: store._committer.is_writable)
        assert not store.flush()
        put(store, 1)
        assert store.flush()


class SlowRename(Interrupted):
    """A disk on which the rename of a new journal waits for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.renaming, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.fails = False

    def rename(self, source: Path, target: Path) -> None:
        self.renaming.set()
        assert self.go.wait(PATIENCE_S)
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().rename(source, target)


@pytest.mark.parametrize("fails", [False, True])
def test_journal_rewrite_is_shown_while_it_lasts(tmp_path: Path, fails: bool) -> None:
    """The daemon does not mistake its copies of the index for messages."""
    disk = SlowRename()
    with (
        opened(tmp_path / "store", disk=disk, retry_seconds=0.0) as store,
        ThreadPoolExecutor(1) as threads,
    ):
        put(store, 1, durability=Durability.DISK)
        disk.go.clear()
        disk.renaming.clear()
        store._committer._rewrite = True
        assert not store.is_rewriting
        flushed = threads.submit(store.flush)
        assert disk.renaming.wait(PATIENCE_S)
        assert store.is_rewriting
        disk.fails = fails
        disk.go.set()
        assert flushed.result(PATIENCE_S) is not fails
        eventually(lambda: not store.is_rewriting)


def test_changes_during_journal_rewrite_are_in_the_new_one(tmp_path: Path) -> None:
    """The new journal is written from a snapshot taken before the change."""
    disk = SlowRename()
    with (
        opened(tmp_path / "store", disk=disk, retry_seconds=0.0) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        put(store, 1, 2, 4, durability=Durability.DISK)

        def break_the_journal() -> None:
            disk.go.clear()
            disk.renaming.clear()
            disk.is_full = True
            with pytest.raises(NotDeletedError):
                store.delete([key(4)])
            disk.is_full = False
            assert disk.renaming.wait(PATIENCE_S)

        disk.behind_a_write = break_the_journal
        third = threads.submit(store.put, [item(3)], Durability.DISK)
        eventually(lambda: store.contains([key(3)])[0])
        deleted = threads.submit(store.delete, [key(1)])
        eventually(lambda: not store.contains([key(1)])[0])
        disk.go.set()
        assert third.result(PATIENCE_S) == [PutResult.STORED]
        assert deleted.result(PATIENCE_S) == 1
        assert store.flush()
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        with opened(tmp_path / "copy") as recovered:
            assert recovered.contains([key(1), key(2), key(3)]) == [False, True, True]
        check(store)


@pytest.mark.parametrize("fsync", FsyncPolicy)
def test_delete_is_durable_when_it_returns(tmp_path: Path, fsync: FsyncPolicy) -> None:
    with opened(tmp_path / "store", fsync=fsync) as store:
        put(store, 1, durability=Durability.DISK)
        put(store, 2, durability=Durability.DISK)
        assert store.delete([key(1), key(3)]) == 1
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
    with opened(tmp_path / "killed") as store:
        assert store.contains([key(1), key(2)]) == [False, True]


def test_delete_with_broken_journal_raises(tmp_path: Path) -> None:
    disk = Interrupted()
    with opened(tmp_path / "store", disk=disk, retry_seconds=3600.0) as store:
        put(store, 1, durability=Durability.DISK)
        disk.is_full = True
        for _ in range(2):  # it is not here any more, and would be after a crash
            with pytest.raises(NotDeletedError):
                store.delete([key(1)])
            assert store.contains([key(1)]) == [False]
        disk.is_full = False
        assert store.delete([key(1)]) == 0
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
    with opened(tmp_path / "killed") as store:
        assert store.contains([key(1)]) == [False]
