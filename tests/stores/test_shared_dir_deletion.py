"""Deletion of blocks from a shared directory, also while collectors are removing them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.stores.contract import assert_holds, assert_lacks, chain_items, chain_keys, item
from tests.stores.contract import store_key as named
from tests.stores.shared_dir_cases import FaultyOps, failing, file_of, litter, opened
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.stores.shared_dir.block_files import Removal
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.tree import Identity

SIZE = 5000
KEY = named("a")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.mark.parametrize("call", ["lstat", "unlink"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ESTALE, errno.EIO, errno.EBUSY])
def test_delete_that_fails_raises(root: Path, call: str, code: int) -> None:
    keys = chain_keys("a", 3)
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put(chain_items(keys, SIZE))
        stays = str(file_of(store, keys[1]))
        refuse = failing(code)
        ops.faults[call] = lambda path: refuse() if path == stays else None
        with pytest.raises(NotDeletedError) as told:
            store.delete(keys)
        assert told.value.blocks == 1
        assert store.counts.snapshot()[Event.REMOVE_ERROR] == 1
        ops.faults.clear()
        assert store.contains(keys) == [False, True, False], "all others are gone"
        assert store.delete(keys) == 1


def test_delete_of_concurrently_deleted_block_succeeds(root: Path) -> None:
    ops = FaultyOps(unlink=failing(errno.ENOENT))
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)])
        assert store.delete([KEY]) == 0


@pytest.mark.parametrize("moment", ["lstat", "unlink", "scandir"])
def test_collector_does_not_restore_deleted_block(root: Path, moment: str) -> None:
    """It died, or is slow, with a block in its hands that was used since it looked: whenever
    another one finishes for it while the block is deleted, the block is gone."""
    ops = FaultyOps()
    with opened(root) as other, opened(root, ops) as store:
        other.put([item(KEY, SIZE)])
        before = Identity(1, 2)
        trash = other.tree.trash_path(KEY, before)
        os.rename(file_of(other, KEY), trash)
        assert_lacks(store, KEY, SIZE)

        def put_back(*args: Any) -> None:
            ops.faults.clear()
            assert other.files.settle(KEY, trash, before) is Removal.SPARED

        ops.faults[moment] = put_back
        assert store.delete([KEY, KEY]) == 1
        assert_lacks(other, KEY, SIZE)
        assert litter(root) == []


def test_delete_removes_trash_of_dead_collector(root: Path) -> None:
    with opened(root) as store:
        store.put([item(KEY, SIZE), item(named("b"), SIZE)])
        before = store.usage()
        seen = Identity(1, 2)
        trash = store.tree.trash_path(KEY, seen)
        os.rename(file_of(store, KEY), trash)
        assert store.delete([KEY]) == 1
        assert litter(root) == []
        assert store.files.settle(KEY, trash, seen) is Removal.GONE
        assert_lacks(store, KEY, SIZE)
        assert_holds(store, named("b"), SIZE)
        assert store.usage().blocks == before.blocks - 1


def test_delete_with_unreadable_folder_raises(root: Path) -> None:
    ops = FaultyOps()
    with opened(root, ops) as store:
        store.put([item(KEY, SIZE)])
        ops.faults["scandir"] = failing(errno.EIO)
        with pytest.raises(NotDeletedError):
            store.delete([KEY])
