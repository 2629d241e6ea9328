"""Publishes blocks: writes a temporary file, then links it to its name, so that readers never see
a partial block.

`link` does not replace a file, so a published block never changes, and one of two concurrent
writers wins. Network file systems may execute a link and report an error, or execute it twice and
report that the name exists. Therefore the result is determined by whether the name and the
temporary file have the same inode.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, advance, is_absent
from vllm_tiered_kv.stores.shared_dir.removal import Remover
from vllm_tiered_kv.stores.shared_dir.synced_files import SyncedFiles
from vllm_tiered_kv.stores.shared_dir.tree import Identity, Tree

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)
_FOLDER_ATTEMPTS = 3  # a collector may remove an empty folder just after it was made


class Published(enum.Enum):
    """The result of `Publisher.publish`."""

    NEW = enum.auto()
    TAKEN = enum.auto()  # another writer published this key first


class Publisher:
    """Publishes blocks for `SharedDirStore`, and adds synced ones to `durable`. Thread-safe."""

    def __init__(self, tree: Tree, ops: FileOps, durable: SyncedFiles, remover: Remover) -> None:
        self._tree = tree
        self._ops = ops
        self._durable = durable
        self._remover = remover

    def publish(self, key: StoreKey, header: bytes, payload: memoryview, sync: bool) -> Published:
        """Writes and publishes a block. Raises OSError if that fails, and then leaves nothing."""
        temp, fd = self._open_temp(key)
        path = self._tree.block_path(key)
        try:
            synced = self._write(fd, header, payload, sync)
            outcome = self._give_name(temp, path)
            if synced is not None and outcome is Published.NEW:
                self._sync_name(key, temp, path, synced)
                self._durable.note(key, synced)
        finally:
            with contextlib.suppress(OSError):  # a collector removes it later
                self._ops.unlink(temp)
        return outcome

    def sync_present(self, key: StoreKey) -> Identity | None:
        """Syncs a block that another process wrote, without verifying it.

        Returns the identity of the file, or None if it is gone. Raises OSError if the file system
        fails, and removes the block unless it is known to be durable: the next sync would succeed
        although this one lost data.
        """
        try:
            fd = self._ops.open(self._tree.block_path(key), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            if is_absent(error):
                return None
            raise
        try:
            try:
                self._ops.fsync(fd)
                self._tree.sync_shard(key)
            except OSError:
                found = Identity.of(self._ops.fstat(fd))
                if not self._durable.knows(key, found):
                    self._remover.remove(key, found)
                raise
            return Identity.of(self._ops.fstat(fd))
        finally:
            self._ops.close(fd)

    def _open_temp(self, key: StoreKey) -> tuple[str, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for _ in range(_FOLDER_ATTEMPTS):
            temp = self._tree.temp_path(key)
            try:
                return temp, self._ops.open(temp, flags)
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    self._tree.make_shard(key)
        temp = self._tree.temp_path(key)
        return temp, self._ops.open(temp, flags)

    def _write(self, fd: int, header: bytes, payload: memoryview, sync: bool) -> Identity | None:
        """Writes and closes the file. Returns its identity if it was synced, otherwise None."""
        synced = None
        try:
            parts = advance([memoryview(header), payload], 0)
            while parts:
                parts = advance(parts, self._ops.writev(fd, parts))
            if sync:
                self._ops.fsync(fd)
                synced = Identity.of(self._ops.fstat(fd))
        except BaseException:
            with contextlib.suppress(OSError):
                self._ops.close(fd)
            raise
        self._ops.close(fd)  # network file systems report a full disk or quota here
        return synced

    def _give_name(self, temp: str, path: str) -> Published:
        try:
            self._ops.link(temp, path)
        except FileExistsError:
            return Published.NEW if self._is_same_file(temp, path) else Published.TAKEN
        except OSError as error:
            if self._is_same_file(temp, path):
                return Published.NEW
            if error.errno not in _NO_LINKS:
                raise
            # This file system has no hard links. A rename may replace a block that was published
            # just now, but atomically and with the same content, so readers see no difference.
            with contextlib.suppress(FileNotFoundError):
                self._ops.lstat(path)
                return Published.TAKEN
            self._ops.rename(temp, path)
        return Published.NEW

    def _sync_name(self, key: StoreKey, temp: str, path: str, synced: Identity) -> None:
        try:
            self._tree.sync_shard(key)
        except OSError:
            # The put fails, so the block must not remain.
            if self._is_same_file(temp, path):
                self._ops.unlink(path)
            else:
                self._remover.remove(key, synced)  # without hard links it was renamed
            raise

    def _is_same_file(self, temp: str, path: str) -> bool:
        try:
            return Identity.of(self._ops.lstat(temp)) == Identity.of(self._ops.lstat(path))
        except OSError:
            return False
