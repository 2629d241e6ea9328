"""Makes files of a backing folder hang when they are opened."""

from __future__ import annotations

import os
from pathlib import Path

from tests.daemon.raw_client import NAMESPACE, key
from vllm_tiered_kv.core.store import StoreKey, key_prefix
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore

HUNG_BY_PIPES = (
    "-c",
    """
import os, stat
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps


def lstat(self, path):
    status = os.lstat(path)
    return os.stat_result((stat.S_IFREG, *status[1:])) if stat.S_ISFIFO(status[0]) else status


FileOps.open = lambda self, path, flags, mode=0o660: os.open(path, flags | os.O_CLOEXEC, mode)
FileOps.lstat = lstat
raise SystemExit(cli.main())
""",
)
"""Program of a daemon that treats named pipes as files: opening one hangs as on dead NFS."""


def hang_at(shared: Path, *numbers: int) -> list[Path]:
    """Replaces the files of these blocks by pipes; a HUNG_BY_PIPES daemon hangs opening them."""
    store = SharedDirStore(SharedDirSettings(str(shared)))
    pipes = []
    for n in numbers:
        path = Path(store.tree.block_path(StoreKey(key_prefix(NAMESPACE) + key(n))))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        pipes.append(path)
    store.close()
    return pipes
