"""Group commit: one thread writes and syncs the journal, for everybody at once.

Records are queued under the store's lock and written in cycles: sync the data (so that no record
is durable before its block), append the records, sync the journal; then whoever waited for the
cycle goes on, and slots whose removal was in it leave quarantine. The lock is never held
across I/O.

After an error nobody knows what the journal file holds. It is not appended to again: the next
cycle writes a new generation from what is in memory, which also replaces everything that was
queued.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Protocol

from vllm_tiered_kv.stores.ssd.data_file import DataFile
from vllm_tiered_kv.stores.ssd.disk import Disk
from vllm_tiered_kv.stores.ssd.journal import Journal, Records
from vllm_tiered_kv.stores.ssd.settings import Backoff, FsyncPolicy, SsdCounters

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0  # how long a record may wait for company
BATCH_RECORDS = 1024  # how many do not wait
_REMEMBERED_FAILURES = 256  # nobody waits longer than that
_DEAD_RECORDS = 4096  # a journal is rewritten when more than this, and most of it, is dead


class CommitOwner(Protocol):
    """The store, as the committer sees it. All calls are made under the store's lock."""

    def live_records(self) -> Records:
        """Records of all readable blocks, coldest first."""

    def live_count(self) -> int: ...
    def take_leaving(self) -> list[int]:
        """Slots in quarantine; every removal among them is queued by now."""

    def released(self, slots: list[int]) -> None:
        """The removal of these slots is durable."""

    def retake(self, slots: list[int]) -> None:
        """Back into quarantine: their removal is not durable."""

    def lost(self, slots: list[int]) -> int:
        """The data of these slots may never reach the disk. How many blocks are gone of which
        nobody was told."""


class _DataSyncError(Exception):
    """The data file could not be synced: what was written since the last sync is in doubt."""


class Committer:
    """Public calls, except `start` and `close`, are made under the lock."""

    def __init__(
        self,
        lock: threading.Lock,
        owner: CommitOwner,
        disk: Disk,
        folder: Path,
        store: bytes,
        data: DataFile,
        journal: Journal,
        policy: FsyncPolicy,
        max_journal_records: int,
        counters: SsdCounters,
        backoff: Backoff,
    ) -> None:
        self._lock = lock
        self._work = threading.Condition(lock)
        self._finished = threading.Condition(lock)
        self._owner = owner
        self._disk = disk
        self._folder = folder
        self._store = store
        self._data = data
        self._journal = journal
        self._group = policy is FsyncPolicy.GROUP
        self._max_records = max_journal_records
        self._counters = counters
        self._backoff = backoff
        self._queue: list[bytes] = []
        # Slots written since the last sync of the data began. Without a group's policy that is
        # when the journal was last rewritten, which bounds it.
        self._unsynced: list[int] = []
        self._has_lost = False  # blocks, of which nobody was told; since a flush told of it
        self.data_failures = 0  # times that what was written before came to be in doubt
        self._queued_since = 0.0
        self._next = 1  # the cycle that will take what is queued now
        self._done = 0  # the last cycle that ended
        self._durable = 0  # the last cycle that ended well
        # Those whose blocks were lost: a later one that ends well does not bring them back.
        self._failed: deque[int] = deque(maxlen=_REMEMBERED_FAILURES)
        self._in_cycle = False  # one is under way: its records are chosen
        self._releasing = False  # and it has slots to release
        self._urgent = False
        self._sync_all = False  # whatever the policy
        self._rewrite = False
        self._broken = False  # the journal file is in doubt
        self._stopping = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ssd-commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- under the lock -----------------------------------------------------------------------

    @property
    def is_writable(self) -> bool:
        return not self._broken and not self._stopped

    @property
    def is_releasing(self) -> bool:
        return self._releasing

    def append(self, record: bytes, written: int | None = None) -> int:
        """Queues a record, of a block that was `written` to this slot or of one that left; the
        cycle it will be durable with."""
        if written is not None:
            self._unsynced.append(written)
        # While the file is in doubt the next generation will have it, if it is still true; but not
        # the one that is being written, which began with what was there before.
        if not self._broken or self._in_cycle:
            if not self._queue:
                self._queued_since = time.monotonic()
                self._work.notify()
            self._queue.append(record)
            if len(self._queue) == BATCH_RECORDS:
                self._work.notify()
        return self._next

    def barrier(self) -> int:
        """The cycle that covers everything queued so far."""
        last = self._next - 1
        # One that lost blocks says nothing good of those that are left.
        return self._next if self._queue or self._broken or last in self._failed else last

    def kick(self) -> int:
        """Starts the next cycle as soon as possible; its number."""
        self._urgent = True
        self._work.notify()
        return self._next

    def wait(self, cycle: int) -> bool:
        """Returns when the cycle has ended: whether what it covers is durable."""
        if cycle == self._next:
            self.kick()
        while self._done < cycle and not self._stopped:
            self._finished.wait()
        return self._durable >= cycle and cycle not in self._failed

    def wait_release(self) -> bool:
        """Returns when what is in quarantine now has left it; False when it could not."""
        return self.wait(self._next - 1 if self._releasing else self._next)

    def flush(self) -> bool:
        """Syncs everything, whatever the policy. False also when blocks stored since the last one
        are gone, which nobody may have been told."""
        self._sync_all = True
        has_lost = self._has_lost  # or another flush takes it meanwhile
        is_durable = self.wait(self._next) and not (has_lost or self._has_lost)
        self._has_lost = False
        return is_durable

    # ---- the thread ---------------------------------------------------------------------------

    def close(self, rewrite: bool) -> None:
        """Commits what is left, in a fresh journal if asked for, and ends the thread."""
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
                logger.exception("%s: the journal writer failed; writing has ended", self._folder)
            finally:
                self._stopped = True
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
        leaving = self._owner.take_leaving()
        self._releasing = bool(leaving)
        rewrite = self._should_rewrite(len(batch))
        records: Records = self._owner.live_records() if rewrite else batch
        sync_data = sync_all or rewrite or (self._group and bool(self._unsynced))
        written: list[int] = []
        if sync_data:
            written, self._unsynced = self._unsynced, []
        self._in_cycle = True
        self._lock.release()
        error: OSError | None = None
        lost: list[int] = []
        data_in_doubt = False
        try:
            self._write(records, rewrite, sync_data, sync_all)
        except _DataSyncError as failure:
            error, lost, data_in_doubt = failure.args[0], written, True
        except OSError as failure:
            error = failure
        finally:
            self._lock.acquire()
            self._in_cycle = False
        self._releasing = False
        self._done = number
        if error is None:
            self._succeed(number, leaving)
        else:
            self._failed.append(number)
            if data_in_doubt:
                # So is what was written while this went on, whose turn would be the next cycle,
                # and what was written of which nobody has told yet.
                lost += self._unsynced
                self._unsynced = []
                self.data_failures += 1
                self._failed.append(self._next)
            self._fail(error, leaving, lost)
        self._finished.notify_all()

    def _should_rewrite(self, more: int) -> bool:
        records = self._journal.records + more
        mostly_dead = records > 2 * self._owner.live_count() + _DEAD_RECORDS
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

    def _succeed(self, number: int, leaving: list[int]) -> None:
        if self._broken:
            logger.warning("%s: writing again", self._folder)
        self._durable = number
        self._broken = self._rewrite = False
        self._backoff.succeeded()
        self._owner.released(leaving)

    def _fail(self, error: OSError, leaving: list[int], lost: list[int]) -> None:
        delay = self._backoff.failed(time.monotonic())
        if not self._broken:
            logger.error(
                "%s: cannot be written (%s); reading goes on, next try in %g s",
                self._folder,
                error,
                delay,
            )
        self._broken = True
        self._queue = []
        self._owner.retake(leaving)
        self._has_lost = bool(self._owner.lost(lost)) or self._has_lost
