"""The system calls of the shared-directory store.

Tests replace them to simulate a failing disk or a network file system that returns wrong results.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP})


def is_absent(error: OSError) -> bool:
    """Whether the error means that the file does not exist, or no longer exists."""
    return error.errno in _ABSENT


class FileOps:
    """One method per system call. All may raise OSError."""

    def open(self, path: str, flags: int, mode: int = 0o660) -> int:
        # O_NONBLOCK: opening a FIFO would block; it has no effect on regular files.
        return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def preadv(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, parts, offset)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        return os.writev(fd, parts)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def touch(self, path: str) -> None:
        """Sets the times to the present of the file server, independent of the local clock."""
        os.utime(path, None, follow_symlinks=False)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o770)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def scandir(self, path: str) -> Iterator[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            yield from entries

    def syncfs(self, fd: int) -> None:
        """Writes back all data of the file system that contains `fd`."""
        if ctypes.CDLL(None, use_errno=True).syncfs(ctypes.c_int(fd)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def advance(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns the parts without their first `count` bytes, and without empty parts."""
    left = []
    for part in parts:
        done = min(count, len(part))
        count -= done
        if done < len(part):
            left.append(part[done:])
    return left


def sync_folder(ops: FileOps, path: str) -> None:
    fd = ops.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ops.fsync(fd)
    finally:
        ops.close(fd)
