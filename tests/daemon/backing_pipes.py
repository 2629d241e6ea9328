"""Blocks of a backing folder that hang whoever opens them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.daemon.raw_client import NAMESPACE, key
from vllm_tiered_kv.core.store import StoreKey, key_prefix
from vllm_tiered_kv.stores.shared_dir.settings import SharedDirSettings
from vllm_tiered_kv.stores.shared_dir.store import SharedDirStore


def hang_at(shared: Path, *numbers: int) -> list[Path]:
    """Opening these blocks' files does not return: they are pipes nobody writes to."""
    store = SharedDirStore(SharedDirSettings(str(shared)))
    pipes = []
    for n in numbers:
        path = Path(store.tree.block_path(StoreKey(key_prefix(NAMESPACE) + key(n))))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        pipes.append(path)
    store.close()
    return pipes
