"""What is known of each namespace: the shape of its keys and blocks.

The namespace's name already covers all of it. Two clients that disagree on the shape under one name
are a mistake somewhere, which is better refused than served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_tiered_kv.core.store import key_prefix
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.tiers.namespace_file import FILE, NamespaceFile, Shape, read
from vllm_tiered_kv.wire.messages import Hello

logger = logging.getLogger(__name__)

_MAX_ROWS = 100  # a reply holds a few thousand values


class Namespaces:
    """Remembers shapes; in a file where there is a folder, so that they outlive the daemon."""

    def __init__(self, folder: Path | None, most: int, on_new: Callable[[bytes], None]) -> None:
        """`on_new` is told of each namespace when it first says hello to this process."""
        self._most = most
        self._on_new = on_new
        self._met: set[bytes] = set()
        self._shapes: dict[bytes, Shape] = {}  # longest unused first
        self._lock = threading.Lock()  # for the thread that writes the file
        self._file: NamespaceFile | None = None
        if folder is not None:
            self._shapes = read(folder / FILE)
            self._file = NamespaceFile(folder / FILE, self._snapshot)

    def __len__(self) -> int:
        return len(self._shapes)

    def admit(self, hello: Hello, read_only: bool = False) -> Shape:
        """The shape of this client's blocks; ProtocolError where others know another one.

        A client that names no block lengths only looks up what others have put. Neither its word
        nor that of one that may only read binds those who write.
        """
        said = Shape(hello.key_bytes, frozenset(hello.block_bytes), hello.layout, hello.client)
        known = self._shapes.get(hello.namespace)
        if known is not None:
            self._keep(hello.namespace, known)
            _require_equal(hello.namespace, known, said)
        if said.block_bytes and not read_only and said != known:
            self._keep(hello.namespace, said)
            if self._file is not None:
                self._file.change()
        if hello.namespace in self._shapes and hello.namespace not in self._met:
            self._met.add(hello.namespace)
            logger.info(
                "namespace %s: %r, blocks of %s bytes",
                key_prefix(hello.namespace).hex(),  # as quotas name it
                hello.client,
                sorted(self._shapes[hello.namespace].block_bytes),
            )
            self._on_new(hello.namespace)
        return known or said

    def rows(
        self, usages: Mapping[str, Mapping[bytes, tuple[int, int]]], most: int = _MAX_ROWS
    ) -> dict[str, dict[str, int | str]]:
        """Who uses each namespace and how much of each tier, the largest first. From any thread."""
        clients = {key_prefix(name): shape.client for name, shape in self._snapshot().items()}
        prefixes = {*clients, *(prefix for usage in usages.values() for prefix in usage)}

        def size(prefix: bytes) -> int:
            return sum(usage.get(prefix, (0, 0))[1] for usage in usages.values())

        rows = {}
        for prefix in sorted(prefixes, key=size, reverse=True)[:most]:
            row: dict[str, int | str] = {"client": clients.get(prefix, "")}
            for tier, usage in usages.items():
                row[f"{tier}_blocks"], row[f"{tier}_bytes"] = usage.get(prefix, (0, 0))
            rows[prefix.hex()] = row
        return rows

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _keep(self, namespace: bytes, shape: Shape) -> None:
        """As the one used last."""
        with self._lock:
            self._shapes.pop(namespace, None)
            if len(self._shapes) >= self._most:
                forgotten = next(iter(self._shapes))
                del self._shapes[forgotten]
                self._met.discard(forgotten)
            self._shapes[namespace] = shape

    def _snapshot(self) -> dict[bytes, Shape]:
        with self._lock:
            return self._shapes.copy()


def _require_equal(namespace: bytes, known: Shape, said: Shape) -> None:
    name = f"namespace {namespace.hex()[:16]}…"
    wrong = None
    if said.key_bytes != known.key_bytes:
        wrong = f"keys of {known.key_bytes} bytes, not {said.key_bytes}"
    elif said.block_bytes and said.layout != known.layout:
        wrong = f"the layout {known.layout!r}, not {said.layout!r}"
    elif said.block_bytes and said.block_bytes != known.block_bytes:
        wrong = f"blocks of {sorted(known.block_bytes)} bytes, not {sorted(said.block_bytes)}"
    if wrong is not None:
        raise ProtocolError(ErrorCode.MISMATCH, f"{name} is known with {wrong}")
