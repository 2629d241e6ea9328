"""The file with the shape of each namespace, written by a thread of its own.

The file is always replaced as a whole, so it is never partial. Nothing waits for it: without the
file, or with an old one, only a check is skipped. A failed write is retried until it succeeds.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.stores.ssd.disk import OsDisk, open_file

logger = logging.getLogger(__name__)

FILE = "namespaces.json"
_VERSION = 1
_PAUSE_S = 1.0  # between two writes, so that one write covers many changes
_MAX_PAUSE_S = 64.0  # each failed write doubles the pause up to this


@dataclass(frozen=True)
class Shape:
    """The sizes and layout of a namespace's keys and blocks, as a client announced them."""

    key_bytes: int
    block_bytes: frozenset[int]
    layout: str
    client: str = ""  # the last client that announced writes; an engine's name has its model


class NamespaceFile:
    """Writes what `snapshot` returns soon after `change`, and at the latest in `close`.

    It logs the first failure, the recovery, and a failure of the last write.
    """

    def __init__(self, path: Path, snapshot: Callable[[], dict[bytes, Shape]]) -> None:
        """`snapshot` is called from another thread."""
        self._path = path
        self._snapshot = snapshot
        self._news = threading.Condition()
        self._has_changed = False
        self._is_closing = False
        self._writer = threading.Thread(
            target=self._write_changes, name="tiered-kv-namespaces", daemon=True
        )
        self._writer.start()

    def change(self) -> None:
        """Schedules a write and returns at once. Any number of calls cause a single write."""
        with self._news:
            self._has_changed = True
            self._news.notify()

    def close(self) -> None:
        """Returns when everything is written, or the last attempt has failed."""
        with self._news:
            self._is_closing = True
            self._news.notify()
        self._writer.join()

    def _write_changes(self) -> None:
        pause_s, has_failed = _PAUSE_S, False
        while True:
            with self._news:
                self._news.wait_for(lambda: self._has_changed or self._is_closing)
                if not self._has_changed:
                    return
                self._has_changed = False
                is_last = self._is_closing
            try:
                _write(self._path, self._snapshot())
            except OSError as error:
                if is_last or not has_failed:
                    logger.warning("%s cannot be written: %s", self._path, error.strerror)
                if is_last:
                    return
                pause_s, has_failed = min(2 * pause_s, _MAX_PAUSE_S), True
                with self._news:
                    self._has_changed = True  # still to be written
            else:
                if has_failed:
                    logger.warning("%s is written again", self._path)
                pause_s, has_failed = _PAUSE_S, False
            with self._news:
                self._news.wait_for(lambda: self._is_closing, pause_s)


def _write(path: Path, shapes: dict[bytes, Shape]) -> None:
    namespaces = {
        name.hex(): {
            "key_bytes": shape.key_bytes,
            "block_bytes": sorted(shape.block_bytes),
            "layout": shape.layout,
            "client": shape.client,
        }
        for name, shape in shapes.items()
    }
    temporary = path.with_suffix(".tmp")
    # Private like the blocks beside it; never follows a symbolic link that another user put there.
    with os.fdopen(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        # Writes piece by piece: `json.dumps` would hold the GIL for too long.
        json.dump({"version": _VERSION, "namespaces": namespaces}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    OsDisk().sync_folder(path.parent)


def read(path: Path) -> dict[bytes, Shape]:
    """Reads the file; a missing or damaged one counts as empty."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY)) as file:
            content: Any = json.load(file)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']} is not supported")
        return {
            bytes.fromhex(name): Shape(
                int(shape["key_bytes"]),
                frozenset(map(int, shape["block_bytes"])),
                str(shape["layout"]),
                str(shape.get("client", "")),
            )
            for name, shape in content["namespaces"].items()
        }
    except FileNotFoundError:
        pass
    except Exception as error:  # the content may be anything
        logger.warning("%s is not used: %s", path, error)
    return {}
