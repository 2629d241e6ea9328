"""Layout of a shared directory.

    ROOT/tiered-kv-shared-v1/
      FORMAT                                   format version; checked when the folder is opened
      clock                                    touched to read the time of the file server
      collected                                touched when a collection starts
      blocks/<namespace>/<xx>/                 xx: one byte of a hash of the key
        <key>.blk                              a block
        .<host>-<pid>-<random>.tmp             a block being written
        .<key>.<inode>.<mtime>.<random>.trash  a block being removed

Names are hex. All three kinds of files of a block share one folder, because some file systems
refuse links or renames across folders. Other files are ignored.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_tiered_kv.core.store import StoreKey, namespace_of
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.block_format import is_key
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent, sync_folder

FOLDER = "tiered-kv-shared-v1"
MARKER = "FORMAT"
MARKER_TEXT = b"tiered-kv shared directory, format 1\n"

_ANY_VERSION = re.compile(r"tiered-kv-shared-v.*")
_NAMESPACE = re.compile(r"(?:[0-9a-f]{2}){1,16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"([0-9a-f]+)\.blk")
_TEMP = re.compile(r"\.[\w-]+-\d+-[0-9a-f]{16}\.tmp")
_TRASH = re.compile(r"\.([0-9a-f]+)\.(\d+)\.(-?\d+)\.[0-9a-f]{16}\.trash")
_HOST = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:32] or "host"


class EntryKind(enum.Enum):
    """What a file in a shard is."""

    BLOCK = enum.auto()
    TEMP = enum.auto()
    TRASH = enum.auto()
    FOREIGN = enum.auto()


@dataclass(frozen=True)
class Identity:
    """Identifies the file behind a name. A file published later has another inode or mtime."""

    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_ino, status.st_mtime_ns)


@dataclass(frozen=True)
class Entry:
    """A file found by a scan. `key` is set for blocks and trash, `condemned` for trash."""

    kind: EntryKind
    path: str
    status: os.stat_result
    key: StoreKey | None = None
    condemned: Identity | None = None

    @property
    def newest_ns(self) -> int:
        """The time of the last event: the file was written, published or used."""
        return max(self.status.st_mtime_ns, self.status.st_ctime_ns)


class Tree:
    """Paths and scans of one shared directory. Stateless, so any thread may use it."""

    def __init__(self, root: str, ops: FileOps) -> None:
        self.folder = os.path.join(root, FOLDER)
        self.blocks = os.path.join(self.folder, "blocks")
        self.clock_path = os.path.join(self.folder, "clock")
        self.collected_path = os.path.join(self.folder, "collected")
        self._ops = ops

    def block_path(self, key: StoreKey) -> str:
        return os.path.join(self.shard_of(key), f"{key.hex()}.blk")

    def shard_of(self, key: StoreKey) -> str:
        shard = f"{xxh3_64(key) & 0xFF:02x}"
        return os.path.join(self.blocks, namespace_of(key).hex(), shard)

    def temp_path(self, key: StoreKey) -> str:
        name = f".{_HOST}-{os.getpid()}-{secrets.token_hex(8)}.tmp"
        return os.path.join(self.shard_of(key), name)

    def trash_path(self, key: StoreKey, seen: Identity) -> str:
        """The name contains the identity of the file, so that any host can finish the removal if
        the collector dies."""
        name = f".{key.hex()}.{seen.inode}.{seen.mtime_ns}.{secrets.token_hex(8)}.trash"
        return os.path.join(self.shard_of(key), name)

    def make_shard(self, key: StoreKey) -> None:
        shard = self.shard_of(key)
        for folder in (os.path.dirname(shard), shard):
            with contextlib.suppress(FileExistsError):
                self._ops.mkdir(folder)

    def sync_shard(self, key: StoreKey) -> None:
        """Makes the names in the shard, and its parent folders, durable."""
        shard = self.shard_of(key)
        for folder in (shard, os.path.dirname(shard), self.blocks):
            sync_folder(self._ops, folder)

    def namespaces(self) -> Iterator[str]:
        return self._folders(self.blocks, _NAMESPACE)

    def shards(self, namespace: str) -> Iterator[str]:
        return self._folders(namespace, _SHARD)

    def shard_entries(self, shard: str) -> Iterator[Entry]:
        for found in self._scan(shard):
            try:
                status = found.stat(follow_symlinks=False)
            except OSError as error:
                if is_absent(error):  # removed since the folder was read
                    continue
                raise
            yield self._classify(found, status)

    def trash_in(self, shard: str) -> Iterator[tuple[StoreKey, str]]:
        """Yields key and path of each trash file, without a stat."""
        for found in self._scan(shard):
            match = _TRASH.fullmatch(found.name)
            key = _key_from(match[1]) if match else None
            if key is not None:
                yield key, found.path

    def _classify(self, found: os.DirEntry[str], status: os.stat_result) -> Entry:
        if stat.S_ISREG(status.st_mode):
            if match := _BLOCK.fullmatch(found.name):
                key = _key_from(match[1])
                if key is not None and self.block_path(key) == found.path:
                    return Entry(EntryKind.BLOCK, found.path, status, key)
            elif match := _TRASH.fullmatch(found.name):
                key = _key_from(match[1])
                if key is not None and self.shard_of(key) == os.path.dirname(found.path):
                    seen = Identity(int(match[2]), int(match[3]))
                    return Entry(EntryKind.TRASH, found.path, status, key, seen)
            elif _TEMP.fullmatch(found.name):
                return Entry(EntryKind.TEMP, found.path, status)
        return Entry(EntryKind.FOREIGN, found.path, status)

    def _folders(self, path: str, pattern: re.Pattern[str]) -> Iterator[str]:
        for found in self._scan(path):
            if pattern.fullmatch(found.name) and found.is_dir(follow_symlinks=False):
                yield found.path

    def _scan(self, path: str) -> Iterator[os.DirEntry[str]]:
        try:
            yield from self._ops.scandir(path)
        except OSError as error:
            if not is_absent(error):  # a collector may remove an empty folder during a scan
                raise


def _key_from(text: str) -> StoreKey | None:
    if len(text) % 2:
        return None
    key = bytes.fromhex(text)
    return StoreKey(key) if is_key(key) else None


def open_tree(root: str, ops: FileOps) -> Tree:
    """Opens the tree in `root`, or creates it. Raises ConfigError if `root` has other contents."""
    root = os.path.abspath(root)
    tree = Tree(root, ops)
    try:
        with contextlib.suppress(FileExistsError):
            ops.mkdir(root)
        _refuse_foreign_contents(root, os.listdir(root))
        if not os.path.lexists(tree.folder):
            _make_folder(root, tree.folder, ops)
        _check_marker(tree.folder, ops)
    except OSError as error:
        raise ConfigError("backing", f"{root} cannot be used: {error.strerror or error}") from error
    return tree


def _refuse_foreign_contents(root: str, names: list[str]) -> None:
    visible = {name for name in names if not name.startswith(".")} - {"lost+found"}
    others = sorted(name for name in visible if _ANY_VERSION.fullmatch(name) and name != FOLDER)
    if others:
        raise ConfigError(
            "backing",
            f"{root} holds {others[0]}, but this release uses {FOLDER} only: "
            "choose another directory, or remove the old one when no host uses it",
        )
    if visible and FOLDER not in visible:
        raise ConfigError(
            "backing",
            f"{root} holds other files ({sorted(visible)[0]}): choose an empty or new directory",
        )


def _make_folder(root: str, folder: str, ops: FileOps) -> None:
    """Creates the folder atomically with its contents; another host may create it first."""
    draft = os.path.join(root, f".{FOLDER}-{_HOST}-{os.getpid()}-{secrets.token_hex(8)}")
    ops.mkdir(draft)
    try:
        ops.mkdir(os.path.join(draft, "blocks"))
        for name, text in ((MARKER, MARKER_TEXT), ("clock", b""), ("collected", b"")):
            fd = ops.open(os.path.join(draft, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.write(fd, text)
                ops.fsync(fd)
            finally:
                ops.close(fd)
        try:
            ops.rename(draft, folder)
        except OSError:
            # Another host was first, or a network file system reported an error for a rename that
            # succeeded.
            if not os.path.exists(os.path.join(folder, MARKER)):
                raise
        sync_folder(ops, root)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_marker(folder: str, ops: FileOps) -> None:
    try:
        with os.fdopen(ops.open(os.path.join(folder, MARKER), os.O_RDONLY), "rb") as file:
            text = file.read(len(MARKER_TEXT) + 1)
    except FileNotFoundError:
        text = b""
    if text != MARKER_TEXT:
        raise ConfigError(
            "backing",
            f"{folder} is not a shared directory of this version: its file {MARKER} says "
            f"{text[:80]!r}, expected {MARKER_TEXT!r}",
        )
