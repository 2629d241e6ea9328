"""A BlockStore in a directory that many daemons or engines on many hosts share.

There is no index and no lock. A block is present if its file exists (`tree.py`). Files are
published when they are complete and verified at every read (`block_files.py`), and removed by the
garbage collector (`gc.py`). Errors of the file system become results of a call, not
exceptions, except that `delete` raises if a block may remain.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm_tiered_kv.core.store import (
    BlockFacts,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.native.cpu import xxh3_64
from vllm_tiered_kv.stores.block_format import (
    HEADER_BYTES,
    BlockHeader,
    encode_header,
    is_key,
)
from vllm_tiered_kv.stores.io_threads import IoThreads
from vllm_tiered_kv.stores.network_store import Interval, count_leading
from vllm_tiered_kv.stores.shared_dir.block_files import BlockFiles, ReadBlock, Removal
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts, UsageTracker
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent
from vllm_tiered_kv.stores.shared_dir.recency import Recency, ServerClock, Use
from vllm_tiered_kv.stores.shared_dir.tree import Identity, open_tree

logger = logging.getLogger(__name__)

_PUT_ATTEMPTS = 3  # a present block may be collected before it is made durable
_KEYS_PER_TASK = 32  # passing one lookup to another thread costs more than the lookup
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_MAX_UNSYNCED = 65536
_KEPT = frozenset({PutResult.STORED, PutResult.PRESENT})

_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True)
class SharedDirSettings:
    """Settings of a shared directory. All hosts should use the same, but need not. Those that users
    can choose are checked where they are read."""

    root: str
    capacity_bytes: int = 0  # target of a collection; 0: no limit
    ttl_s: float | None = None  # blocks unused for longer are removed; None: no expiry
    grace_s: float = 600.0  # blocks published or used more recently are never collected
    touch_interval_s: float = 600.0  # precision of the time of last use; see recency.py
    stale_temp_s: float = 7200.0  # a temporary file this old belongs to a dead writer
    low_watermark: float = 0.95  # a collection over capacity frees down to this share of it
    threads: int = 8  # parallel reads and writes


class UnsyncedBlocks:
    """Blocks that this process has written but not synced, and those that a failed sync lost.

    Both are bounded: when the unsynced ones are full, the store syncs; of the lost ones the oldest
    are removed first. Only those to report are not: they are taken. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[StoreKey, None] = {}
        self._lost: OrderedDict[StoreKey, None] = OrderedDict()
        self._to_report: list[StoreKey] = []
        self.failures = 0  # number of failed syncs

    @property
    def is_full(self) -> bool:
        return len(self._written) >= _MAX_UNSYNCED

    def wrote(self, keys: Sequence[StoreKey], failures: int) -> bool:
        """Adds blocks whose writing started after this number of failures. Returns False if a sync
        has failed since, which may have lost them."""
        with self._lock:
            if failures != self.failures:
                self._lose(keys)
                return False
            for key in keys:
                self._written[key] = None
                self._lost.pop(key, None)
            return True

    def synced(self, keys: Sequence[StoreKey]) -> None:
        """Records blocks that were written and synced individually."""
        with self._lock:
            for key in keys:
                self._lost.pop(key, None)

    def take(self) -> list[StoreKey]:
        """Takes the blocks that a sync starting now covers."""
        with self._lock:
            taken, self._written = self._written, {}
            return list(taken)

    def failed(self, taken: Sequence[StoreKey]) -> None:
        """Records that the sync of these blocks failed. It may also have lost those written
        meanwhile."""
        with self._lock:
            self.failures += 1
            lost = [*taken, *self._written]
            self._written = {}
            self._lose(lost)
            self._to_report += lost

    def take_lost(self) -> list[StoreKey]:
        if not self._to_report:  # without the lock: evictions from memory ask
            return []
        with self._lock:
            lost, self._to_report = self._to_report, []
            return lost

    def _lose(self, keys: Sequence[StoreKey]) -> None:
        self._lost.update(dict.fromkeys(keys))
        while len(self._lost) > _MAX_UNSYNCED:
            self._lost.popitem(last=False)

    def is_lost(self, key: StoreKey) -> bool:
        return key in self._lost


class SharedDirStore:
    """A BlockStore in a shared directory, which it opens or creates. Thread-safe.

    The daemon owns one as its backing tier and calls it on executors, because a network file system
    may hang. Raises ConfigError if the directory has other contents.
    """

    def __init__(self, settings: SharedDirSettings, ops: FileOps | None = None) -> None:
        self.settings = settings
        self.ops = ops or FileOps()
        self.counts = EventCounts()
        self.tree = open_tree(settings.root, self.ops)
        self.clock = ServerClock(self.ops, self.tree.clock_path)
        self.usage_tracker = UsageTracker(settings.capacity_bytes)
        self.files = BlockFiles(self.tree, self.ops, self.counts, self.usage_tracker)
        self._unsynced = UnsyncedBlocks()
        self.recency = Recency(
            self.tree,
            self.ops,
            self.counts,
            self.files,
            self.clock,
            settings.touch_interval_s,
        )
        self._threads = IoThreads(settings.threads, "tiered-kv-shared")
        self._close_lock = threading.Lock()
        self._closed = False
        self._log_interval = Interval()

    # ---- lookups --------------------------------------------------------------------------------

    def match(self, keys: Sequence[StoreKey]) -> int:
        return count_leading(keys, self.contains)

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        if self._closed:
            return [False] * len(keys)
        tasks = [keys[at : at + _KEYS_PER_TASK] for at in range(0, len(keys), _KEYS_PER_TASK)]
        answers = self._threads.map(lambda task: [self._is_here(key) for key in task], tasks)
        return [here for answer in answers for here in answer]

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Reads headers only: a block whose payload is damaged is still described."""
        if self._closed:
            return [None] * len(keys)
        return self._threads.map(self._facts, keys)

    def _is_here(self, key: StoreKey) -> bool:
        if not is_key(key):
            return False
        try:
            status = self.ops.lstat(self.tree.block_path(key))
        except OSError as error:
            if not is_absent(error):
                self.counts.add(Event.READ_ERROR)
            return False
        # A file that was not synced before a crash of its machine is often empty.
        return stat.S_ISREG(status.st_mode) and status.st_size >= HEADER_BYTES

    def _facts(self, key: StoreKey) -> BlockFacts | None:
        found = self.files.peek(key) if is_key(key) else None
        return None if found is None else found.header.facts

    # ---- bytes ----------------------------------------------------------------------------------

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        wanted = list(zip(keys, into, strict=True))
        if self._closed:
            return [False] * len(wanted)
        found = self._threads.map(lambda one: self._get_one(*one), wanted)
        self.recency.used(
            [Use(r.header.key, r.header.parent, r.used_at_s) for r in found if r is not None]
        )
        return [read is not None for read in found]

    def _get_one(self, key: StoreKey, into: memoryview) -> ReadBlock | None:
        if not is_key(key):
            self.counts.add(Event.BAD_KEY)
            return None
        return self.files.read(key, into.cast("B"))

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        """Drops the successors of a block without room too, because no lookup could reach them."""
        if self._closed:
            return [PutResult.DROPPED] * len(items)
        failures = self._unsynced.failures
        dropped: set[StoreKey] = set()
        results: dict[int, PutResult] = {}

        def put_at(at: int) -> None:
            item = items[at]
            if item.parent is not None and item.parent in dropped:
                results[at] = PutResult.DROPPED
            else:
                results[at] = self._put_one(item, durability)
            if results[at] is PutResult.DROPPED:
                dropped.add(item.key)

        first: dict[StoreKey, int] = {}
        for at, item in enumerate(items):
            first.setdefault(item.key, at)
        self._threads.map(put_at, list(first.values()))
        for at, item in enumerate(items):  # duplicates of a key: in order, the first one wins
            if first[item.key] != at:
                put_at(at)
        now = self.clock.estimate()
        kept = [at for at in sorted(results) if results[at] in _KEPT]
        stored = [at for at in kept if results[at] is PutResult.STORED]
        keys = [items[at].key for at in stored]
        if durability is Durability.DISK:
            self._unsynced.synced(keys)
        elif not self._unsynced.wrote(keys, failures):
            results.update(dict.fromkeys(stored, PutResult.FAILED))
        elif self._unsynced.is_full:
            self._sync()
        self.recency.used([Use(items[at].key, items[at].parent, now) for at in kept])
        return [results[at] for at in range(len(items))]

    def _put_one(self, item: PutItem, durability: Durability) -> PutResult:
        if not is_key(item.key) or (item.parent is not None and not is_key(item.parent)):
            self.counts.add(Event.BAD_KEY)
            return PutResult.FAILED
        try:
            for _ in range(_PUT_ATTEMPTS):
                result = self._try_to_put(item, sync=durability is Durability.DISK)
                if result is not None:
                    return result
            return PutResult.DROPPED
        except OSError as error:
            self._warn_write_error(error)
            if error.errno in _NO_SPACE:
                self.counts.add(Event.NO_SPACE)
                return PutResult.DROPPED
            self.counts.add(Event.WRITE_ERROR)
            return PutResult.FAILED

    def _warn_write_error(self, error: OSError) -> None:
        """Logs write errors at most once a minute; the counters have every block."""
        if self._log_interval.is_due():
            logger.warning(
                "blocks cannot be written to %s: %s (logged at most once a minute)",
                self.tree.folder,
                error.strerror or error,
            )

    def _try_to_put(self, item: PutItem, sync: bool) -> PutResult | None:
        """Returns None if another process published the block, but it disappeared before it was
        durable, or was damaged."""
        payload = item.payload.cast("B")
        if self._keep_present(item.key, len(payload), sync):
            return PutResult.PRESENT
        checksum = xxh3_64(payload)
        if item.checksum is not None and item.checksum != checksum:
            self.counts.add(Event.BAD_CHECKSUM)
            return PutResult.FAILED
        header = BlockHeader(item.key, item.parent, len(payload), checksum)
        if self.files.publish(item.key, encode_header(header), payload, sync):
            self.usage_tracker.changed(1, header.file_bytes)
            return PutResult.STORED
        if sync and not self.files.make_durable(item.key):
            return None
        return PutResult.PRESENT

    def _keep_present(self, key: StoreKey, payload_bytes: int, sync: bool) -> bool:
        """Whether the block is here and cannot be collected during this put."""
        try:
            status = self.ops.lstat(self.tree.block_path(key))
        except OSError as error:
            if is_absent(error):
                return False
            raise
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EEXIST, f"the path of block {key.hex()} is not a regular file")
        if self._unsynced.is_lost(key):
            removal = self.files.remove(key, Identity.of(status))
            if removal not in (Removal.REMOVED, Removal.GONE):
                raise OSError(errno.EBUSY, "a block lost by a failed sync cannot be replaced")
            return False
        if status.st_size != HEADER_BYTES + payload_bytes and self.files.peek(key) is None:
            return False  # truncated by a crash; `peek` has removed it
        # A collector checks for touches before it removes a block. If the touch finds no file, the
        # block was collected just now, and is written again.
        if self.recency.is_stale(status.st_mtime_ns / 1e9) and not self.recency.touch(key):
            return False
        return not sync or self.files.make_durable(key)

    # ---- the rest -------------------------------------------------------------------------------

    def delete(self, keys: Sequence[StoreKey]) -> int:
        if self._closed:
            return 0
        shards: dict[str, list[StoreKey]] = {}
        for key in filter(is_key, keys):
            shards.setdefault(self.tree.shard_of(key), []).append(key)
        by_shard = self._threads.map(self.files.delete, list(shards.values()))
        outcomes = [outcome for shard in by_shard for outcome in shard]
        failed = [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        if failed:
            self.counts.add(Event.REMOVE_ERROR, len(failed))
            raise NotDeletedError(len(failed), f"{self.tree.folder}: {failed[0].strerror}")
        return outcomes.count(True)

    def flush(self) -> bool:
        """Syncs the file system.

        After an error, all blocks that this process has written since the last sync count as lost,
        because the next sync would not report them: they are written again when they are put
        again. Every block is verified when it is read.
        """
        self.recency.drain()
        return self._sync()

    def _sync(self) -> bool:
        unsynced = self._unsynced.take()
        try:
            fd = self.ops.open(self.tree.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self.ops.syncfs(fd)
            finally:
                self.ops.close(fd)
        except OSError as error:
            self.counts.add(Event.FLUSH_ERROR)
            logger.warning("%s could not be synced: %s", self.tree.folder, error)
            self._unsynced.failed(unsynced)
            return False
        return True

    def take_lost(self) -> list[StoreKey]:
        return self._unsynced.take_lost()

    def usage(self) -> StoreUsage:
        """As of the last garbage collection plus the changes of this process since, without those
        of other hosts; zero before the first one."""
        return self.usage_tracker.usage

    def close(self) -> None:
        """Afterwards every lookup is a miss and every put is dropped."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._threads.close()
            self.flush()
            self.recency.close()
