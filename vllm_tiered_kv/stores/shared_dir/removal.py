"""Removes a block file only if it is still the file that was examined; deletes blocks for clients.

File systems have no "unlink if unchanged". Between the examination of a block and its unlink,
another collector may remove it and a writer publish the key again, or a reader may use it.
Therefore a removal has three steps:

1. Rename the file to a unique trash name. From now on no reader finds the block, and only this
   process handles the renamed file.
2. Open the trash file and compare inode and mtime with those seen before. It must be opened:
   network file systems may answer a stat from a cache, but ask the server at an open.
3. If they are equal, unlink the trash file. Otherwise link it back to its name and unlink the trash
   name. If the key was published meanwhile, the link fails because the name exists, with the same
   content.

A reader that has the file open continues to read. A reader between steps 1 and 3 sees a miss, and a
writer publishes the block again. If a collector dies between steps 1 and 3, the trash name contains
what was seen, and any other collector continues with step 2 (`settle`). Two that do so at once do
not interfere, because each step on a trash name succeeds for only one of them.

A block that is deleted while it is in the trash of a collector would return. Therefore `Deleter`
also removes the trash files of the block, and then its name once more, in case the block was linked
back in between.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts, UsageTracker
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent
from vllm_tiered_kv.stores.shared_dir.tree import Identity, Tree


class Removal(enum.Enum):
    """The result of a removal."""

    REMOVED = enum.auto()
    GONE = enum.auto()  # another process removed it
    SPARED = enum.auto()  # it changed: used or published again
    FAILED = enum.auto()  # the file system returned an error, which is counted


class Remover:
    """Removes blocks, for readers that find damage and for collectors. Thread-safe."""

    def __init__(self, tree: Tree, ops: FileOps, counts: EventCounts, usage: UsageTracker) -> None:
        self._tree = tree
        self._ops = ops
        self._counts = counts
        self._usage = usage

    def remove(self, key: StoreKey, seen: Identity) -> Removal:
        """Removes the block of this key if it is still the file that was seen."""
        path = self._tree.block_path(key)
        trash = self._tree.trash_path(key, seen)
        try:
            status = self._ops.lstat(path)
            if Identity.of(status) != seen:
                return Removal.SPARED  # without making the block invisible for a moment
            try:
                self._ops.rename(path, trash)
            except OSError:
                # A network file system may report an error for a rename that succeeded.
                if not self._exists(trash):
                    raise
        except OSError as error:
            return self._outcome_of(error)
        outcome = self.settle(key, trash, seen)
        if outcome is Removal.REMOVED:
            self._usage.changed(-1, -status.st_size)
        return outcome

    def settle(self, key: StoreKey, trash: str, seen: Identity) -> Removal:
        """Unlinks a trash file if it is the file that was seen; otherwise restores it."""
        try:
            if self._identity(trash) == seen:
                self._ops.unlink(trash)
                return Removal.REMOVED
            self._restore(trash, self._tree.block_path(key))
        except OSError as error:
            return self._outcome_of(error)
        return Removal.SPARED

    def _identity(self, path: str) -> Identity:
        fd = self._ops.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return Identity.of(self._ops.fstat(fd))
        finally:
            self._ops.close(fd)

    def _restore(self, trash: str, path: str) -> None:
        try:
            self._ops.link(trash, path)
        except FileExistsError:
            pass
        except OSError as error:
            if is_absent(error):
                return  # another collector settled it
            if not self._exists(path):  # no hard links here
                self._ops.rename(trash, path)
                return
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(trash)

    def _exists(self, path: str) -> bool:
        try:
            self._ops.lstat(path)
        except OSError:
            return False
        return True

    def _outcome_of(self, error: OSError) -> Removal:
        if is_absent(error):
            return Removal.GONE
        self._counts.add(Event.REMOVE_ERROR)
        return Removal.FAILED


class Deleter:
    """Deletes blocks for clients. Thread-safe."""

    def __init__(self, tree: Tree, ops: FileOps, usage: UsageTracker) -> None:
        self._tree = tree
        self._ops = ops
        self._usage = usage

    def delete(self, keys: Sequence[StoreKey]) -> list[bool | OSError]:
        """Deletes blocks, all of one shard. Returns for each whether it was here, or the error
        because of which it may remain."""
        found: dict[StoreKey, bool | OSError] = dict.fromkeys(keys, False)
        self._unlink_names(found)
        try:
            for key, path in self._tree.trash_in(self._tree.shard_of(keys[0])):
                if key in found:
                    self._unlink(key, path, found)
        except OSError as error:
            return [error] * len(found)
        self._unlink_names(found)
        return list(found.values())

    def _unlink_names(self, found: dict[StoreKey, bool | OSError]) -> None:
        for key in found:
            self._unlink(key, self._tree.block_path(key), found)

    def _unlink(self, key: StoreKey, path: str, found: dict[StoreKey, bool | OSError]) -> None:
        try:
            size = self._ops.lstat(path).st_size
            self._ops.unlink(path)
        except OSError as error:
            # Not `is_absent`: with a stale handle of the folder, the file may still exist.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                found[key] = error
            return
        if found[key] is not True:  # otherwise this was another name of the same block
            found[key] = True
            self._usage.changed(-1, -size)
