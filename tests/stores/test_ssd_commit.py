"""Who is told that a block is durable, when the disk fails in between."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.stores.ssd_blocks import check, item, key, opened
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.stores.ssd.disk import OsDisk

PATIENCE_S = 30.0


class FailsOnce(OsDisk):
    """One sync of the data file takes its time, and then fails."""

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


def test_what_was_written_while_a_sync_failed_is_not_durable_either(tmp_path: Path) -> None:
    """The system tells of lost pages once: the next sync that succeeds says nothing of them."""
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
