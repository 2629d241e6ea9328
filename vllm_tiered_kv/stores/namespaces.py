"""What each namespace takes up in a store, and whose slabs its blocks lie in.

A quota is kept in whole slabs, so a namespace that has one does not share them. All others do, or
each of them would take a whole slab for its first block: docs/adr/0005.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import NAMESPACE_BYTES, StoreKey, namespace_of

HasQuota = Callable[[bytes], bool]  # asked of a namespace, before its first block and ever after
QuotaOf = Callable[[bytes], "int | None"]  # the bytes; of those that have one

SHARED = b""


def any_may(namespace: bytes) -> bool:
    """Quotas may be set for every namespace."""
    return True


def all_share(namespace: bytes) -> bool:
    """There are no quotas."""
    return False


def owner_of(key: bytes, has_quota: HasQuota) -> bytes:
    namespace = namespace_of(StoreKey(key))
    return namespace if has_quota(namespace) else SHARED


def require_own(namespace: bytes, has_quota: HasQuota) -> None:
    if not has_quota(namespace):
        raise ValueError(f"namespace {namespace.hex()} shares its slabs: it cannot have a quota")


class NamespaceUsage:
    """Blocks and the bytes of their slots, by the first bytes of their keys. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()

    def add(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] += 1
        self._bytes[namespace] += nbytes

    def add_rows(self, keys: NDArray[np.uint8], nbytes: NDArray[np.int64]) -> None:
        """Many at once: a key in each row, zeros behind it."""
        heads = np.ascontiguousarray(keys[:, :NAMESPACE_BYTES]).view("<u8,<u8").ravel()
        first, groups = np.zeros(min(1, len(heads)), np.int64), np.zeros(len(heads), np.int64)
        if len(heads) and not (heads == heads[0]).all():
            _, first, groups = np.unique(heads, return_index=True, return_inverse=True)
        for number, row in enumerate(first.tolist()):
            namespace = keys[row, :NAMESPACE_BYTES].tobytes()
            is_of_it = groups == number
            self._blocks[namespace] += int(np.count_nonzero(is_of_it))
            self._bytes[namespace] += int(nbytes[is_of_it].sum())

    def remove(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] -= 1
        self._bytes[namespace] -= nbytes
        if not self._blocks[namespace]:
            del self._blocks[namespace], self._bytes[namespace]

    def snapshot(self) -> dict[bytes, tuple[int, int]]:
        return {name: (count, self._bytes[name]) for name, count in self._blocks.items()}
