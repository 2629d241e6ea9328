"""The folder of a store: its lock, its superblock, the names of its files.

The superblock is written first and never changed, so a folder with other files and without one is
not ours, whatever it is, and is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from vllm_tiered_kv.errors import StoreFormatError, StoreLockedError
from vllm_tiered_kv.stores.ssd.disk import Disk, open_file, write_all
from vllm_tiered_kv.stores.ssd.record_format import Superblock

LOCK = "LOCK"
FORMAT = "FORMAT"
DATA = "data"
JOURNAL = "journal"
TEMPORARY = ".tmp"

_MAX_SUPERBLOCK = 4096


class FolderLock:
    """Held for the life of a store. The kernel lets go of it when the process dies."""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        """With `read_only` also on a file system that was mounted so, as after errors of a disk."""
        try:
            self._fd = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if not read_only or error.errno != errno.EROFS:
                raise
            self._fd = open_file(folder / LOCK, os.O_RDONLY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid_in(self._fd)
            os.close(self._fd)
            raise StoreLockedError(str(folder), pid) from None
        except OSError:
            os.close(self._fd)
            raise
        with contextlib.suppress(OSError):  # on a full disk the lock holds, it only has no name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def make_folder(folder: Path, disk: Disk) -> None:
    """Creates the folder, and makes its name durable, unless it is there."""
    if not folder.is_dir():
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        folder.mkdir(parents=True, mode=0o700)
        disk.sync_folder(folder.parent)


def read_superblock(folder: Path) -> Superblock | None:
    """None for a folder with nothing in it; StoreFormatError for anything else that is not ours."""
    path = folder / FORMAT
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MAX_SUPERBLOCK)
    except FileNotFoundError:
        strangers = {entry.name for entry in folder.iterdir()} - {LOCK, FORMAT + TEMPORARY}
        strangers.discard("lost+found")  # the root of a file system made for this
        if strangers:
            some = ", ".join(sorted(strangers)[:3])
            raise StoreFormatError(
                str(folder), f"it has no FORMAT file, but others ({some})"
            ) from None
        return None
    try:
        return Superblock.decode(data)
    except ValueError as error:
        raise StoreFormatError(str(folder), str(error)) from None


def write_superblock(folder: Path, superblock: Superblock, disk: Disk) -> None:
    publish(folder, FORMAT, superblock.encode(), disk)


def publish(folder: Path, name: str, contents: bytes, disk: Disk) -> None:
    """Makes a whole file appear under its name, durably, or not at all."""
    temporary = folder / (name + TEMPORARY)
    fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, memoryview(contents), 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, folder / name)
    disk.sync_folder(folder)
