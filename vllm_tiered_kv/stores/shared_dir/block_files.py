"""The files of blocks: published when they are complete, verified when they are read, and removed
only if they are still the files that were examined.

*Publishing* writes a temporary file and links it to its name, so that readers never see a partial
block. `link` does not replace a file, so a published block never changes, and one of two concurrent
writers wins. Network file systems may execute a link and report an error, or execute it twice and
report that the name exists. Therefore the result is determined by whether the name and the
temporary file have the same inode.

*Removing.* File systems have no "unlink if unchanged". Between the examination of a block and its
unlink, another collector may remove it and a writer publish the key again, or a reader may use it.
Therefore a removal has three steps:

1. Rename the file to a unique trash name. From now on no reader finds the block, and only this
   process handles the renamed file.
2. Open the trash file and compare inode and mtime with those seen before. It must be opened:
   network file systems may answer a stat from a cache, but ask the server at an open.
3. If they are equal, unlink the trash file. Otherwise link it back to its name and unlink the trash
   name. If the key was published meanwhile, the link fails because the name exists, with the same
   content.

A reader that has the file open continues to read. A reader between steps 1 and 3 sees a miss, and a
writer publishes the block again. If a collector dies between steps 1 and 3, the trash name contains
what was seen, and any other collector continues with step 2 (`settle`). Two that do so at once do
not interfere, because each step on a trash name succeeds for only one of them.

A block that is deleted while it is in the trash of a collector would return. Therefore `delete`
also removes the trash files of the block, and then its name once more, in case the block was linked
back in between.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.block_format import HEADER_BYTES, BlockHeader, decode_header
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts, UsageTracker
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, advance, is_absent
from vllm_tiered_kv.stores.shared_dir.tree import Identity, Tree

_READ_ATTEMPTS = 2  # a single error may come from the network, a repeated one from the disk
_FOLDER_ATTEMPTS = 3  # a collector may remove an empty folder just after it was made
_MAX_SYNCED = 65536
_NO_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
)


class Removal(enum.Enum):
    """The result of a removal."""

    REMOVED = enum.auto()
    GONE = enum.auto()  # another process removed it
    SPARED = enum.auto()  # it changed: used or published again
    FAILED = enum.auto()  # the file system returned an error, which is counted


class _Verdict(enum.Enum):
    VALID = enum.auto()
    OTHER_LENGTH = enum.auto()  # a valid block that does not fit the reader's buffer
    DAMAGED = enum.auto()


@dataclass(frozen=True)
class ReadBlock:
    """A block whose file or header was read, and the identity of the file."""

    header: BlockHeader
    file: Identity

    @property
    def used_at_s(self) -> float:
        return self.file.mtime_ns / 1e9


class SyncedFiles:
    """A bounded set of files known to be complete and durable, so that they need not be read again.

    This process wrote and synced them, or synced and then read them. A file that was replaced or
    touched since is unknown again; the oldest entries are removed first. Thread-safe.
    """

    def __init__(self) -> None:
        self._files: OrderedDict[StoreKey, Identity] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: StoreKey, file: Identity) -> None:
        with self._lock:
            self._files[key] = file
            self._files.move_to_end(key)
            while len(self._files) > _MAX_SYNCED:
                self._files.popitem(last=False)

    def knows(self, key: StoreKey, file: Identity) -> bool:
        with self._lock:
            return self._files.get(key) == file


class BlockFiles:
    """Reads, publishes and removes the files of one shared directory, for the store, its collector
    and `Recency`. Thread-safe."""

    def __init__(self, tree: Tree, ops: FileOps, counts: EventCounts, usage: UsageTracker) -> None:
        self._tree = tree
        self._ops = ops
        self._counts = counts
        self._usage = usage
        self._durable = SyncedFiles()

    # ---- reading: a miss is None; a damaged file is counted and removed -------------------------

    def read(self, key: StoreKey, into: memoryview) -> ReadBlock | None:
        """Reads the payload of a block into the buffer and verifies it."""
        return self._examine(key, into)

    def peek(self, key: StoreKey) -> ReadBlock | None:
        """Reads the header only; checks the length of the payload, but not its bytes."""
        return self._examine(key, None)

    def verify(self, key: StoreKey) -> ReadBlock | None:
        """Like `read`, for a block of unknown length."""
        found = self.peek(key)
        if found is None:
            return None
        return self.read(key, memoryview(bytearray(found.header.payload_bytes)))

    def _examine(self, key: StoreKey, into: memoryview | None) -> ReadBlock | None:
        for attempt in range(_READ_ATTEMPTS):
            try:
                with self._opened(key) as fd:
                    return self._examine_open(key, fd, into, last=attempt + 1 == _READ_ATTEMPTS)
            except OSError as error:
                if is_absent(error):
                    return None
                self._counts.add(Event.READ_ERROR)
                if error.errno != errno.EIO:
                    return None
        return None

    def _examine_open(
        self, key: StoreKey, fd: int, into: memoryview | None, last: bool
    ) -> ReadBlock | None:
        # Opening made a network file system ask its server, so these attributes are current.
        status = self._ops.fstat(fd)
        header: BlockHeader | None = None
        try:
            header, verdict = self._check(key, fd, status.st_size, into)
        except OSError as error:
            if error.errno != errno.EIO or not last:
                raise
            self._counts.add(Event.READ_ERROR)
            verdict = _Verdict.DAMAGED  # a block that exists but cannot be read must not stay
        if verdict is _Verdict.DAMAGED:
            self._counts.add(Event.DAMAGED)
            # Remove it while it is open, so that its inode number cannot be reused meanwhile.
            self.remove(key, Identity.of(status))
        if header is None or verdict is not _Verdict.VALID:
            return None
        return ReadBlock(header, Identity.of(status))

    def _check(
        self, key: StoreKey, fd: int, file_bytes: int, into: memoryview | None
    ) -> tuple[BlockHeader | None, _Verdict]:
        head = bytearray(HEADER_BYTES)
        parts = [memoryview(head)]
        fits = into is not None and file_bytes == HEADER_BYTES + len(into)
        if fits and into is not None:
            parts.append(into)
        if not self._fill(fd, parts):
            return None, _Verdict.DAMAGED
        header = decode_header(head, key)
        if header is None or header.file_bytes != file_bytes:
            return None, _Verdict.DAMAGED
        if into is None:
            return header, _Verdict.VALID
        if not fits:
            return header, _Verdict.OTHER_LENGTH
        if xxh3_64(into) != header.payload_checksum:
            return header, _Verdict.DAMAGED
        return header, _Verdict.VALID

    def _fill(self, fd: int, parts: list[memoryview]) -> bool:
        """Reads until all parts are full; returns False if the file ends before."""
        parts, offset = advance(parts, 0), 0
        while parts:
            count = self._ops.preadv(fd, parts, offset)
            if count == 0:
                return False
            parts, offset = advance(parts, count), offset + count
        return True

    @contextlib.contextmanager
    def _opened(self, key: StoreKey) -> Iterator[int]:
        fd = self._ops.open(self._tree.block_path(key), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(self._ops.fstat(fd).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file")
            yield fd
        finally:
            self._ops.close(fd)

    # ---- publishing -----------------------------------------------------------------------------

    def publish(self, key: StoreKey, header: bytes, payload: memoryview, sync: bool) -> bool:
        """Writes and publishes a block; returns False if another writer published its key first.
        Raises OSError if that fails, and then leaves nothing."""
        temp, fd = self._open_temp(key)
        path = self._tree.block_path(key)
        try:
            synced = self._write(fd, header, payload, sync)
            is_new = self._give_name(temp, path)
            if synced is not None and is_new:
                self._sync_name(key, temp, path, synced)
                self._durable.note(key, synced)
        finally:
            with contextlib.suppress(OSError):  # a collector removes it later
                self._ops.unlink(temp)
        return is_new

    def make_durable(self, key: StoreKey) -> bool:
        """Syncs and verifies a present block; returns whether it is durable. Removes damage."""
        synced = self._sync_present(key)
        if synced is None:
            return False
        if self._durable.knows(key, synced):
            return True
        found = self.verify(key)
        if found is None or found.file != synced:
            return False
        self._durable.note(key, synced)
        return True

    def _sync_present(self, key: StoreKey) -> Identity | None:
        """Syncs a block that another process wrote, without verifying it.

        Returns the identity of the file, or None if it is gone. Raises OSError if the file system
        fails, and removes the block unless it is known to be durable: the next sync would succeed
        although this one lost data.
        """
        try:
            fd = self._ops.open(self._tree.block_path(key), os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            if is_absent(error):
                return None
            raise
        try:
            try:
                self._ops.fsync(fd)
                self._tree.sync_shard(key)
            except OSError:
                found = Identity.of(self._ops.fstat(fd))
                if not self._durable.knows(key, found):
                    self.remove(key, found)
                raise
            return Identity.of(self._ops.fstat(fd))
        finally:
            self._ops.close(fd)

    def _open_temp(self, key: StoreKey) -> tuple[str, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        for _ in range(_FOLDER_ATTEMPTS):
            temp = self._tree.temp_path(key)
            try:
                return temp, self._ops.open(temp, flags)
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    self._tree.make_shard(key)
        temp = self._tree.temp_path(key)
        return temp, self._ops.open(temp, flags)

    def _write(self, fd: int, header: bytes, payload: memoryview, sync: bool) -> Identity | None:
        """Writes and closes the file. Returns its identity if it was synced, otherwise None."""
        synced = None
        try:
            parts = advance([memoryview(header), payload], 0)
            while parts:
                parts = advance(parts, self._ops.writev(fd, parts))
            if sync:
                self._ops.fsync(fd)
                synced = Identity.of(self._ops.fstat(fd))
        except BaseException:
            with contextlib.suppress(OSError):
                self._ops.close(fd)
            raise
        self._ops.close(fd)  # network file systems report a full disk or quota here
        return synced

    def _give_name(self, temp: str, path: str) -> bool:
        try:
            self._ops.link(temp, path)
        except FileExistsError:
            return self._is_same_file(temp, path)
        except OSError as error:
            if self._is_same_file(temp, path):
                return True
            if error.errno not in _NO_LINKS:
                raise
            # This file system has no hard links. A rename may replace a block that was published
            # just now, but atomically and with the same content, so readers see no difference.
            with contextlib.suppress(FileNotFoundError):
                self._ops.lstat(path)
                return False
            self._ops.rename(temp, path)
        return True

    def _sync_name(self, key: StoreKey, temp: str, path: str, synced: Identity) -> None:
        try:
            self._tree.sync_shard(key)
        except OSError:
            # The put fails, so the block must not remain.
            if self._is_same_file(temp, path):
                self._ops.unlink(path)
            else:
                self.remove(key, synced)  # without hard links it was renamed
            raise

    def _is_same_file(self, temp: str, path: str) -> bool:
        try:
            return Identity.of(self._ops.lstat(temp)) == Identity.of(self._ops.lstat(path))
        except OSError:
            return False

    # ---- removing -------------------------------------------------------------------------------

    def remove(self, key: StoreKey, seen: Identity) -> Removal:
        """Removes the block of this key if it is still the file that was seen."""
        path = self._tree.block_path(key)
        trash = self._tree.trash_path(key, seen)
        try:
            status = self._ops.lstat(path)
            if Identity.of(status) != seen:
                return Removal.SPARED  # without making the block invisible for a moment
            try:
                self._ops.rename(path, trash)
            except OSError:
                # A network file system may report an error for a rename that succeeded.
                if not self._exists(trash):
                    raise
        except OSError as error:
            return self._outcome_of(error)
        outcome = self.settle(key, trash, seen)
        if outcome is Removal.REMOVED:
            self._usage.changed(-1, -status.st_size)
        return outcome

    def settle(self, key: StoreKey, trash: str, seen: Identity) -> Removal:
        """Unlinks a trash file if it is the file that was seen; otherwise restores it."""
        try:
            if self._identity(trash) == seen:
                self._ops.unlink(trash)
                return Removal.REMOVED
            self._restore(trash, self._tree.block_path(key))
        except OSError as error:
            return self._outcome_of(error)
        return Removal.SPARED

    def _identity(self, path: str) -> Identity:
        fd = self._ops.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return Identity.of(self._ops.fstat(fd))
        finally:
            self._ops.close(fd)

    def _restore(self, trash: str, path: str) -> None:
        try:
            self._ops.link(trash, path)
        except FileExistsError:
            pass
        except OSError as error:
            if is_absent(error):
                return  # another collector settled it
            if not self._exists(path):  # no hard links here
                self._ops.rename(trash, path)
                return
        with contextlib.suppress(FileNotFoundError):
            self._ops.unlink(trash)

    def _exists(self, path: str) -> bool:
        try:
            self._ops.lstat(path)
        except OSError:
            return False
        return True

    def _outcome_of(self, error: OSError) -> Removal:
        if is_absent(error):
            return Removal.GONE
        self._counts.add(Event.REMOVE_ERROR)
        return Removal.FAILED

    def delete(self, keys: Sequence[StoreKey]) -> list[bool | OSError]:
        """Deletes blocks, all of one shard. Returns for each whether it was here, or the error
        because of which it may remain."""
        found: dict[StoreKey, bool | OSError] = dict.fromkeys(keys, False)
        self._unlink_names(found)
        try:
            for key, path in self._tree.trash_in(self._tree.shard_of(keys[0])):
                if key in found:
                    self._unlink(key, path, found)
        except OSError as error:
            return [error] * len(found)
        self._unlink_names(found)
        return list(found.values())

    def _unlink_names(self, found: dict[StoreKey, bool | OSError]) -> None:
        for key in found:
            self._unlink(key, self._tree.block_path(key), found)

    def _unlink(self, key: StoreKey, path: str, found: dict[StoreKey, bool | OSError]) -> None:
        try:
            size = self._ops.lstat(path).st_size
            self._ops.unlink(path)
        except OSError as error:
            # Not `is_absent`: with a stale handle of the folder, the file may still exist.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                found[key] = error
            return
        if found[key] is not True:  # otherwise this was another name of the same block
            found[key] = True
            self._usage.changed(-1, -size)
