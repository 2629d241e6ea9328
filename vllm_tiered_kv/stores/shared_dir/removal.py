"""Removing a file only if it is the one that was looked at, and deleting a block for good.

There is no "unlink if unchanged". Between a look at a block and its unlink, another collector may
have removed it and a writer published the key anew, or a reader may have used it. So a removal
has three steps:

1. rename to a trash name that nobody else uses: from now on nobody finds the block, and whatever
   was renamed is in our hands alone;
2. open the trash and compare inode and mtime with what was seen. Opening matters: network file
   systems may answer a plain stat from a cache, but ask the server at an open;
3. the same: unlink. Not the same: link it back under its name, then unlink the trash. If the key
   was published meanwhile, the link finds the name taken, and that is the same content.

A reader that has the file open goes on reading. A reader between 1 and 3 sees a miss, a writer
publishes the block again. A collector that dies between 1 and 3 leaves a trash name that says what
was seen, and any other collector finishes from step 2 (`settle`); two that do so at once disturb
neither, as each step on a trash name succeeds for one of them.

A block that is deleted while a collector has it in the trash would come back. So a deletion
(`Deleter`) removes what is in the trash too, and then the name once more, for what was linked back
while the trash was looked through.
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
    REMOVED = enum.auto()
    GONE = enum.auto()  # someone else removed it
    SPARED = enum.auto()  # it is not what was seen: used or published since
    FAILED = enum.auto()  # the file system refused; counted


class Remover:
    """Removes blocks for readers that find damage and for collectors. From any thread."""

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
                return Removal.SPARED  # seen in time: it need not even be invisible for a moment
            try:
                self._ops.rename(path, trash)
            except OSError:
                # A network file system may report a rename as failed that it has made.
                if not self._exists(trash):
                    raise
        except OSError as error:
            return self._outcome_of(error)
        outcome = self.settle(key, trash, seen)
        if outcome is Removal.REMOVED:
            self._usage.changed(-1, -status.st_size)
        return outcome

    def settle(self, key: StoreKey, trash: str, seen: Identity) -> Removal:
        """Decides about a file in the trash: it goes if it is what was seen, else back."""
        try:
            if self._identity(trash) == seen:
                self._ops.unlink(trash)
                return Removal.REMOVED
            self._put_back(trash, self._tree.block_path(key))
        except OSError as error:
            return self._outcome_of(error)
        return Removal.SPARED

    def _identity(self, path: str) -> Identity:
        fd = self._ops.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return Identity.of(self._ops.fstat(fd))
        finally:
            self._ops.close(fd)

    def _put_back(self, trash: str, path: str) -> None:
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
    """Deletes blocks for clients. From any thread."""

    def __init__(self, tree: Tree, ops: FileOps, usage: UsageTracker) -> None:
        self._tree = tree
        self._ops = ops
        self._usage = usage

    def delete(self, keys: Sequence[StoreKey]) -> list[bool | OSError]:
        """Whether each block of these keys, all of one shard, was here; why it may still be."""
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
            # Not `is_absent`: a stale handle is of a folder that may well hold the file.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                found[key] = error
            return
        if found[key] is not True:  # else it was another name of the same block
            found[key] = True
            self._usage.changed(-1, -size)
