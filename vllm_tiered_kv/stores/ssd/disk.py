"""Every call of the store that reads or changes its files.

The store never calls `os` directly. Tests replace the disk by one that fails, or by one that
records the order of writes, syncs and renames, so that they can rebuild and recover every state
that a power loss could leave.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import os
import stat
from pathlib import Path


def open_file(path: Path, flags: int) -> int:
    """Opens a regular file. Others who can write to the folder must not be able to redirect writes
    with a symbolic link, or to block the daemon with a FIFO."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a symbolic link", str(path)) from error
        if error.errno == errno.ENXIO:
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_regular(path)
    return fd


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, f"{path} is not a regular file", str(path))


class OsDisk:
    """The disk of the operating system. Calls raise OSError; reads and writes return the number of
    bytes."""

    native = True
    """Whether native code may use the descriptors directly, bypassing `read` and `write`."""

    def __init_subclass__(cls) -> None:
        cls.native = False  # a subclass overrides calls, so none may bypass it

    def __init__(self) -> None:
        # `os.posix_fallocate` writes zeros to every page if the file system cannot allocate; the
        # system call returns an error instead.
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def open(self, path: Path, flags: int) -> int:
        return open_file(path, flags)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwritev(fd, [data], offset)

    def sync(self, fd: int) -> None:
        """Returns when the file's contents and size are durable (fdatasync)."""
        os.fdatasync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves disk space for the first bytes of the file and makes it at least that long."""
        while self._fallocate(fd, 0, 0, nbytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_linked(self, fd: int) -> bool:
        """Whether the file still has a name. Data written to a deleted file is lost on close."""
        return os.fstat(fd).st_nlink > 0

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Returns when names created, renamed or removed in the folder are durable."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_all(disk: OsDisk, fd: int, into: memoryview, offset: int) -> None:
    check_read(disk.read(fd, into, offset), into.nbytes, offset)


def write_all(disk: OsDisk, fd: int, data: memoryview, offset: int) -> None:
    check_written(disk.write(fd, data, offset), data.nbytes, offset)


def check_read(moved: int, nbytes: int, offset: int) -> None:
    """Raises for a short read: the file is shorter than it must be."""
    if moved != nbytes:
        raise OSError(errno.EIO, f"read {moved} of {nbytes} bytes at {offset}")


def check_written(moved: int, nbytes: int, offset: int) -> None:
    """Raises for a short write, usually because the disk is full."""
    if moved != nbytes:
        raise OSError(errno.ENOSPC, f"wrote {moved} of {nbytes} bytes at {offset}")
