"""How much of a store each namespace takes up, counted as blocks come and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm_tiered_kv.core.store import NAMESPACE_BYTES


class NamespaceUsage:
    """Blocks and the bytes of their slots, by the first bytes of their keys. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: Counter[bytes] = Counter()
        self._bytes: Counter[bytes] = Counter()

    def add(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] += 1
        self._bytes[namespace] += nbytes

    def add_all(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        for (namespace, nbytes), count in Counter(
            (key[:NAMESPACE_BYTES], nbytes) for key, nbytes in blocks
        ).items():
            self._blocks[namespace] += count
            self._bytes[namespace] += count * nbytes

    def remove(self, key: bytes, nbytes: int) -> None:
        namespace = key[:NAMESPACE_BYTES]
        self._blocks[namespace] -= 1
        self._bytes[namespace] -= nbytes
        if not self._blocks[namespace]:
            del self._blocks[namespace], self._bytes[namespace]

    def snapshot(self) -> dict[bytes, tuple[int, int]]:
        return {name: (count, self._bytes[name]) for name, count in self._blocks.items()}
