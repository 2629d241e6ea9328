"""Keeps the time of last use of blocks in their mtime.

Many file systems do not maintain atime, or only lazily, so a use touches the file. Two rules make
this cheap and keep the heads of chains as warm as their tails:

*At most one touch per interval.* A block whose mtime is younger than half of `interval_s` is not
touched again, no matter who touched it. The check is free, because a read returns the mtime.

*A use counts for all ancestors.* A block is useful only with all blocks before it, but the reader
may have those elsewhere, for example on the GPU, and never read them here. Therefore each use walks
the chain to its head along the parents in the headers, and touches the blocks from the tail to the
head, so that no ancestor is older than its descendants by more than an interval. To avoid a walk of
thousands of blocks for each new block, a walk records its time for every block on it
(`_refreshed`). For half an interval, a block appended to such a block inherits this time instead of
walking again. It must inherit the old time: otherwise a conversation that adds a block now and then
would never refresh its head.

All this runs in one background thread with a bounded queue. If a use is lost, because the queue is
full or the process crashes, a block only looks colder than it is.

Ages of files are differences between times of the file server. The clocks of the hosts may disagree
by any amount, so they are not used: `ServerClock` touches a file, which makes the server write its
present time, and reads it back.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.block_files import BlockFiles
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent
from vllm_tiered_kv.stores.shared_dir.tree import Tree

logger = logging.getLogger(__name__)

REMEASURE_S = 300.0


class ServerClock:
    """Reads the clock of the file server, in seconds since the epoch. Thread-safe."""

    def __init__(self, ops: FileOps, path: str) -> None:
        self._ops = ops
        self._path = path
        self._lock = threading.Lock()
        self._offset = 0.0  # time of the server minus the local monotonic clock
        self._measured_at: float | None = None

    def measure(self) -> float:
        """Returns the time of the server. Raises OSError if the directory cannot be written."""
        try:
            self._ops.touch(self._path)
        except OSError as error:
            if not is_absent(error):
                raise
            self._ops.close(self._ops.open(self._path, os.O_WRONLY | os.O_CREAT))
            self._ops.touch(self._path)
        now = self._ops.lstat(self._path).st_mtime_ns / 1e9
        with self._lock:
            self._measured_at = time.monotonic()
            self._offset = now - self._measured_at
        return now

    def estimate(self) -> float:
        """Returns the approximate time of the server, usually without I/O.

        It only decides whether a block is touched; deletions use `measure`.
        """
        with self._lock:
            measured_at, offset = self._measured_at, self._offset
        if measured_at is None or time.monotonic() - measured_at > REMEASURE_S:
            try:
                return self.measure()
            except OSError:
                if measured_at is None:
                    return time.time()
        return time.monotonic() + offset


_QUEUED_BATCHES = 1024
_REMEMBERED_BLOCKS = 32768
_MAX_CHAIN = 1 << 17  # bounds a walk along corrupt headers that form a cycle


@dataclass(frozen=True)
class Use:
    """A use of a block, with the mtime the block had at that time."""

    key: StoreKey
    parent: StoreKey | None
    mtime_s: float


class Recency:
    """Updates the times of last use in a background thread. `SharedDirStore` calls it from any
    thread."""

    def __init__(
        self,
        tree: Tree,
        ops: FileOps,
        counts: EventCounts,
        files: BlockFiles,
        clock: ServerClock,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree = tree
        self._ops = ops
        self._counts = counts
        self._files = files
        self._clock = clock
        self._period_s = interval_s / 2
        self._monotonic = monotonic
        # When the chain up to a block was last refreshed. Bounded: the oldest entries are removed.
        self._refreshed: OrderedDict[StoreKey, float] = OrderedDict()
        self._queue: queue.Queue[Sequence[Use] | None] = queue.Queue(_QUEUED_BATCHES)
        self._thread = threading.Thread(target=self._run, name="tiered-kv-touch", daemon=True)
        self._thread.start()

    def used(self, uses: Sequence[Use]) -> None:
        """Queues uses, given in chain order. Never waits; drops them if the queue is full."""
        if not uses:
            return
        try:
            self._queue.put_nowait(uses)
        except queue.Full:
            self._counts.add(Event.TOUCH_SKIPPED, len(uses))

    def is_stale(self, mtime_s: float) -> bool:
        """Whether a block with this mtime should be touched when it is used.

        Also True for a time in the future, which a clock step leaves: the present is better.
        """
        return abs(self._clock.estimate() - mtime_s) >= self._period_s

    def touch(self, key: StoreKey) -> bool:
        """Touches a block now. Returns False if the block is not here."""
        try:
            self._ops.touch(self._tree.block_path(key))
        except OSError as error:
            if is_absent(error):
                return False
            self._counts.add(Event.TOUCH_ERROR)  # the block is here, but may belong to another user
        else:
            self._counts.add(Event.TOUCHED)
        return True

    def drain(self) -> None:
        """Waits until all uses queued so far are processed."""
        self._queue.join()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while True:
            uses = self._queue.get()
            try:
                if uses is None:
                    return
                self.refresh(uses)
            except Exception:
                logger.exception("times of last use in the shared directory could not be updated")
            finally:
                self._queue.task_done()

    def refresh(self, uses: Sequence[Use]) -> None:
        now = self._monotonic()
        batch = {use.key: use for use in uses}
        visited: set[StoreKey] = set()
        walks: list[list[StoreKey]] = []
        for use in reversed(uses):
            stale = self._walk(use.key, batch, visited, now)
            if stale:
                walks.append(stale)
        # A later walk ended where an earlier one had passed: its blocks are further from the head.
        for walk in reversed(walks):
            for key in walk:
                self.touch(key)

    def _walk(
        self, tail: StoreKey, batch: dict[StoreKey, Use], visited: set[StoreKey], now: float
    ) -> list[StoreKey]:
        """Returns the stale blocks from `tail` to the head, or to a block that was refreshed."""
        passed: list[StoreKey] = []
        stale: list[StoreKey] = []
        refreshed_at = now
        key: StoreKey | None = tail
        while key is not None and len(passed) < _MAX_CHAIN:
            before = self._refreshed.get(key)
            if before is not None and now - before < self._period_s:
                refreshed_at = before
                break
            if key in visited:
                break
            visited.add(key)
            use = batch.get(key) or self._read_use(key)
            if use is None:
                break  # a gap: blocks before it are useless for those after it
            if self.is_stale(use.mtime_s):
                stale.append(key)
            passed.append(key)
            key = use.parent
        for key in passed:
            self._record(key, refreshed_at)
        return stale

    def _read_use(self, key: StoreKey) -> Use | None:
        found = self._files.peek(key)
        if found is None:
            return None
        return Use(key, found.header.parent, found.used_at_s)

    def _record(self, key: StoreKey, refreshed_at: float) -> None:
        self._refreshed[key] = refreshed_at
        self._refreshed.move_to_end(key)
        while len(self._refreshed) > _REMEMBERED_BLOCKS:
            self._refreshed.popitem(last=False)
