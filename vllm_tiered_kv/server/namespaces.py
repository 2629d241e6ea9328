"""What is known of each namespace: the shape of its keys and blocks.

The namespace's name already covers all of it. Two clients that disagree on the shape under one name
are a mistake somewhere, which is better refused than served.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.messages import Hello

logger = logging.getLogger(__name__)

FILE = "namespaces.json"
_VERSION = 1


@dataclass(frozen=True)
class Shape:
    key_bytes: int
    block_bytes: frozenset[int]
    layout: str


class Namespaces:
    """Remembers shapes; in a file where there is a folder, so that they outlive the daemon."""

    def __init__(self, folder: Path | None, most: int, on_new: Callable[[bytes], None]) -> None:
        """`on_new` is told of each namespace when it first says hello to this process."""
        self._path = None if folder is None else folder / FILE
        self._most = most
        self._on_new = on_new
        self._met: set[bytes] = set()
        self._shapes = {} if self._path is None else _read(self._path)  # longest unused first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tiered-kv-namespaces")

    def __len__(self) -> int:
        return len(self._shapes)

    def admit(self, hello: Hello, read_only: bool = False) -> Shape:
        """The shape of this client's blocks; ProtocolError where others know another one.

        A client that names no block lengths only looks up what others have put. Neither its word
        nor that of one that may only read binds those who write.
        """
        said = Shape(hello.key_bytes, frozenset(hello.block_bytes), hello.layout)
        known = self._shapes.pop(hello.namespace, None)
        if known is not None:
            self._shapes[hello.namespace] = known
            _require_equal(hello.namespace, known, said)
        elif said.block_bytes and not read_only:
            if len(self._shapes) >= self._most:
                forgotten = next(iter(self._shapes))
                del self._shapes[forgotten]
                self._met.discard(forgotten)
            self._shapes[hello.namespace] = said
            self._save()
        if hello.namespace in self._shapes and hello.namespace not in self._met:
            self._met.add(hello.namespace)
            logger.info(
                "namespace %s: %r, blocks of %s bytes",
                hello.namespace.hex(),
                hello.client,
                sorted(self._shapes[hello.namespace].block_bytes),
            )
            self._on_new(hello.namespace)
        return known or said

    def close(self) -> None:
        self._writer.shutdown(wait=True)

    def _save(self) -> None:
        if self._path is not None:
            content = {
                "version": _VERSION,
                "namespaces": {
                    name.hex(): {
                        "key_bytes": shape.key_bytes,
                        "block_bytes": sorted(shape.block_bytes),
                        "layout": shape.layout,
                    }
                    for name, shape in self._shapes.items()
                },
            }
            self._writer.submit(_write, self._path, json.dumps(content, indent=1))


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


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)


def _read(path: Path) -> dict[bytes, Shape]:
    """Without the file, or with a damaged one, it starts from nothing: only a check is lost."""
    with contextlib.suppress(FileNotFoundError):
        try:
            content: Any = json.loads(path.read_text())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']} is not known here")
            return {
                bytes.fromhex(name): Shape(
                    int(shape["key_bytes"]),
                    frozenset(map(int, shape["block_bytes"])),
                    str(shape["layout"]),
                )
                for name, shape in content["namespaces"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            logger.warning("%s is not used: %s", path, error)
    return {}
