"""Damaged SSD folders: flipped bits, truncated or missing files, foreign folders."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.patience import mostly_slow
from tests.stores.ssd_blocks import SMALL, check, content, item, key, opened, present, put, read
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import StoreFormatError, StoreLockedError
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.record_format import (
    FORMAT_VERSION,
    HEADER_COPIES,
    RECORD_BYTES,
    Superblock,
)
from vllm_tiered_kv.stores.ssd.store import SsdStore
from vllm_tiered_kv.stores.ssd.verify import describe, verify

BLOCKS = range(30)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with blocks, some of them rewritten in the journal's course."""
    path = tmp_path / "store"
    with opened(path, 400 << 10) as store:
        for number in BLOCKS:
            put(store, number)
        store.delete([key(3), key(4)])
        put(store, 3, 4)
        assert present(store, BLOCKS) == list(BLOCKS)
    return path


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def readable(path: Path, capacity: int = 400 << 10) -> set[int]:
    """Returns the readable blocks; checks that they are correct and that the store still works."""
    with opened(path, capacity) as store:
        good = set()
        for number in present(store, BLOCKS):
            found = read(store, number)
            assert found in (None, content(number)), "wrong bytes were served"
            if found is None:
                assert not present(store, [number]), "a damaged block is still reported"
            else:
                good.add(number)
        check(store)
        for number in set(BLOCKS) - good:  # nothing is in the way of storing them again
            put(store, number, durability=Durability.DISK)
            assert read(store, number) == content(number)
        check(store)
    return good


@pytest.mark.parametrize("seed", mostly_slow(range(60), 6))
def test_flipped_bits_are_detected(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    flips = rng.choice((1, 1, 3, 40))
    for _ in range(flips):
        path = folder / rng.choice(("data", "journal"))
        flip(path, rng.randrange(8 * path.stat().st_size))
    assert len(readable(folder)) >= len(BLOCKS) - flips
    assert readable(folder) == set(BLOCKS)


def test_verify_command_tells_damage_by_its_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("30 blocks")
    for bit in range(0, 8 * (folder / "data").stat().st_size, 4096 * 8):
        flip(folder / "data", bit)
    assert main(["verify", str(folder), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["sound"], facts["good_blocks"]) == (False, 0)
    assert "damaged: 30 blocks do not match their checksum:" in facts["report"]
    with opened(folder, 400 << 10):
        assert main(["verify", str(folder)]) == 2
    assert "is in use by" in capsys.readouterr().err
    assert main(["verify", str(folder / "none")]) == 2


def test_get_of_block_with_flipped_bit_is_a_counted_miss(folder: Path) -> None:
    for bit in range(0, 8 * (folder / "data").stat().st_size, 4096 * 8):
        flip(folder / "data", bit)  # the first bit of every page
    with opened(folder, 400 << 10) as store:
        assert [read(store, number) for number in BLOCKS] == [None] * len(BLOCKS)
        assert store.counters.bad_blocks == len(BLOCKS)
        assert store.usage().blocks == store.usage().used_bytes == 0
        put(store, *BLOCKS)


def test_record_with_any_flipped_bit_is_invalid(folder: Path) -> None:
    """Whichever bit of a record flips, its block is lost or right, and all others stay."""
    size = (folder / "journal").stat().st_size
    rng = random.Random(0)
    for bit in rng.sample(range(8 * RECORD_BYTES), 80):
        copy = folder.parent / "copy"
        shutil.copytree(folder, copy)
        number = rng.randrange(HEADER_COPIES, size // RECORD_BYTES)
        flip(copy / "journal", 8 * RECORD_BYTES * number + bit)
        with opened(copy, 400 << 10) as store:
            assert store.recovery.damaged_records + (store.recovery.torn_bytes > 0) == 1
            assert len(present(store, BLOCKS)) >= len(BLOCKS) - 1
        shutil.rmtree(copy)


def test_journal_survives_one_damaged_header(folder: Path) -> None:
    flip(folder / "journal", 100)
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    assert readable(copy) == set(BLOCKS)
    flip(folder / "journal", 8 * RECORD_BYTES + 100)
    with opened(folder, 400 << 10) as store:
        assert store.recovery.blocks == 0
        assert store.recovery.torn_bytes > 0
        put(store, 1)


@pytest.mark.parametrize("seed", mostly_slow(range(12), 3))
def test_truncated_journal_keeps_remaining_records(folder: Path, seed: int) -> None:
    journal = folder / "journal"
    records = journal.stat().st_size // RECORD_BYTES
    kept = random.Random(seed).randrange(HEADER_COPIES, records)
    torn = random.Random(seed).randrange(RECORD_BYTES)
    os.truncate(journal, kept * RECORD_BYTES + torn)
    with opened(folder, 400 << 10) as store:
        assert store.recovery.torn_bytes == torn
        assert len(present(store, BLOCKS)) >= len(BLOCKS) - (records - kept)
    with opened(folder, 400 << 10) as store:
        assert store.recovery.torn_bytes == 0
    assert readable(folder) <= set(BLOCKS)


def test_garbage_after_the_journal_is_cut(folder: Path) -> None:
    with (folder / "journal").open("ab") as file:
        file.write(random.Random(0).randbytes(1000))
    with opened(folder, 400 << 10) as store:
        assert store.recovery.torn_bytes == 1000
    assert readable(folder) == set(BLOCKS)


def test_records_of_older_journal_are_invalid(folder: Path) -> None:
    """The same records behind a new journal's end, as a reused disk block may have them."""
    old = (folder / "journal").read_bytes()
    with opened(folder, 400 << 10) as store:
        store.delete([key(number) for number in BLOCKS])
        put(store, 1)
        read(store, 1)  # changes the order of use: a new journal is written at the end
    new = (folder / "journal").read_bytes()
    (folder / "journal").write_bytes(new + old[len(new) :])
    with opened(folder, 400 << 10) as store:
        assert present(store, BLOCKS) == [1]
        assert store.recovery.torn_bytes == len(old) - len(new)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.7])
def test_truncated_data_file_drops_blocks_beyond_its_end(folder: Path, share: float) -> None:
    nbytes = int((folder / "data").stat().st_size * share)
    os.truncate(folder / "data", nbytes)
    with opened(folder, 400 << 10) as store:
        [(reason, dropped)] = store.recovery.dropped.items()
        assert "data file" in reason
        left = present(store, BLOCKS)
        assert len(left) == store.recovery.blocks == len(BLOCKS) - dropped
        assert [read(store, number) for number in left] == [content(n) for n in left]
    assert len(readable(folder)) >= len(left)


def test_recovery_reports_missing_files(folder: Path) -> None:
    (folder / "data").unlink()
    with opened(folder, 400 << 10) as store:
        assert store.recovery.dropped == {"the data file is missing": len(BLOCKS)}
        put(store, 1, durability=Durability.DISK)
    (folder / "journal").unlink()
    with opened(folder, 400 << 10) as store:
        assert store.recovery.blocks == 0
        put(store, 2, durability=Durability.DISK)
    with opened(folder, 400 << 10) as store:
        assert present(store, BLOCKS) == [2]


def test_open_without_format_file_is_refused(folder: Path) -> None:
    (folder / "FORMAT").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "LOCK"}
    with pytest.raises(StoreFormatError, match="no FORMAT file"):
        SsdStore(folder, SMALL)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "LOCK"}


def test_open_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StoreFormatError, match=r"thesis\.tex"):
        SsdStore(tmp_path, SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    with pytest.raises(StoreFormatError):
        verify(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def other_version(text: str) -> str:
    return text.replace(f'"version": {FORMAT_VERSION}', f'"version": {FORMAT_VERSION + 1}')


def older_version(text: str) -> str:
    return text.replace(f'"version": {FORMAT_VERSION}', '"version": 0')


def other_format(text: str) -> str:
    return text.replace("vllm_tiered_kv", "somebody_else")


def flipped_number(text: str) -> str:
    facts = json.loads(text)
    facts["slab_bytes"] += 4096
    return json.dumps(facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_version, f"format version {FORMAT_VERSION + 1}"),
        (older_version, "format version 0"),
        (other_format, "not one of this cache"),
        (flipped_number, "damaged"),
        (lambda text: text[:40], "damaged"),
        (lambda text: "", "damaged"),
        (lambda text: "[]", "damaged"),
    ],
)
def test_open_folder_of_other_format_is_refused(folder: Path, change, message: str) -> None:
    path = folder / "FORMAT"
    path.write_text(change(path.read_text()))
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "LOCK"}
    for attempt in (lambda: SsdStore(folder, SMALL), lambda: verify(folder)):
        with pytest.raises(StoreFormatError, match=message):
            attempt()
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "LOCK"}


@pytest.mark.parametrize("seed", mostly_slow(range(40), 4))
def test_open_with_damaged_format_file_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    good = Superblock(bytes(16), 1 << 20).encode()
    assert Superblock.decode(good) == Superblock(bytes(16), 1 << 20)
    bad = bytearray(good)
    bad[rng.randrange(len(bad) - 1)] ^= 1 << rng.randrange(8)
    with contextlib.suppress(ValueError):
        assert Superblock.decode(bytes(bad)) == Superblock(bytes(16), 1 << 20)


def test_open_locked_folder_is_refused_with_process_id(folder: Path) -> None:
    with opened(folder, 400 << 10):
        for attempt in (lambda: SsdStore(folder, SMALL), lambda: verify(folder)):
            with pytest.raises(StoreLockedError) as refused:
                attempt()
            assert refused.value.pid == os.getpid()
            assert str(os.getpid()) in str(refused.value)
    with opened(folder, 400 << 10) as store:
        assert store.recovery.blocks == len(BLOCKS)


def test_failed_open_releases_the_lock(folder: Path) -> None:
    path = folder / "FORMAT"
    good = path.read_text()
    path.write_text(other_version(good))
    with pytest.raises(StoreFormatError):
        SsdStore(folder, SMALL)
    path.write_text(good)
    assert readable(folder) == set(BLOCKS)


# ---- verify -------------------------------------------------------------------------------------


def test_verify_of_sound_folder_reports_no_damage(folder: Path) -> None:
    lines: list[str] = []
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    report = verify(folder, lines.append)
    assert report.is_sound
    assert report.good_blocks == len(BLOCKS)
    assert report.good_bytes == sum(len(content(number)) for number in BLOCKS)
    assert lines
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_verify_works_on_read_only_file_system(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk is often remounted read-only, which is when `verify` is needed."""
    really_open = os.open

    def no_writing(path: os.PathLike[str], flags: int, *more: int) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really_open(path, flags, *more)

    monkeypatch.setattr(os, "open", no_writing)
    assert verify(folder).good_blocks == len(BLOCKS)
    with pytest.raises(OSError, match="Read-only"):
        SsdStore(folder, SMALL)
    monkeypatch.undo()
    with opened(folder, 400 << 10):
        monkeypatch.setattr(os, "open", no_writing)
        with pytest.raises(StoreLockedError):
            verify(folder)
        monkeypatch.undo()


def test_verify_reports_damaged_blocks(folder: Path) -> None:
    data = (folder / "data").read_bytes()
    planted = [5, 17]
    for number in planted:
        offset = data.index(content(number))
        flip(folder / "data", 8 * offset + 77)
    report = verify(folder)
    assert not report.is_sound
    assert sorted(report.bad_keys) == sorted(key(number) for number in planted)
    assert report.good_blocks == len(BLOCKS) - len(planted)
    flip(folder / "journal", 8 * RECORD_BYTES * (HEADER_COPIES + 2) + 99)
    assert verify(folder).journal.damaged_records == 1


def test_verify_reports_missing_files(folder: Path) -> None:
    os.truncate(folder / "data", 8192)
    assert "beyond the end of the data file" in verify(folder).journal.dropped
    journal = (folder / "journal").read_bytes()
    (folder / "journal").unlink()
    report = verify(folder)
    assert report.journal_missing
    assert not report.is_sound
    (folder / "journal").write_bytes(journal)
    (folder / "data").unlink()
    assert not verify(folder).is_sound
    (folder / "journal").write_bytes(bytes(len(journal)))
    report = verify(folder)
    assert report.journal_missing
    assert not report.is_sound


class _Died(BaseException):
    """Simulates the death of the process."""


class _DyingDisk(OsDisk):
    """Allows a number of changes, and raises after that."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def _live(self) -> None:
        if not self.left:
            raise _Died
        self.left -= 1

    def open(self, path: Path, flags: int) -> int:
        self._live()
        return super().open(path, flags)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._live()
        return super().write(fd, data, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._live()
        super().allocate(fd, nbytes)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)


def test_verify_of_interrupted_first_start_reports_no_damage(tmp_path: Path) -> None:
    unused = []
    for calls in itertools.count():
        folder = tmp_path / str(calls)
        try:
            SsdStore(folder, SMALL, disk=_DyingDisk(calls)).close()
        except _Died:
            pass
        else:
            break
        report = verify(folder)
        assert report.is_sound, (calls, describe(report))
        unused.append(report.is_unused)
        assert any("cut off" in line for line in describe(report)) is report.is_unused
        with opened(folder) as store:
            put(store, 1)
        assert not verify(folder).is_unused
    assert set(unused) == {True, False}


def test_blocks_beyond_truncated_data_file_do_not_return(folder: Path, tmp_path: Path) -> None:
    """A start that finds missing blocks may be interrupted, too."""
    os.truncate(folder / "data", 8 * 4096)
    for calls in itertools.count():
        copy = tmp_path / str(calls)
        shutil.copytree(folder, copy)
        with contextlib.suppress(_Died):
            SsdStore(copy, 400 << 10, disk=_DyingDisk(calls)).close()
            break
        with opened(copy, 400 << 10) as store:
            left = present(store, BLOCKS)
            assert [read(store, n) for n in left] == [content(n) for n in left], calls
    assert 0 < len(left) < len(BLOCKS)


def test_put_with_wrong_checksum_is_counted_and_not_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        good = item(1)
        bad = type(good)(good.key, None, good.payload, checksum=1)
        assert store.put([bad], Durability.DISK) == [PutResult.FAILED]
        assert not present(store, [1])
        assert store.put([good]) == [PutResult.STORED]
        check(store)


@pytest.mark.parametrize("name", ["FORMAT", "LOCK", "data", "journal", "journal.tmp"])
@pytest.mark.parametrize("is_link", [True, False])
def test_open_with_links_or_fifos_is_refused(folder: Path, name: str, is_link: bool) -> None:
    """Another user with write access to the folder can neither redirect nor block the store."""
    precious = folder.parent / "precious"
    precious.write_bytes(b"of somebody else")
    (folder / name).unlink(missing_ok=True)
    if is_link:
        (folder / name).symlink_to(precious)
    else:
        os.mkfifo(folder / name)
    if name == "journal.tmp":  # written when the journal is replaced
        (folder / "journal").write_bytes(b"")
    with pytest.raises(OSError, match=r"symbolic link|not a regular file"):
        SsdStore(folder, SMALL)
    assert precious.read_bytes() == b"of somebody else"
