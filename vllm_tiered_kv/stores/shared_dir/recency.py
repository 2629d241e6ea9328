"""When blocks were last used, kept in their mtime.

Many file systems do not keep atime, or keep it lazily, so a use is noted by touching the file. Two
rules make that cheap and keep heads of chains as warm as their tails:

*At most once an interval.* A block whose mtime is younger than half of `interval_s` is not touched
again, whoever touched it. Asking costs nothing: a read has the mtime at hand.

*Use flows up the chain.* A block is only of use with all blocks before it, but the reader may have
those elsewhere (in a GPU) and never ask for them here. So a use of a block is a use of its
ancestors: the walk follows the parents named in the headers up to the root, and the touches are
made from the tail up, so that no ancestor is older than its descendants by more than an interval.
To not walk a chain of thousands for each new block, a walk leaves a note with every block of it
(`_noted`): until half an interval later, whatever is added behind that block inherits the note
instead of walking again. It inherits the note's time too, or a conversation that adds a block now
and then would never refresh its head.

All of this runs in one background thread behind a bounded queue. A use lost there (a full queue, a
crash) makes a block look colder than it is, nothing worse.

Ages of files are differences between times the file server wrote. The clocks of the hosts that use
the directory may disagree by any amount, so none of them is asked: one file is touched, which makes
the server write its present, and read back (`ServerClock`).
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
from vllm_tiered_kv.stores.shared_dir.block_file import BlockReader
from vllm_tiered_kv.stores.shared_dir.counters import Event, EventCounts
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps, is_absent
from vllm_tiered_kv.stores.shared_dir.tree import Tree

logger = logging.getLogger(__name__)

REMEASURE_S = 300.0


class ServerClock:
    """Seconds since the epoch, by the clock that dates the files."""

    def __init__(self, ops: FileOps, path: str) -> None:
        self._ops = ops
        self._path = path
        self._lock = threading.Lock()
        self._offset = 0.0  # server's time less our monotonic clock
        self._measured_at: float | None = None

    def measure(self) -> float:
        """The server's present. OSError where the directory cannot be written."""
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
        """About the server's present, mostly without asking it.

        Good enough to decide whether a use is worth noting; nothing is deleted by it.
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
_MAX_CHAIN = 1 << 17  # a guard against headers that lead in circles through the whole tree


@dataclass(frozen=True)
class Use:
    """A block that was read or written just now, and the mtime it had then."""

    key: StoreKey
    parent: StoreKey | None
    mtime_s: float


class Recency:
    def __init__(
        self,
        tree: Tree,
        ops: FileOps,
        counts: EventCounts,
        reader: BlockReader,
        clock: ServerClock,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tree = tree
        self._ops = ops
        self._counts = counts
        self._reader = reader
        self._clock = clock
        self._period_s = interval_s / 2
        self._monotonic = monotonic
        # When all of the chain up to a block was last refreshed; the oldest notes are forgotten.
        self._noted: OrderedDict[StoreKey, float] = OrderedDict()
        self._queue: queue.Queue[Sequence[Use] | None] = queue.Queue(_QUEUED_BATCHES)
        self._thread = threading.Thread(target=self._run, name="tiered-kv-touch", daemon=True)
        self._thread.start()

    def used(self, uses: Sequence[Use]) -> None:
        """Notes uses, given in chain order, soon. Never waits."""
        if not uses:
            return
        try:
            self._queue.put_nowait(uses)
        except queue.Full:
            self._counts.add(Event.TOUCH_SKIPPED, len(uses))

    def is_stale(self, mtime_s: float) -> bool:
        """Whether a use of a block with this mtime is worth noting.

        A time in the future is: a clock was stepped, and the present is the better answer.
        """
        return abs(self._clock.estimate() - mtime_s) >= self._period_s

    def touch(self, key: StoreKey) -> bool:
        """Notes a use now. False where the block is not here."""
        try:
            self._ops.touch(self._tree.block_path(key))
        except OSError as error:
            if is_absent(error):
                return False
            self._counts.add(Event.TOUCH_ERROR)  # not ours to touch, perhaps; it is here
        else:
            self._counts.add(Event.TOUCHED)
        return True

    def drain(self) -> None:
        """Returns when everything noted so far is done."""
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
                logger.exception("uses of blocks in the shared directory could not be noted")
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
        # A later walk ended where an earlier one had been: its blocks are further from the root.
        for walk in reversed(walks):
            for key in walk:
                self.touch(key)

    def _walk(
        self, tail: StoreKey, batch: dict[StoreKey, Use], visited: set[StoreKey], now: float
    ) -> list[StoreKey]:
        """Stale blocks from `tail` up to the root, or to where the chain is known to be fresh."""
        passed: list[StoreKey] = []
        stale: list[StoreKey] = []
        refreshed_at = now
        key: StoreKey | None = tail
        while key is not None and len(passed) < _MAX_CHAIN:
            noted = self._noted.get(key)
            if noted is not None and now - noted < self._period_s:
                refreshed_at = noted
                break
            if key in visited:
                break
            visited.add(key)
            use = batch.get(key) or self._look_at(key)
            if use is None:
                break  # a gap: what is before it is of no use to what is behind it
            if self.is_stale(use.mtime_s):
                stale.append(key)
            passed.append(key)
            key = use.parent
        for key in passed:
            self._note(key, refreshed_at)
        return stale

    def _look_at(self, key: StoreKey) -> Use | None:
        found = self._reader.peek(key)
        if found is None:
            return None
        return Use(key, found.header.parent, found.used_at_s)

    def _note(self, key: StoreKey, refreshed_at: float) -> None:
        self._noted[key] = refreshed_at
        self._noted.move_to_end(key)
        while len(self._noted) > _REMEMBERED_BLOCKS:
            self._noted.popitem(last=False)
