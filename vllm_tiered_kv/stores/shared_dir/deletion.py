"""Deleting blocks for good, also out of the hands of a collector.

A collector that removes a block renames it first, and links it back when it was used meanwhile
(`removal`); one that died leaves that to the next. A block deleted in between would come back. So
what is in the trash goes too, and then the name once more, for what was linked back while the trash
was looked through.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps
from vllm_tiered_kv.stores.shared_dir.tree import Tree
from vllm_tiered_kv.stores.shared_dir.usage import UsageTracker


class Deleter:
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
