"""A disk that remembers, and the disks a loss of power could have left instead.

`RecordingDisk` does what it is told and keeps a log. `leftovers` picks an instant of that log and
builds one of the folders that may be found after power failed there: what was synced is there;
of everything else any part may be, in any order, whole or torn at sectors. Names are as journaling
file systems keep them: in order, but later than one thinks.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

from vllm_tiered_kv.stores.ssd.disk import OsDisk

NEVER = 1 << 60


@dataclass
class Change:
    """Something done to a file or, if `file` is None, to a name in the folder."""

    begin: int
    file: int | None
    kind: str  # write, size, grow; create, rename, unlink
    offset: int = 0
    data: bytes = b""
    names: tuple[str, ...] = ()
    target: int = -1  # the file a name is for
    end: int = NEVER


@dataclass
class Sync:
    file: int | None
    begin: int
    end: int


@dataclass
class Log:
    changes: list[Change] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    events: list[tuple[int, str, bytes]] = field(
        default_factory=list
    )  # what the test wants to know
    time: int = 0


class RecordingDisk(OsDisk):
    """`lies` names files (or "folder") whose syncs are skipped: a guard taken away."""

    def __init__(self, folder: Path, lies: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.log = Log()
        self.start: dict[str, bytes] = {}
        self._lies = lies
        self._lock = threading.Lock()
        self._file_of_fd: dict[int, int] = {}
        self._file_of_name: dict[str, int] = {}
        self._files = 0
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if path.name != "LOCK":
                    self.start[path.name] = path.read_bytes()
                    self._file_of_name[path.name] = self._new_file()
        self.start_files = dict(self._file_of_name)

    def _new_file(self) -> int:
        self._files += 1
        return self._files

    def _tick(self) -> int:
        self.log.time += 1
        return self.log.time

    def note(self, event: str, key: bytes) -> None:
        with self._lock:
            self.log.events.append((self._tick(), event, key))

    def _begin(self, change: Change) -> Change:
        with self._lock:
            change.begin = self._tick()
            self.log.changes.append(change)
        return change

    def _end(self, change: Change) -> None:
        with self._lock:
            change.end = self._tick()

    def open(self, path: Path, flags: int) -> int:
        name = path.name
        change = None
        if flags & os.O_CREAT and name not in self._file_of_name:
            number = self._file_of_name[name] = self._new_file()
            change = self._begin(Change(0, None, "create", names=(name,), target=number))
        elif flags & os.O_TRUNC:
            change = self._begin(Change(0, self._file_of_name[name], "size"))
        fd = super().open(path, flags)
        if change is not None:
            self._end(change)
        self._file_of_fd[fd] = self._file_of_name[name]
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        change = self._begin(
            Change(0, self._file_of_fd[fd], "write", offset=offset, data=bytes(data))
        )
        moved = super().write(fd, data, offset)
        self._end(change)
        return moved

    def truncate(self, fd: int, nbytes: int) -> None:
        change = self._begin(Change(0, self._file_of_fd[fd], "size", offset=nbytes))
        super().truncate(fd, nbytes)
        self._end(change)

    def allocate(self, fd: int, nbytes: int) -> None:
        change = self._begin(Change(0, self._file_of_fd[fd], "grow", offset=nbytes))
        super().allocate(fd, nbytes)
        self._end(change)

    def sync(self, fd: int) -> None:
        with self._lock:
            begin = self._tick()
        number = self._file_of_fd[fd]
        if any(self._file_of_name.get(name) == number for name in self._lies):
            return
        with self._lock:
            self.log.syncs.append(Sync(number, begin, self._tick()))

    def rename(self, source: Path, target: Path) -> None:
        number = self._file_of_name.pop(source.name)
        self._file_of_name[target.name] = number
        change = self._begin(
            Change(0, None, "rename", names=(source.name, target.name), target=number)
        )
        super().rename(source, target)
        self._end(change)

    def unlink(self, path: Path) -> None:
        del self._file_of_name[path.name]
        change = self._begin(Change(0, None, "unlink", names=(path.name,)))
        super().unlink(path)
        self._end(change)

    def sync_folder(self, folder: Path) -> None:
        with self._lock:
            begin = self._tick()
        if "folder" in self._lies:
            return
        with self._lock:
            self.log.syncs.append(Sync(None, begin, self._tick()))


def leftovers(disk: RecordingDisk, instant: int, rng: random.Random, target: Path) -> None:
    """Builds in `target` what may be found after power failed at the instant."""
    synced: dict[int | None, int] = {}  # file -> changes that ended before this are durable
    for sync in disk.log.syncs:
        if sync.end <= instant:
            synced[sync.file] = max(synced.get(sync.file, 0), sync.begin)
    files = {number: bytearray(disk.start[name]) for name, number in disk.start_files.items()}
    names = dict(disk.start_files)
    mood = rng.choice(("nothing", "everything", "any", "any", "torn", "torn"))
    pending_files: list[Change] = []
    pending_names: list[Change] = []
    for change in disk.log.changes:
        if change.begin > instant:
            continue
        durable = change.end < synced.get(change.file, 0)
        if change.file is None:
            if durable:
                _apply_name(names, change)
            else:
                pending_names.append(change)
        elif durable:
            _apply(files.setdefault(change.file, bytearray()), change, None)
        else:
            pending_files.append(change)
    keep = {"nothing": 0, "everything": len(pending_names)}.get(mood, -1)
    for change in pending_names[: rng.randint(0, len(pending_names)) if keep < 0 else keep]:
        _apply_name(names, change)
    if mood not in ("nothing", "everything"):
        rng.shuffle(pending_files)
    for change in pending_files:
        assert change.file is not None
        fate = (
            "whole"
            if mood == "everything"
            else "lost"
            if mood == "nothing"
            else rng.choice(("lost", "whole", "torn"))
        )
        if fate == "whole":
            _apply(files.setdefault(change.file, bytearray()), change, None)
        elif fate == "torn" and mood == "torn":
            _apply(files.setdefault(change.file, bytearray()), change, rng)
    target.mkdir()
    for name, number in names.items():
        (target / name).write_bytes(files.get(number, b""))


def _apply_name(names: dict[str, int], change: Change) -> None:
    if change.kind == "create":
        names[change.names[0]] = change.target
    elif change.kind == "unlink":
        names.pop(change.names[0], None)
    else:
        names.pop(change.names[0], None)
        names[change.names[1]] = change.target


def _apply(file: bytearray, change: Change, tear: random.Random | None) -> None:
    if change.kind == "size":
        _resize(file, change.offset)
        return
    end = change.offset + len(change.data)
    if len(file) < end:
        _resize(file, end)
    if tear is None:
        file[change.offset : end] = change.data
        return
    sector = tear.choice((512, 4096))
    for start in range(change.offset - change.offset % sector, end, sector):
        low, high = max(start, change.offset), min(start + sector, end)
        fate = tear.random()
        if fate < 0.45:
            file[low:high] = change.data[low - change.offset : high - change.offset]
        elif fate < 0.55:  # the size is there, the bytes are what lay on the disk before
            file[low:high] = tear.randbytes(high - low)


def _resize(file: bytearray, nbytes: int) -> None:
    if len(file) > nbytes:
        del file[nbytes:]
    else:
        file.extend(bytes(nbytes - len(file)))
