"""A shared directory on file systems that fail, are full, or return wrong results."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.stores.contract import assert_holds, assert_lacks, chain_items, chain_keys, item, read
from tests.stores.contract import store_key as named
from tests.stores.shared_dir_cases import FaultyOps, failing, file_of, litter, opened
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.stores.shared_dir import store as store_module
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps
from vllm_tiered_kv.stores.shared_dir.gc import SharedDirGc
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import FOLDER

SIZE = 5000
KEY = named("a")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An existing directory, so that faults hit the calls under test and not its creation."""
    with opened(tmp_path / "s") as store:
        store.put([item(named("earlier"), SIZE)])
    return tmp_path / "s"


# ---- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "writev", "close", "link"])
@pytest.mark.parametrize(
    ("code", "result", "event"),
    [
        (errno.ENOSPC, PutResult.DROPPED, Event.NO_SPACE),
        (errno.EDQUOT, PutResult.DROPPED, Event.NO_SPACE),
        (errno.EIO, PutResult.FAILED, Event.WRITE_ERROR),
        (errno.EROFS, PutResult.FAILED, Event.WRITE_ERROR),
        (errno.ESTALE, PutResult.FAILED, Event.WRITE_ERROR),
    ],
)
def test_put_with_failing_write_fails_and_leaves_nothing(
    root: Path, call: str, code: int, result: PutResult, event: Event
) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.clock.estimate()
        ops.faults[call] = failing(code)
        assert store.put([item(KEY, SIZE)]) == [result]
        assert store.counts.snapshot()[event] == 1
        ops.faults.clear()
        assert_lacks(store, KEY, SIZE)
        assert litter(root) == []
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]
        assert_holds(store, KEY, SIZE)


def failing_once(nth: int) -> Callable[[int], None]:
    calls = count(1)

    def fsync(fd: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.EIO, "sync")

    return fsync


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_put_with_failing_sync_stores_nothing(root: Path, nth: int) -> None:
    """The file, its folder, and the two folders on the way to it."""
    ops = FaultyOps()
    with opened(root, ops) as store:
        ops.faults["fsync"] = failing_once(nth)
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.FAILED]
        assert_lacks(store, KEY, SIZE)
        assert litter(root) == []
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("by", ["itself", "another"])
def test_put_removes_present_block_that_cannot_be_synced(root: Path, nth: int, by: str) -> None:
    """The system reports lost bytes once; the next sync succeeds although they are lost."""
    ops = FaultyOps()
    with opened(root) as another, opened(root, ops) as store:
        (store if by == "itself" else another).put([item(KEY, SIZE)])
        ops.faults["fsync"] = failing_once(nth)
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.FAILED]
        assert_lacks(store, KEY, SIZE)
        assert litter(root) == []
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]
        assert_holds(store, KEY, SIZE)


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_put_removes_concurrent_block_that_cannot_be_synced(root: Path, nth: int) -> None:
    with opened(root) as other:

        def be_late(source: str, target: str) -> None:
            other.put([item(KEY, SIZE)])

        ops = FaultyOps(link=be_late, fsync=failing_once(nth))
        with opened(root, ops) as store:
            assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.FAILED]
            assert_lacks(store, KEY, SIZE)
            del ops.faults["link"]
            assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]


def test_put_keeps_durable_block_when_sync_fails(root: Path) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)], Durability.DISK)
        ops.faults["fsync"] = failing(errno.EIO, 1)
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.FAILED]
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.PRESENT]


def test_put_continues_short_writes(root: Path) -> None:
    ops = FaultyOps(writev=lambda fd, parts: os.write(fd, parts[0][:777]))
    with opened(root, ops) as store:
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]
        assert_holds(store, KEY, SIZE)


def test_put_without_room_drops_the_tail(root: Path) -> None:
    keys = chain_keys("chain", 8)
    ops = FaultyOps(writev=failing(errno.ENOSPC))
    with opened(root, ops, threads=1) as store:
        assert store.put(chain_items(keys)) == [PutResult.DROPPED] * 8
        tried = [name for name, _ in ops.calls if name == "writev"]
        assert len(tried) == 1  # what follows a dropped block is not even written
        assert litter(root) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tiered-kv-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_put_on_full_disk_is_dropped(tiny_disk: Path) -> None:
    keys = chain_keys("a", 20)
    with opened(tiny_disk, threads=1) as store:
        results = store.put(chain_items(keys, 50_000))
        stored = results.count(PutResult.STORED)
        assert 0 < stored < 12
        assert results == [PutResult.STORED] * stored + [PutResult.DROPPED] * (20 - stored)
        assert store.match(keys) == stored
        for key in keys[:stored]:
            assert_holds(store, key, 50_000)
        assert litter(tiny_disk) == []
        store.delete(keys[:5])
        assert store.put(chain_items(keys[:3], 50_000)) == [PutResult.STORED] * 3


# ---- durability ---------------------------------------------------------------------------------


def steps(ops: FaultyOps) -> list[str]:
    """The calls that decide what a crash leaves, in order."""
    return [name for name, _ in ops.calls if name in ("writev", "fsync", "link")]


def test_durable_put_syncs_file_and_name(root: Path) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        ops.calls.clear()
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]
        assert steps(ops) == ["writev", "fsync", "link", "fsync", "fsync", "fsync"]
        folders = [
            args[0] for name, args in ops.calls if name == "open" and args[1] & os.O_DIRECTORY
        ]
        shard = file_of(store, KEY).parent
        assert folders == [str(shard), str(shard.parent), str(shard.parent.parent)]
        ops.calls.clear()
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.PRESENT]
        assert len(steps(ops)) == 4  # whoever wrote it may not have synced it


def lose_bytes(path: Path, kept: int) -> None:
    """Simulates a power loss before the bytes were written back."""
    size = path.stat().st_size
    os.truncate(path, kept)
    os.truncate(path, size)


@pytest.mark.parametrize("kept", [0, SIZE // 2])
@pytest.mark.parametrize("by", ["itself", "another"])
def test_durable_put_rewrites_block_without_content(root: Path, kept: int, by: str) -> None:
    with opened(root) as store, opened(root) as another:
        (store if by == "itself" else another).put([item(KEY, SIZE)])
        lose_bytes(file_of(store, KEY), kept)
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]
        assert_holds(store, KEY, SIZE)
        assert litter(root) == []


def test_durable_put_rewrites_concurrent_damaged_block(root: Path) -> None:
    with opened(root) as other:
        late = [True]

        def be_late(source: str, target: str) -> None:
            if late.pop() if late else False:
                other.put([item(KEY, SIZE)])
                lose_bytes(file_of(other, KEY), 0)

        with opened(root, FaultyOps(link=be_late)) as store:
            assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]
            assert_holds(store, KEY, SIZE)


@pytest.mark.parametrize("nbytes", [SIZE, SIZE + 1])
def test_durable_put_verifies_only_unknown_files(root: Path, nbytes: int) -> None:
    """Also for other lengths: a key names one content, and the present block stays."""
    ops = FaultyOps()
    with opened(root) as other, opened(root, ops) as store:
        other.put([item(KEY, nbytes)], Durability.DISK)
        store.put([item(named("own"), SIZE)], Durability.DISK)
        read = []
        for key in (KEY, KEY, named("own")):
            ops.calls.clear()
            assert store.put([item(key, SIZE)], Durability.DISK) == [PutResult.PRESENT]
            store.recency.drain()
            parts = [part for name, args in ops.calls if name == "preadv" for part in args[1]]
            read.append(sum(len(part) == nbytes for part in parts))
        assert read == [1, 0, 0]


@pytest.mark.parametrize("durability", [Durability.RECEIVED, Durability.MEMORY])
def test_put_in_memory_syncs_nothing_until_flush(root: Path, durability: Durability) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        ops.calls.clear()
        store.put([item(KEY, SIZE)], durability)
        assert not {"fsync", "syncfs"} & {name for name, _ in ops.calls}
        store.flush()
        assert "syncfs" in {name for name, _ in ops.calls}


def test_flush_failure_is_counted(root: Path) -> None:
    with opened(root, FaultyOps(syncfs=failing(errno.EIO, 1))) as store:
        store.flush()
        assert store.counts.snapshot()[Event.FLUSH_ERROR] == 1


def test_durable_put_rewrites_block_collected_meanwhile(root: Path) -> None:
    """The block is present at first, and gone when it is opened for the sync."""
    with opened(root) as other:
        other.put([item(KEY, SIZE)])
        path = file_of(other, KEY)

        def collect(opened_path: str, flags: int, mode: int = 0) -> None:
            if opened_path == str(path):
                path.unlink(missing_ok=True)

        with opened(root, FaultyOps(open=collect)) as store:
            assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]
            assert store.counts.snapshot()[Event.WRITE_ERROR] == 0
        assert_holds(other, KEY, SIZE)
        assert litter(root) == []


@pytest.mark.parametrize("times", [1, 100])
def test_durable_put_retries_when_other_writers_block_is_collected(root: Path, times: int) -> None:
    """Another writer publishes between our check and our link, and the block is collected before
    it is synced: once, or every time."""
    with opened(root) as other:
        path = file_of(other, KEY)
        left = [times]

        def be_late(source: str, target: str) -> None:
            if left[0]:
                left[0] -= 1
                other.put([item(KEY, SIZE)])

        def collect(opened_path: str, flags: int, mode: int = 0) -> None:
            if opened_path == str(path):
                path.unlink(missing_ok=True)

        with opened(root, FaultyOps(link=be_late, open=collect)) as store:
            expected = PutResult.STORED if times == 1 else PutResult.DROPPED
            assert store.put([item(KEY, SIZE)], Durability.DISK) == [expected]
            assert store.counts.snapshot()[Event.WRITE_ERROR] == 0
        assert path.exists() == (times == 1)
        assert litter(root) == []


# ---- names that network file systems give --------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EEXIST, errno.EPERM])
def test_link_that_reports_a_false_error_succeeds(root: Path, code: int) -> None:
    def lie(source: str, target: str) -> None:
        os.link(source, target)
        raise OSError(code, os.strerror(code))

    with opened(root, FaultyOps(link=lie)) as store:
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]
        assert_holds(store, KEY, SIZE)
        assert litter(root) == []


def test_link_after_another_writer_is_present(root: Path) -> None:
    """Another writer publishes between our check and our link."""
    with opened(root) as other:

        def be_late(source: str, target: str) -> None:
            other.put([item(KEY, SIZE, version=1)])

        with opened(root, FaultyOps(link=be_late)) as store:
            assert store.put([item(KEY, SIZE)]) == [PutResult.PRESENT]
            assert_holds(store, KEY, SIZE, version=1)
            assert litter(root) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV])
def test_put_without_hard_links_is_stored(root: Path, code: int) -> None:
    with opened(root, FaultyOps(link=failing(code))) as store:
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]
        assert store.put([item(KEY, SIZE, version=1)]) == [PutResult.PRESENT]
        assert_holds(store, KEY, SIZE)
        assert litter(root) == []


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_put_without_hard_links_removes_unsynced_name(root: Path, nth: int) -> None:
    with opened(root, FaultyOps(link=failing(errno.EPERM), fsync=failing_once(nth))) as store:
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.FAILED]
        assert_lacks(store, KEY, SIZE)
        assert litter(root) == []
        assert store.put([item(KEY, SIZE)], Durability.DISK) == [PutResult.STORED]


def test_put_recreates_folder_removed_by_collector(root: Path) -> None:
    with opened(root) as store:
        shard = str(file_of(store, KEY).parent)
        times = [2]

        def vanish(path: str, flags: int, mode: int = 0) -> None:
            if path.endswith(".tmp") and times[0] and os.path.isdir(shard):
                times[0] -= 1
                os.rmdir(shard)

        with opened(root, FaultyOps(open=vanish)) as unlucky:
            assert unlucky.put([item(KEY, SIZE)]) == [PutResult.STORED]
            assert times == [0]
        assert_holds(store, KEY, SIZE)


# ---- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_get_of_vanishing_file_is_a_miss(root: Path, call: str, code: int) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)])
        store.flush()
        ops.faults[call] = failing(code)
        assert read(store, KEY, SIZE) is None
        ops.faults.clear()
        counts = store.counts.snapshot()
        assert counts[Event.READ_ERROR] == counts[Event.DAMAGED] == 0
        assert_holds(store, KEY, SIZE)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ETIMEDOUT])
def test_get_with_read_error_is_a_miss_and_removes_nothing(root: Path, code: int) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)])
        store.flush()
        ops.faults["open"] = failing(code)
        assert read(store, KEY, SIZE) is None
        ops.faults.clear()
        assert store.counts.snapshot()[Event.READ_ERROR] == 1
        assert_holds(store, KEY, SIZE)


def test_get_retries_io_error_and_then_removes_block(root: Path) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)])
        store.flush()
        ops.faults["preadv"] = failing(errno.EIO, times=1)
        assert_holds(store, KEY, SIZE)
        ops.faults["preadv"] = failing(errno.EIO)
        assert read(store, KEY, SIZE) is None
        ops.faults.clear()
        assert_lacks(store, KEY, SIZE)
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]


def test_get_continues_short_reads(root: Path) -> None:
    def some(fd: int, parts: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [parts[0][:333]], offset)

    with opened(root, FaultyOps(preadv=some)) as store:
        store.put([item(KEY, SIZE)])
        assert_holds(store, KEY, SIZE)


def test_get_that_ends_early_is_a_miss(root: Path) -> None:
    def end_early(fd: int, parts: list[memoryview], offset: int) -> int:
        return 0 if offset >= 3000 else os.preadv(fd, [parts[0][: 3000 - offset]], offset)

    with opened(root, FaultyOps(preadv=end_early)) as store:
        store.put([item(KEY, SIZE)])
        assert read(store, KEY, SIZE) is None
        assert store.counts.snapshot()[Event.DAMAGED] == 1


def test_get_keeps_file_that_replaced_a_damaged_one(root: Path) -> None:
    """A reader holds a damaged file; before it removes it, another host has healed the key."""
    with opened(root) as other:
        other.put([item(KEY, SIZE)])
        path = file_of(other, KEY)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        healed = []

        def heal(*args: Any) -> None:
            if not healed:
                healed.append(True)
                assert other.delete([KEY]) == 1
                assert other.put([item(KEY, SIZE)]) == [PutResult.STORED]

        for call in ("lstat", "rename"):  # seen in time, and only after the rename
            healed.clear()
            ops = FaultyOps()
            with opened(root, ops) as store:
                store.clock.estimate()
                ops.faults[call] = heal
                assert store.get([KEY], [memoryview(bytearray(SIZE))]) == [False]
                assert healed
                ops.faults.clear()
                assert_holds(store, KEY, SIZE)
                assert litter(root) == []
            path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_rename_that_reports_a_false_error_succeeds(root: Path) -> None:
    def lie(source: str, target: str) -> None:
        os.rename(source, target)
        raise OSError(errno.ENOENT, "no such file")

    with opened(root, FaultyOps(rename=lie)) as store:
        store.put([item(KEY, SIZE)])
        path = file_of(store, KEY)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert read(store, KEY, SIZE) is None
        assert litter(root) == []
        assert not path.exists()


def test_file_ops_work_on_a_real_file_system(tmp_path: Path) -> None:
    ops = FileOps()
    fd = ops.open(str(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    ops.syncfs(fd)
    ops.close(fd)
    with pytest.raises(OSError):
        ops.syncfs(fd)


# ---- syncs that fail ----------------------------------------------------------------------------


def test_flush_failure_reports_blocks_and_put_rewrites_them(root: Path) -> None:
    """The next sync would succeed without reporting the lost bytes."""
    ops = FaultyOps()
    with opened(root, ops) as store:
        synced, other = named("synced"), named("b")
        store.put([item(synced, SIZE)], Durability.DISK)
        store.put([item(KEY, SIZE), item(other, SIZE)])
        ops.faults["syncfs"] = failing(errno.EIO, 1)
        assert not store.flush()
        assert store.take_lost() == [KEY, other]
        again = [item(key, SIZE) for key in (KEY, synced)]
        assert store.put(again) == [PutResult.STORED, PutResult.PRESENT]
        assert store.put([item(other, SIZE)], Durability.DISK) == [PutResult.STORED]
        assert store.flush()
        assert store.put([item(KEY, SIZE), item(other, SIZE)]) == [PutResult.PRESENT] * 2
        assert store.take_lost() == []
        assert_holds(store, KEY, SIZE)


def test_put_during_failing_sync_fails(root: Path) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:

        def sync_fails(*args: object) -> None:
            del ops.faults["writev"]
            ops.faults["syncfs"] = failing(errno.EIO, 1)
            assert not store.flush()

        ops.faults["writev"] = sync_fails
        assert store.put([item(KEY, SIZE)]) == [PutResult.FAILED]
        assert store.put([item(KEY, SIZE)]) == [PutResult.STORED]
        assert store.flush()


def test_put_syncs_when_too_many_blocks_are_unsynced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_MAX_UNSYNCED", 2)
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(named("a"), SIZE)])
        assert "syncfs" not in {name for name, _ in ops.calls}
        store.put([item(named("b"), SIZE)])
        assert "syncfs" in {name for name, _ in ops.calls}


# ---- what is no file ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("x", path)])
def test_fifo_in_place_of_a_block_does_not_block_calls(
    root: Path, make: Callable[[Path], None]
) -> None:
    """Opening a FIFO normally waits for its other end."""
    with opened(root) as store:
        path = file_of(store, KEY)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)
        assert_lacks(store, KEY, SIZE)
        for durability in (Durability.MEMORY, Durability.DISK):
            assert store.put([item(KEY, SIZE)], durability) == [PutResult.FAILED]
        assert store.describe([KEY]) == [None]
        SharedDirGc(store).collect()


def test_open_with_fifo_as_marker_is_refused(root: Path) -> None:
    marker = root / FOLDER / "FORMAT"
    marker.unlink()
    os.mkfifo(marker)
    with pytest.raises(ConfigError, match="not a shared directory"):
        SharedDirStore(SharedDirSettings(str(root)))


def test_put_on_full_disk_warns_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.clock.estimate()
        ops.faults["writev"] = failing(errno.ENOSPC)
        for n in range(5):
            assert store.put([item(named(str(n)), SIZE)]) == [PutResult.DROPPED]
        told = [line for line in caplog.messages if "No space left on device" in line]
        assert len(told) == 1
        assert str(root) in told[0]
