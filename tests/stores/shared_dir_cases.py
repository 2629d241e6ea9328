"""Common helpers of the shared-directory tests: folders, faults, other users."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_tiered_kv.core.store import StoreKey, StoreUsage
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import EntryKind

NOBODY = 65534


@contextmanager
def opened(root: Path, ops: FileOps | None = None, **settings: Any) -> Iterator[SharedDirStore]:
    settings.setdefault("threads", 2)
    store = ScannedDir(SharedDirSettings(str(root), **settings), ops)
    try:
        yield store
    finally:
        store.close()


def file_of(store: SharedDirStore, key: StoreKey) -> Path:
    return Path(store.tree.block_path(key))


class ScannedDir(SharedDirStore):
    """Its usage is what is in the directory now, for the contract of all stores."""

    def usage(self) -> StoreUsage:
        found = [
            entry.status.st_size
            for namespace in self.tree.namespaces()
            for shard in self.tree.shards(namespace)
            for entry in self.tree.shard_entries(shard)
            if entry.kind is EntryKind.BLOCK
        ]
        return StoreUsage(len(found), sum(found), self.settings.capacity_bytes)


def litter(root: Path) -> list[str]:
    """Files in the tree that are neither blocks nor its own."""
    known = {"FORMAT", "clock", "collected"}
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted(p.name for p in files if p.suffix != ".blk" and p.name not in known)


class FaultyOps(FileOps):
    """A file system that fails as told: `faults[name]` is called before the call of that name.

    It may raise, or return a value that then stands for the answer; None lets the call through.
    """

    def __init__(self, **faults: Callable[..., Any]) -> None:
        self.faults = faults
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        real = object.__getattribute__(self, name)
        if name.startswith("_") or name in ("faults", "calls"):
            return real

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            answer = self.faults[name](*args) if name in self.faults else None
            return real(*args) if answer is None else answer

        return call


def failing(code: int, times: int = 1 << 30) -> Callable[..., None]:
    """Returns a fault that raises a number of times."""
    left = [times]

    def fail(*args: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code))

    return fail


def as_ordinary_user(work: Callable[[], None]) -> None:
    """Runs `work` as a user to whom file permissions apply, unlike root."""
    if os.geteuid() != 0:
        work()
        return
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
