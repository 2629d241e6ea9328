"""Files this process knows to be whole and on disk, so that it need not read them to say so.

A file that somebody else wrote, or that was not synced, may be of the right length and hold
nothing: a power cut can keep a file's size and lose its bytes. Known is what this process wrote and
synced, or synced and then read. A file that was exchanged or touched since is not known any more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.tree import Identity

_REMEMBERED_FILES = 65536


class KnownDurable:
    """From any thread. What was noted longest ago is forgotten first."""

    def __init__(self) -> None:
        self._files: OrderedDict[StoreKey, Identity] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: StoreKey, file: Identity) -> None:
        with self._lock:
            self._files[key] = file
            self._files.move_to_end(key)
            while len(self._files) > _REMEMBERED_FILES:
                self._files.popitem(last=False)

    def knows(self, key: StoreKey, file: Identity) -> bool:
        with self._lock:
            return self._files.get(key) == file
