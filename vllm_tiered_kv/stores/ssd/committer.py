"""Group commit: one thread writes and syncs the journal for all callers.

Records are queued under the store's lock and written in cycles. A cycle syncs the data, so that no
record is durable before its block, appends the records, and syncs the journal. Then callers that
waited for the cycle continue, and slots whose removal was in it leave quarantine. The lock is never
held during I/O.

After an error the contents of the journal file are unknown, so it is not appended to again. The
next cycle writes a new generation from the index in memory, which also covers everything that was
queued.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.core.store import MAX_KEY_BYTES
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.journal import Journal, Records
from vllm_tiered_kv.stores.ssd.opening import OpenFolder
from vllm_tiered_kv.stores.ssd.record_format import put_records
from vllm_tiered_kv.stores.ssd.settings import Backoff, FsyncPolicy, SsdCounters

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0  # how long a record may wait for others, to share a sync
BATCH_RECORDS = 1024  # a batch of this size is written at once
_REMEMBERED_FAILURES = 256  # in cycles; no caller waits for a cycle older than this
_DEAD_RECORDS = 4096  # a journal with more dead records than this, and mostly dead, is rewritten


class _DataSyncError(Exception):
    """The data file could not be synced, so data written since the last sync may be lost."""


class Committer:
    """Writes the journal of one store in a thread. `SsdStore` and `BlockTable` call it, under the
    store's lock except for `start` and `close`."""

    def __init__(
        self,
        lock: threading.Lock,
        index: DurableIndex,
        drop_lost: Callable[[list[int]], int],
        disk: OsDisk,
        folder: Path,
        opened: OpenFolder,
        policy: FsyncPolicy,
        counters: SsdCounters,
        backoff: Backoff,
    ) -> None:
        """`drop_lost` removes the blocks in these slots, whose data may never reach the disk, and
        returns how many of them were there. The committer calls it under the lock."""
        self._lock = lock
        self._work = threading.Condition(lock)
        self._finished = threading.Condition(lock)
        self._index = index
        self._drop_lost = drop_lost
        self._disk = disk
        self._folder = folder
        self._store = opened.store
        self._data = opened.data
        self._journal = opened.journal
        self._group = policy is FsyncPolicy.GROUP
        self._max_records = opened.budget.max_journal_records
        self._counters = counters
        self._backoff = backoff
        self._queue: list[bytes] = []
        # Slots written since the last sync of the data began. With fsync policy NEVER, the data is
        # synced only when the journal is rewritten, which bounds this list.
        self._unsynced: list[int] = []
        self.has_lost = False  # blocks since the last flush that `take_lost` has not returned yet
        self.data_failures = 0  # failed syncs of the data file
        self.is_rewriting = False  # the journal, from a copy of the index
        self._queued_since = 0.0
        self._next = 1  # the cycle that will write the current queue
        self._done = 0  # the last cycle that ended
        self._durable = 0  # the last cycle that succeeded
        # Cycles whose blocks were lost; the success of a later cycle does not restore them.
        self._failed: deque[int] = deque(maxlen=_REMEMBERED_FAILURES)
        self._in_cycle = False  # a cycle is running, and its records are chosen
        self.is_releasing = False  # the running cycle has slots to release
        self._urgent = False
        self._sync_all = False  # the next cycle syncs, regardless of the policy
        self._rewrite = False
        self._broken = False  # the contents of the journal file are unknown
        self._stopping = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ssd-commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- under the lock -----------------------------------------------------------------------

    @property
    def is_writable(self) -> bool:
        return not self._broken and not self._stopped

    def append(self, record: bytes, written: int | None = None) -> int:
        """Queues a record and returns the cycle that makes it durable. `written` is the slot of a
        new block, or None for a removal."""
        if written is not None:
            self._unsynced.append(written)
        # If the journal is broken, the next generation is written from the index and covers this
        # change. A generation that is being written now was started without it.
        if not self._broken or self._in_cycle:
            if not self._queue:
                self._queued_since = time.monotonic()
                self._work.notify()
            self._queue.append(record)
            if len(self._queue) == BATCH_RECORDS:
                self._work.notify()
        return self._next

    def barrier(self) -> int:
        """Returns the cycle that covers everything queued so far."""
        last = self._next - 1
        # A cycle that lost blocks is no proof that the remaining ones are durable.
        return self._next if self._queue or self._broken or last in self._failed else last

    def kick(self) -> int:
        """Starts the next cycle as soon as possible; returns its number."""
        self._urgent = True
        self._work.notify()
        return self._next

    def wait(self, cycle: int) -> bool:
        """Waits until the cycle has ended; returns whether what it covers is durable."""
        if cycle == self._next:
            self.kick()
        while self._done < cycle and not self._stopped:
            self._finished.wait()
        return self._durable >= cycle and cycle not in self._failed

    def wait_release(self) -> bool:
        """Waits until the slots now in quarantine are released; returns False if that failed."""
        return self.wait(self._next - 1 if self.is_releasing else self._next)

    def flush(self) -> bool:
        """Syncs everything, regardless of the policy. Also returns False if blocks stored since the
        last flush were lost and not taken."""
        self._sync_all = True
        has_lost = self.has_lost  # read before the wait, in which another flush may reset it
        is_durable = self.wait(self._next) and not (has_lost or self.has_lost)
        self.has_lost = False
        return is_durable

    # ---- the thread ---------------------------------------------------------------------------

    def close(self, rewrite: bool) -> None:
        """Commits everything, in a new journal if `rewrite`, and ends the thread."""
        with self._lock:
            self._sync_all = True
            self._rewrite = self._rewrite or rewrite
            self._stopping = True
            self._work.notify()
        self._thread.join()
        self._journal.close()

    def _run(self) -> None:
        with self._lock:
            try:
                stopping = False
                while not stopping:
                    self._wait_for_work()
                    stopping = self._stopping
                    self._cycle()
            except BaseException:
                logger.exception(
                    "%s: the journal writer failed; no writes until a restart",
                    self._folder,
                )
            finally:
                self._stopped, self.is_rewriting = True, False
                self._finished.notify_all()

    def _wait_for_work(self) -> None:
        while not (self._urgent or self._stopping):
            now = time.monotonic()
            if self._broken:
                due = self._backoff.until
            elif len(self._queue) >= BATCH_RECORDS:
                return
            elif self._queue:
                due = self._queued_since + INTERVAL_SECONDS
            else:
                self._work.wait()
                continue
            if due <= now:
                return
            self._work.wait(due - now)

    def _cycle(self) -> None:
        number, self._next = self._next, self._next + 1
        batch, self._queue = self._queue, []
        sync_all, self._sync_all = self._sync_all, False
        self._urgent = False
        quarantined = self._index.take_quarantined()
        self.is_releasing = bool(quarantined)
        rewrite = self.is_rewriting = self._should_rewrite(len(batch))
        records: Records = put_records(self._index.rows(MAX_KEY_BYTES)) if rewrite else batch
        sync_data = sync_all or rewrite or (self._group and bool(self._unsynced))
        written: list[int] = []
        if sync_data:
            written, self._unsynced = self._unsynced, []
        self._in_cycle = True
        self._lock.release()
        error: OSError | None = None
        lost: list[int] = []
        data_sync_failed = False
        try:
            self._write(records, rewrite, sync_data, sync_all)
        except _DataSyncError as failure:
            error, lost, data_sync_failed = failure.args[0], written, True
        except OSError as failure:
            error = failure
        finally:
            if error is not None:
                error.__traceback__ = None  # it keeps the records until garbage is collected
            del records
            self._lock.acquire()
            self._in_cycle = self.is_rewriting = False
        self.is_releasing = False
        self._done = number
        if error is None:
            self._succeed(number, quarantined)
        else:
            self._failed.append(number)
            if data_sync_failed:
                # The sync may also have lost slots written during this cycle, whose records belong
                # to the next one, so the next cycle counts as failed too. By `data_failures`, a put
                # whose record is not queued yet learns of it.
                lost += self._unsynced
                self._unsynced = []
                self.data_failures += 1
                self._failed.append(self._next)
            self._fail(error, quarantined, lost)
        self._finished.notify_all()

    def _should_rewrite(self, more: int) -> bool:
        records = self._journal.records + more
        mostly_dead = records > 2 * len(self._index) + _DEAD_RECORDS
        return self._broken or self._rewrite or records > self._max_records or mostly_dead

    def _write(self, records: Records, rewrite: bool, sync_data: bool, sync_all: bool) -> None:
        if sync_data:
            try:
                if not self._data.is_linked():
                    raise FileNotFoundError(errno.ENOENT, "the data file was deleted")
                self._data.sync()
            except OSError as error:
                raise _DataSyncError(error) from error
            self._counters.syncs += 1
        if rewrite:
            generation = self._journal.generation + 1
            new = Journal.create(self._disk, self._folder, self._store, generation, records)
            self._journal.close()
            self._journal = new
            self._counters.compactions += 1
        elif len(records):
            if not self._journal.is_linked():
                raise FileNotFoundError(errno.ENOENT, "the journal was deleted")
            self._journal.append(records)
        if not rewrite and (sync_all or (len(records) and self._group)):
            self._journal.sync()
            self._counters.syncs += 1

    def _succeed(self, number: int, quarantined: list[int]) -> None:
        if self._broken:
            logger.warning("%s: writing works again", self._folder)
        self._durable = number
        self._broken = self._rewrite = False
        self._backoff.succeeded()
        self._index.release(quarantined)

    def _fail(self, error: OSError, quarantined: list[int], lost: list[int]) -> None:
        delay = self._backoff.failed(time.monotonic())
        if not self._broken:
            logger.error(
                "%s: cannot be written (%s); reads continue, next attempt in %g s",
                self._folder,
                error,
                delay,
            )
        self._broken = True
        self._queue = []
        self._index.quarantine_again(quarantined)
        self.has_lost = bool(self._drop_lost(lost)) or self.has_lost
