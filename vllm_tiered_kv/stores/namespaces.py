"""Usage of a store by namespace, and which namespaces have slabs of their own.

Quotas are counted in whole slabs, so a namespace with a quota does not share its slabs. All others
share slabs; otherwise each would take a whole slab for its first block (docs/adr/0005).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import NAMESPACE_BYTES, StoreKey, namespace_of

QuotaOf = Callable[[bytes], "int | None"]
"""The quota of a namespace in bytes; None: it has none and shares slabs. The answer for a namespace
must not change while a store is open."""

_MAX_EVICTED = 1000  # namespaces whose evictions are counted; clients may invent any number
_MAX_EVICTED_SHOWN = 100

SHARED = b""
"""The owner of slabs that all namespaces without a quota share."""


def no_quota(namespace: bytes) -> None:
    """A `QuotaOf` for stores without quotas."""
    return


def owner_of(key: bytes, quota_of: QuotaOf) -> bytes:
    """Returns the owner of the slabs in which a block with this key is stored."""
    namespace = namespace_of(StoreKey(key))
    return SHARED if quota_of(namespace) is None else namespace


class NamespaceUsage:
    """Counts blocks and the bytes of their slots per namespace.

    Each store owns one and calls it under its lock.
    """

    def __init__(self) -> None:
        self._blocks: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()
        self._evicted: Counter[bytes] = Counter()  # of namespaces without blocks, too

    def add(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] += 1
        self._bytes[namespace] += nbytes

    def add_rows(self, keys: NDArray[np.uint8], nbytes: NDArray[np.int64]) -> None:
        """Adds many blocks at once: each row of `keys` is a key, padded with zeros."""
        heads = np.ascontiguousarray(keys[:, :NAMESPACE_BYTES]).view("<u8,<u8").ravel()
        first, groups = np.zeros(min(1, len(heads)), np.int64), np.zeros(len(heads), np.int64)
        if len(heads) and not (heads == heads[0]).all():
            _, first, groups = np.unique(heads, return_index=True, return_inverse=True)
        for number, row in enumerate(first.tolist()):
            namespace = keys[row, :NAMESPACE_BYTES].tobytes()
            is_member = groups == number
            self._blocks[namespace] += int(np.count_nonzero(is_member))
            self._bytes[namespace] += int(nbytes[is_member].sum())

    def remove(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] -= 1
        self._bytes[namespace] -= nbytes
        if not self._blocks[namespace]:
            del self._blocks[namespace], self._bytes[namespace]

    def count_eviction(self, key: bytes) -> None:
        """In addition to `remove`."""
        self._evicted[key[:NAMESPACE_BYTES]] += 1
        if len(self._evicted) > _MAX_EVICTED:
            self._evicted = Counter(dict(self._evicted.most_common(_MAX_EVICTED // 2)))

    def evictions(self) -> dict[bytes, int]:
        """Blocks evicted so far, of the namespaces with the most."""
        return dict(self._evicted.most_common(_MAX_EVICTED_SHOWN))

    def snapshot(self) -> dict[bytes, tuple[int, int]]:
        return {name: (count, self._bytes[name]) for name, count in self._blocks.items()}
