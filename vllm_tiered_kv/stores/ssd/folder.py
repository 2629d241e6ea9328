"""The folder of a store: file names, lock and superblock.

The superblock is written first and never changed. A folder that has other files but no superblock
is therefore not a store, and is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from vllm_tiered_kv.errors import StoreFormatError, StoreLockedError
from vllm_tiered_kv.stores.ssd.disk import OsDisk, open_file, write_all
from vllm_tiered_kv.stores.ssd.record_format import Superblock

LOCK = "LOCK"
FORMAT = "FORMAT"
DATA = "data"
JOURNAL = "journal"
TEMPORARY = ".tmp"

_MAX_SUPERBLOCK = 4096


class FolderLock:
    """The lock of an open store on its folder. The kernel releases it if the process dies."""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        """`read_only` also works on a read-only file system, as after disk errors."""
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
        with contextlib.suppress(OSError):  # on a full disk the lock works without the process id
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def make_folder(folder: Path, disk: OsDisk) -> None:
    """Creates the folder durably, unless it exists."""
    if not folder.is_dir():
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        folder.mkdir(parents=True, mode=0o700)
        disk.sync_folder(folder.parent)


def read_superblock(folder: Path) -> Superblock | None:
    """Returns None for an empty folder; raises StoreFormatError if the folder is not a store."""
    path = folder / FORMAT
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MAX_SUPERBLOCK)
    except FileNotFoundError:
        foreign = {entry.name for entry in folder.iterdir()} - {LOCK, FORMAT + TEMPORARY}
        foreign.discard("lost+found")  # the folder may be the root of a file system
        if foreign:
            some = ", ".join(sorted(foreign)[:3])
            raise StoreFormatError(
                str(folder), f"it has no FORMAT file, but other files ({some})"
            ) from None
        return None
    try:
        return Superblock.decode(data)
    except ValueError as error:
        raise StoreFormatError(str(folder), str(error)) from None


def write_superblock(folder: Path, superblock: Superblock, disk: OsDisk) -> None:
    """Creates the file atomically and durably."""
    temporary = folder / (FORMAT + TEMPORARY)
    fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, memoryview(superblock.encode()), 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, folder / FORMAT)
    disk.sync_folder(folder)
