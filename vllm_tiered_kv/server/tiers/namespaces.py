"""The registered namespaces, with the shape of their keys and blocks.

A namespace's name is a hash that covers its shape. Two clients that disagree on the shape under one
name reveal a bug, so the second is refused.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from vllm_tiered_kv.core.store import key_prefix
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.remote.address import without_process
from vllm_tiered_kv.server.tiers.namespace_file import FILE, NamespaceFile, Shape, read
from vllm_tiered_kv.wire.messages import Hello

logger = logging.getLogger(__name__)

_MAX_ROWS = 100  # keeps the reply within the limits of the protocol


class Namespaces:
    """Remembers the shape of each namespace, in a file if there is a folder. The gateway calls it
    on the reactor's thread."""

    def __init__(self, folder: Path | None, max_namespaces: int) -> None:
        self._max_namespaces = max_namespaces
        self._seen: set[bytes] = set()  # logged
        self._shapes: OrderedDict[bytes, Shape] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # the file's thread reads `_shapes`
        self._file: NamespaceFile | None = None
        if folder is not None:
            self._shapes.update(read(folder / FILE))
            self._file = NamespaceFile(folder / FILE, self._snapshot)

    def __len__(self) -> int:
        return len(self._shapes)

    def admit(self, hello: Hello, read_only: bool = False) -> Shape:
        """The shape of this client's blocks; ProtocolError if the namespace has another one.

        A client that names no block lengths only looks up blocks of others. Neither it nor a
        read-only client defines the shape for clients that write.
        """
        announced = Shape(hello.key_bytes, frozenset(hello.block_bytes), hello.layout, hello.client)
        known = self._shapes.get(hello.namespace)
        if known is not None:
            self._store(hello.namespace, known)
            _require_equal(hello.namespace, known, announced)
        if announced.block_bytes and not read_only and announced != known:
            self._store(hello.namespace, announced)
            if self._file is not None:
                self._file.change()
        if hello.namespace in self._shapes and hello.namespace not in self._seen:
            self._seen.add(hello.namespace)
            logger.info(
                "namespace %s: %r, blocks of %s bytes",
                key_prefix(hello.namespace).hex(),  # the name that quotas use
                hello.client,
                sorted(self._shapes[hello.namespace].block_bytes),
            )
        return known or announced

    def rows(
        self, usages: Mapping[str, Mapping[bytes, tuple[int, int]]], max_rows: int = _MAX_ROWS
    ) -> dict[str, dict[str, int | str]]:
        """Client, model and usage per tier of each namespace, largest first. From any thread."""
        clients = {key_prefix(name): shape.client for name, shape in self._snapshot().items()}
        prefixes = {*clients, *(prefix for usage in usages.values() for prefix in usage)}

        def size(prefix: bytes) -> int:
            return sum(usage.get(prefix, (0, 0))[1] for usage in usages.values())

        rows = {}
        for prefix in sorted(prefixes, key=size, reverse=True)[:max_rows]:
            client = clients.get(prefix, "")
            row: dict[str, int | str] = {"client": client, "model": without_process(client)}
            for tier, usage in usages.items():
                row[f"{tier}_blocks"], row[f"{tier}_bytes"] = usage.get(prefix, (0, 0))
            rows[prefix.hex()] = row
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _store(self, namespace: bytes, shape: Shape) -> None:
        """Stores a shape as the most recently used one."""
        with self._lock:
            self._shapes.pop(namespace, None)
            if len(self._shapes) >= self._max_namespaces:
                forgotten, _ = self._shapes.popitem(last=False)
                self._seen.discard(forgotten)
            self._shapes[namespace] = shape

    def _snapshot(self) -> dict[bytes, Shape]:
        with self._lock:
            return self._shapes.copy()


def _require_equal(namespace: bytes, known: Shape, announced: Shape) -> None:
    name = f"namespace {namespace.hex()[:16]}…"
    wrong = None
    if announced.key_bytes != known.key_bytes:
        wrong = f"keys of {known.key_bytes} bytes, not {announced.key_bytes}"
    elif announced.block_bytes and announced.layout != known.layout:
        wrong = f"the layout {known.layout!r}, not {announced.layout!r}"
    elif announced.block_bytes and announced.block_bytes != known.block_bytes:
        wrong = f"blocks of {sorted(known.block_bytes)} bytes, not {sorted(announced.block_bytes)}"
    if wrong is not None:
        raise ProtocolError(ErrorCode.MISMATCH, f"{name} is known with {wrong}")
