"""Disk errors: full disks, failing reads, writes and syncs, files deleted while in use."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.stores.ssd_blocks import SMALL, check, content, item, key, opened, present, put, read
from vllm_tiered_kv.cache.durable_index import BlockRows
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.stores.ssd import committer
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.record_format import RecordArray, put_records
from vllm_tiered_kv.stores.ssd.store import SsdStore

RETRY = 0.05


class FaultyDisk(OsDisk):
    """Calls in `faults`, by call and file, fail with that error."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[tuple[str, str], int] = {}
        self.short: set[tuple[str, str]] = set()
        self.bad_offsets: set[int] = set()  # of the data file
        self._names: dict[int, str] = {}

    def _maybe_fail(self, call: str, name: str) -> None:
        code = self.faults.get((call, name))
        if code is not None:
            raise OSError(code, os.strerror(code))

    def open(self, path: Path, flags: int) -> int:
        self._maybe_fail("open", path.name)
        fd = super().open(path, flags)
        self._names[fd] = path.name.removesuffix(".tmp")
        return fd

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._maybe_fail("read", self._names[fd])
        if ("read", self._names[fd]) in self.short:
            return super().read(fd, into[:512], offset)
        return super().read(fd, into, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._maybe_fail("write", self._names[fd])
        if self._names[fd] == "data" and offset in self.bad_offsets:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if ("write", self._names[fd]) in self.short:
            return super().write(fd, data[: max(1, data.nbytes // 8192) * 4096], offset)
        return super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._maybe_fail("sync", self._names[fd])
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename", target.name)
        super().rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        self._maybe_fail("sync", "folder")
        super().sync_folder(folder)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def store(tmp_path: Path, disk: FaultyDisk) -> Iterator[SsdStore]:
    with opened(tmp_path / "store", disk=disk, retry_seconds=RETRY) as opened_store:
        yield opened_store
        disk.faults.clear()
        disk.short.clear()
        disk.bad_offsets.clear()
        check(opened_store)


def put_until_stored(store: SsdStore, number: int) -> None:
    deadline = time.monotonic() + 30
    while store.put([item(number)], Durability.DISK) != [PutResult.STORED]:
        assert time.monotonic() < deadline
        time.sleep(RETRY / 5)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("call", "name"),
    [("write", "data"), ("sync", "data"), ("write", "journal"), ("sync", "journal")],
)
def test_put_with_write_error_fails_and_can_be_repeated(
    store: SsdStore, disk: FaultyDisk, tmp_path: Path, call: str, name: str, code: int
) -> None:
    put(store, 1, durability=Durability.DISK)
    disk.faults[call, name] = code
    assert store.put([item(2), item(3)], Durability.DISK) == [PutResult.FAILED] * 2
    assert not present(store, [2, 3])
    assert read(store, 1) == content(1)  # reading goes on
    assert store.put([item(4)], Durability.DISK) == [PutResult.FAILED]  # writing pauses
    assert store.counters.failed_blocks >= 3
    disk.faults.clear()
    put_until_stored(store, 2)
    assert read(store, 2) == content(2)
    assert read(store, 1) == content(1)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with opened(tmp_path / "copy") as recovered:
        assert present(recovered, range(5)) == [1, 2]
        assert read(recovered, 2) == content(2)


@pytest.mark.parametrize(
    ("call", "name"), [("open", "journal.tmp"), ("rename", "journal"), ("sync", "folder")]
)
def test_failed_compaction_is_retried(
    store: SsdStore, disk: FaultyDisk, tmp_path: Path, call: str, name: str
) -> None:
    disk.faults[call, name] = errno.ENOSPC
    failed = False
    acknowledged: set[int] = set()
    for round_ in range(60):  # enough records to need a new journal
        number = round_ % 20
        acknowledged.discard(number)
        try:
            store.delete([key(number)])
        except NotDeletedError:
            failed = True
            break
        [result] = store.put([item(number)], Durability.DISK)
        failed = failed or result is PutResult.FAILED
        if result is PutResult.STORED:
            acknowledged.add(number)
        if failed:
            break
    assert failed
    assert set(present(store, range(20))) >= acknowledged
    disk.faults.clear()
    put_until_stored(store, 100)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with opened(tmp_path / "copy") as recovered:
        assert set(present(recovered, range(20))) >= acknowledged
        assert read(recovered, 100) == content(100)


@pytest.mark.parametrize("fault", [("rename", "journal"), ("sync", "data")])
def test_failed_compaction_keeps_no_copy_of_the_index(
    store: SsdStore,
    disk: FaultyDisk,
    fault: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even until garbage is collected: a disk stays full for long, and an index is large."""
    copies: list[weakref.ref[RecordArray]] = []

    def copied(rows: BlockRows) -> RecordArray:
        records = put_records(rows)
        copies.append(weakref.ref(records))
        return records

    monkeypatch.setattr(committer, "put_records", copied)
    put(store, 1)
    disk.faults[fault] = errno.ENOSPC
    gc.disable()
    try:
        store._committer._rewrite = True
        assert not store.flush()
        assert copies
        assert not any(copy() is not None for copy in copies)
    finally:
        gc.enable()
    disk.faults.clear()


def test_journal_close_error_is_ignored(store: SsdStore, tmp_path: Path) -> None:
    """A network file system reports failed writes at close, which closes the file anyway."""
    disk = store._committer._disk
    assert isinstance(disk, FaultyDisk)
    complaining = {store._committer._journal._fd}

    def close(fd: int) -> None:
        os.close(fd)
        if fd in complaining:
            complaining.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.close = close  # type: ignore[method-assign]
    disk.faults["write", "journal"] = errno.EIO
    assert store.put([item(1)], Durability.DISK) == [PutResult.FAILED]
    disk.faults.clear()
    put_until_stored(store, 2)
    put(store, 3, durability=Durability.DISK)
    assert not complaining
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with opened(tmp_path / "copy") as recovered:
        assert present(recovered, range(5)) == [2, 3]


def test_get_with_read_error_is_a_miss_and_removes_block(store: SsdStore, disk: FaultyDisk) -> None:
    put(store, 1, 2)
    disk.faults["read", "data"] = errno.EIO
    assert read(store, 1) is None
    disk.faults.clear()
    assert read(store, 1) is None
    assert not present(store, [1])
    assert read(store, 2) == content(2)
    assert store.counters.read_errors == 1
    put(store, 1)
    assert read(store, 1) == content(1)


def test_short_reads_and_writes_are_errors(store: SsdStore, disk: FaultyDisk) -> None:
    put(store, 2)
    disk.short.add(("read", "data"))
    assert read(store, 2) is None
    disk.short = {("write", "data")}
    assert store.put([item(6)]) == [PutResult.FAILED]
    disk.short.clear()
    put_until_stored(store, 6)
    assert read(store, 6) == content(6)


def test_defective_slot_is_retired(store: SsdStore, disk: FaultyDisk) -> None:
    disk.bad_offsets = {0}
    put_until_stored(store, 1)
    assert store.counters.retired_slots == 1
    for number in range(2, 60):
        put(store, number)
    assert store.counters.failed_blocks == 1 or store.counters.retired_slots == 1
    check(store)


def test_write_error_logs_one_line(
    store: SsdStore, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.faults["write", "journal"] = errno.ENOSPC
    for number in range(20):
        assert store.put([item(number)], Durability.DISK) == [PutResult.FAILED]
    told = [r for r in caplog.records if "cannot be written" in r.message]
    assert len(told) == 1
    assert "No space left" in told[0].message
    disk.faults.clear()
    put_until_stored(store, 1)
    assert any("writing works again" in record.message for record in caplog.records)


def test_flush_and_close_on_broken_disk_return(tmp_path: Path, disk: FaultyDisk) -> None:
    store = SsdStore(tmp_path / "store", SMALL, disk=disk, retry_seconds=RETRY)
    put(store, 1)
    for call in ("write", "sync"):
        for name in ("data", "journal"):
            disk.faults[call, name] = errno.EIO
    assert not store.flush()
    with pytest.raises(NotDeletedError):
        store.delete([key(1)])
    store.close()
    disk.faults.clear()
    with opened(tmp_path / "store") as store:  # the lock was given back
        put(store, 2)


def test_unreadable_journal_page_loses_only_its_records(tmp_path: Path, disk: FaultyDisk) -> None:
    class BadPage(FaultyDisk):
        def read(self, fd: int, into: memoryview, offset: int) -> int:
            if self._names[fd] == "journal" and offset <= 8192 < offset + into.nbytes:
                raise OSError(errno.EIO, "bad page")
            return super().read(fd, into, offset)

    with opened(tmp_path / "store", 2 << 20) as store:
        put(store, *range(80))
    with opened(tmp_path / "store", 2 << 20, disk=BadPage()) as store:
        assert 20 <= store.recovery.damaged_records <= 30
        left = present(store, range(80))
        assert len(left) == 80 - store.recovery.damaged_records
        assert [read(store, number) for number in left] == [content(n) for n in left]


def test_deleted_files_are_detected_while_running(tmp_path: Path) -> None:
    with opened(tmp_path / "store", retry_seconds=RETRY) as store:
        put(store, 1, durability=Durability.DISK)
        (tmp_path / "store" / "journal").unlink()
        [first] = store.put([item(2)], Durability.DISK)
        assert first is PutResult.FAILED
        put_until_stored(store, 3)  # a new journal was written
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        with opened(tmp_path / "copy") as recovered:
            assert present(recovered, range(5)) == [1, 3]
        (tmp_path / "store" / "data").unlink()
        for number in range(10, 15):  # never acknowledged as on disk: it is not
            assert store.put([item(number)], Durability.DISK) == [PutResult.FAILED]
            time.sleep(RETRY)


def test_random_io_errors_cause_no_wrong_block(tmp_path: Path, disk: FaultyDisk) -> None:
    """Faults come and go under load: no exception, no wrong byte, no leak."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 150):
                store.put([item(number)], Durability.DISK if number % 3 else Durability.MEMORY)
                for earlier in range(max(first, number - 5), number):
                    assert read(store, earlier) in (None, content(earlier))
                with contextlib.suppress(NotDeletedError):  # after a crash it may be there again
                    store.delete([key(number - 3)])
                assert not store.contains([key(number - 3)])[0]
        except BaseException as error:
            errors.append(error)

    with opened(tmp_path / "store", disk=disk, retry_seconds=0.001) as store:
        threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(1, 4)]
        for thread in threads:
            thread.start()
        kinds = [("write", "data"), ("sync", "data"), ("write", "journal"), ("read", "data")]
        step = 0
        while any(thread.is_alive() for thread in threads):
            # Places that cannot be written are not used again, and there are only so many.
            failure = errno.EIO if store.counters.retired_slots < 10 else errno.ENOSPC
            disk.faults = {kinds[step // 2 % 4]: failure} if step % 2 else {}
            step += 1
            time.sleep(0.002)
        disk.faults = {}
        assert not errors
        assert store.counters.retired_slots
        put_until_stored(store, 9999)
        check(store)
        assert not store._index.pinned_slots()


# ---- a real file system that is full ------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "mount"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_put_on_full_file_system_fails_and_recovers(small_disk: Path) -> None:
    with opened(small_disk / "store", 400 << 10, retry_seconds=RETRY) as store:
        put(store, 1, durability=Durability.DISK)
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))
        results = [store.put([item(n)], Durability.DISK)[0] for n in range(2, 200)]
        assert PutResult.FAILED in results
        assert read(store, 1) == content(1)
        kept = [n for n, result in enumerate(results, 2) if result is PutResult.STORED]
        check(store)
        filler.unlink()
        put_until_stored(store, 300)
        kept = present(store, kept)
    with opened(small_disk / "store", 400 << 10) as store:
        assert present(store, kept) == kept
        assert read(store, 300) == content(300)


def test_open_with_too_large_capacity_is_refused(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match="no room for 8MiB"):
        SsdStore(small_disk / "store", 8 << 20)
    with opened(small_disk / "store", 400 << 10) as store:
        put(store, 1)


class SlowDisk(FaultyDisk):
    """The first write of a block waits for `go`, and may then fail."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self._names[fd] == "data" and not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(60)
        return super().write(fd, data, offset)


@pytest.mark.parametrize("fails", [False, True])
def test_durable_put_waits_for_concurrent_write(tmp_path: Path, fails: bool) -> None:
    """Another caller is putting the same block without durability."""
    disk = SlowDisk()
    with (
        opened(tmp_path / "store", disk=disk, retry_seconds=RETRY) as store,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(store.put, [item(1)])
        assert disk.begun.wait(60)
        second = threads.submit(store.put, [item(1)], Durability.DISK)
        wait([second], timeout=0.3)
        if not second.done():  # as it should be: there is nothing to promise yet
            if fails:
                disk.faults["write", "data"] = errno.EIO
            disk.go.set()
        result = second.result(60)[0]
        shutil.copytree(tmp_path / "store", tmp_path / "after a crash")
        disk.go.set()
        assert first.result(60)[0] is (PutResult.FAILED if fails else PutResult.STORED)
    assert result is (PutResult.DROPPED if fails else PutResult.PRESENT)
    with opened(tmp_path / "after a crash") as store:
        assert read(store, 1) == (None if fails else content(1))


def test_durable_put_of_present_block_fails_if_not_durable(
    store: SsdStore, disk: FaultyDisk
) -> None:
    assert store.put([item(1)]) == [PutResult.STORED]
    disk.faults["sync", "journal"] = errno.EIO
    assert store.put([item(1)], Durability.DISK) == [PutResult.FAILED]
    disk.faults.clear()
    assert eventually_writable(store, 1) is PutResult.PRESENT


def eventually_writable(store: SsdStore, number: int) -> PutResult:
    end = time.monotonic() + 30
    while True:
        [result] = store.put([item(number)], Durability.DISK)
        if result is not PutResult.FAILED or time.monotonic() > end:
            return result
        time.sleep(RETRY)
