"""The SSD tier: a `BlockStore` on a local disk.

One lock guards the block table (`block_table.py`) and the queue of journal records
(`committer.py`); it is never held during I/O. A block becomes visible, and its record is queued,
only when it is completely written. Slots being read are pinned; slots of removed blocks stay in
quarantine until the journal says on disk that they are free.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.store import (
    MAX_KEY_BYTES,
    BlockFacts,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.metrics import server_names
from vllm_tiered_kv.metrics.histogram import Histogram
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.namespaces import QuotaOf, no_quota
from vllm_tiered_kv.stores.ssd.block_table import BlockTable
from vllm_tiered_kv.stores.ssd.data_file import Moved, Place
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.opening import open_folder
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT
from vllm_tiered_kv.stores.ssd.recovery import RecoveryReport
from vllm_tiered_kv.stores.ssd.settings import Backoff, FsyncPolicy, ReadSpeed, SsdCounters

logger = logging.getLogger(__name__)

_MEASURED_BLOCKS = 256
_MEASURED_AT_ONCE = 16
_MEASURED_BYTES = 64 << 20
_MEASURED_S = 0.1  # enough to compare disks; no batch is started after that


@dataclass
class BlockWrite:
    """A block being written to its slot."""

    position: int  # in its batch
    item: PutItem
    payload: memoryview
    slot: int
    checksum: int = 0
    result: PutResult = PutResult.FAILED
    retire: bool = False  # the slot is defective
    is_readable: bool = False


@dataclass(frozen=True)
class BlockRead:
    """A block being read from its slot."""

    position: int
    slot: int
    key: bytes
    length: int
    checksum: int
    into: memoryview


def as_bytes(view: memoryview) -> memoryview:
    """Returns the memory as a view of bytes; raises TypeError if it is not contiguous."""
    if not view.c_contiguous:
        raise TypeError("a block must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _ClosedError(Exception):
    """The store was closed before the call."""


class SsdStore:
    """A BlockStore in a folder of a local disk.

    The daemon owns one and calls it from the threads of its executors. Thread-safe; every call
    blocks until its I/O is done.
    """

    read_batch = 8  # enough to keep the disk busy without delaying the first block

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        eviction: str = "lru",
        fsync: FsyncPolicy = FsyncPolicy.GROUP,
        io_threads: int = 16,
        disk: OsDisk | None = None,
        progress: Callable[[str], None] | None = None,
        slab_bytes: int | None = None,
        retry_seconds: float = 5.0,
        quota_of: QuotaOf = no_quota,
    ) -> None:
        """`slab_bytes` bounds the size of a block; it is fixed when the folder is made. Namespaces
        without a quota share slabs."""
        begin = time.monotonic()
        self.folder = folder
        self.counters = SsdCounters()
        self.read_speed = ReadSpeed()
        self.read_times = Histogram(server_names.SSD_READ_SECONDS)
        self.write_times = Histogram(server_names.SSD_WRITE_SECONDS)
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._sealed = threading.Condition(self._lock)
        self._active = 0
        self._closed = False
        self._order_changed = False
        self._logged: set[str] = set()
        self._backoff = Backoff(retry_seconds)  # for writes of blocks
        self._progress = progress or (lambda line: None)
        disk = disk or OsDisk()
        opened = open_folder(
            folder, capacity_bytes, slab_bytes, disk, io_threads, self._progress, quota_of
        )
        self._budget = opened.budget
        self._data = opened.data
        self._folder_lock = opened.lock
        self._table = BlockTable(
            self._lock,
            disk,
            folder,
            opened,
            eviction,
            fsync,
            self.counters,
            retry_seconds,
            quota_of,
        )
        try:
            self._table.restore(opened.live)
        except BaseException:
            opened.close()
            raise
        self._to_measure = [StoreKey(key) for key in opened.live.last_keys(_MEASURED_BLOCKS)]
        self._index = self._table.index
        self._committer = self._table.committer
        self._committer.start()
        with self._lock:
            self._index.apply_quotas()  # recovered blocks beyond a quota leave
        self.recovery: RecoveryReport = opened.report
        del opened  # frees the records of the journal
        cpu.release_free_memory()
        self.recovery.seconds = time.monotonic() - begin
        self._progress(str(self.recovery))

    # ---- lookups ------------------------------------------------------------------------------

    @property
    def direct_io(self) -> bool:
        """Whether reads and writes of blocks bypass the page cache."""
        return self._data.direct

    def match(self, keys: Sequence[StoreKey]) -> int:
        with self._lock:
            if self._closed:
                return 0
            found = self._index.match_prefix(keys)
            self._touch(keys[:found])
            return found

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._lock:
            if self._closed:
                return [False] * len(keys)
            return [self._index.lookup(key) is Lookup.HIT for key in keys]

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Returns length, checksum and parent of each block, from the index."""
        with self._lock:
            if self._closed:
                return [None] * len(keys)
            return [self._table.facts(key) for key in keys]

    def keys_of(self, namespace: bytes) -> list[StoreKey]:
        """Returns the keys of all readable blocks of a namespace."""
        with self._lock:
            if self._closed:
                return []
            rows = self._index.rows(MAX_KEY_BYTES)
        head = np.frombuffer(namespace, np.uint8)
        is_member = (rows.keys[:, : len(head)] == head).all(axis=1)
        members = zip(rows.keys[is_member], rows.key_bytes[is_member].tolist(), strict=True)
        return [StoreKey(key[:nbytes].tobytes()) for key, nbytes in members]

    @property
    def is_rewriting(self) -> bool:
        """Whether the journal is being rewritten, which copies the index. Never waits."""
        return self._committer.is_rewriting

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(len(self._index), self._table.live_bytes, self._budget.capacity_bytes)

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        """Returns the number of readable blocks and the bytes of their slots for each namespace."""
        with self._lock:
            return self._table.by_namespace.snapshot()

    def evictions_by_namespace(self) -> dict[bytes, int]:
        with self._lock:
            return self._table.by_namespace.evictions()

    # ---- read ---------------------------------------------------------------------------------

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        found = [False] * len(keys)
        requested = list(zip(keys, map(as_bytes, into), strict=True))
        try:
            with self._operation():
                with self._lock:
                    reads = self._pin(requested)
                outcomes: list[Moved] = []
                try:
                    outcomes = self._read_blocks(
                        [Place(self._table.offset(r.slot, r.length), r.into) for r in reads]
                    )
                finally:
                    with self._lock:
                        for read, moved in zip(reads, outcomes, strict=False):
                            found[read.position] = self._count_read(read, moved)
                        self._index.unpin([read.slot for read in reads])
        except _ClosedError:
            pass
        return found

    def _pin(self, requested: Sequence[tuple[StoreKey, memoryview]]) -> list[BlockRead]:
        reads = []
        for position, (key, view) in enumerate(requested):
            if self._index.lookup(key) is not Lookup.HIT:
                continue
            [slot] = self._index.pin([key])
            length, checksum = self._index.facts_in(slot)
            if view.nbytes != length:
                self._index.unpin([slot])
                continue
            reads.append(BlockRead(position, slot, key, length, checksum, view))
        self._touch([StoreKey(read.key) for read in reads])
        return reads

    def measure_reads(self) -> None:
        """Reads a few blocks and discards them, so that `read_speed` is known before a load.

        This does not count as a use of the blocks, and damaged ones are left for a later read.
        """
        try:
            with self._operation():
                until = time.monotonic() + _MEASURED_S
                keys, left = self._to_measure, _MEASURED_BYTES
                while keys and left > 0 and time.monotonic() < until:
                    batch, keys = keys[:_MEASURED_AT_ONCE], keys[_MEASURED_AT_ONCE:]
                    left -= self._measure(batch)
        except _ClosedError:
            pass

    def _measure(self, keys: Sequence[StoreKey]) -> int:
        """Reads the blocks that are still here; returns their number of bytes."""
        with self._lock:
            facts = [(key, known) for key in keys if (known := self._table.facts(key)) is not None]
            slots = self._index.pin([key for key, _ in facts])
            lengths = [known.nbytes for _, known in facts]
        try:
            places = []
            for slot, length in zip(slots, lengths, strict=True):
                buffer = mmap.mmap(-1, aligned(length, ALIGNMENT))  # aligned for direct I/O
                offset = self._table.offset(slot, length)
                places.append(Place(offset, memoryview(buffer)[:length]))
            self._read_blocks(places)
        finally:
            with self._lock:
                self._index.unpin(slots)
        return sum(lengths)

    def _read_blocks(self, places: Sequence[Place]) -> list[Moved]:
        begun_at = time.monotonic()
        with self.read_speed.reading():
            outcomes = self._data.read_blocks(places)
        self.read_times.observe(time.monotonic() - begun_at)
        moved = zip(places, outcomes, strict=True)
        self.read_speed.add(sum(place.view.nbytes for place, end in moved if not end.error))
        return outcomes

    def _count_read(self, read: BlockRead, moved: Moved) -> bool:
        """Returns whether the block is good; removes it otherwise."""
        if moved.error is None and moved.checksum == read.checksum:
            return True
        if moved.error is not None:
            self._warn_once("a block cannot be read and is removed (%s)", moved.error)
        else:
            self._warn_once("a block is damaged and is removed (%s)", "its checksum does not match")
        if self._table.forget(read.slot, read.key):
            if moved.error is not None:
                self.counters.read_errors += 1
            else:
                self.counters.bad_blocks += 1
        return False

    # ---- write --------------------------------------------------------------------------------

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        results = [PutResult.DROPPED] * len(items)
        payloads = [as_bytes(item.payload) for item in items]
        try:
            with self._operation():
                with self._lock:
                    writes = self._admit(items, payloads, results)
                    failures = self._committer.data_failures
                try:
                    self._write(writes)
                finally:
                    with self._lock:
                        self._seal(writes, results, failures)
                if durability is Durability.DISK:
                    with self._lock:
                        self._make_durable(items, writes, results)
        except _ClosedError:
            return results
        with self._lock:
            self.counters.failed_blocks += results.count(PutResult.FAILED)
            self.counters.dropped_blocks += results.count(PutResult.DROPPED)
        return results

    def _admit(
        self, items: Sequence[PutItem], payloads: list[memoryview], results: list[PutResult]
    ) -> list[BlockWrite]:
        """Reserves slots, heads first; successors of a block without a slot are dropped too."""
        writes: list[BlockWrite] = []
        dropped: set[bytes] = set()
        used: set[int] = set()
        for position, (item, payload) in enumerate(zip(items, payloads, strict=True)):
            outcome: int | PutResult
            if item.parent in dropped:
                outcome = PutResult.DROPPED
            elif not self._committer.is_writable or time.monotonic() < self._backoff.until:
                outcome = PutResult.FAILED
            elif not self._is_storable(item, payload.nbytes):
                outcome = PutResult.DROPPED
            else:
                outcome = self._table.reserve(item, payload.nbytes, items[position:])
            if isinstance(outcome, PutResult):
                results[position] = outcome
                if outcome is not PutResult.PRESENT:
                    dropped.add(item.key)
            else:
                writes.append(BlockWrite(position, item, payload, outcome))
                used.add(self._table.size_class(item.key, payload.nbytes))
        for size_class in used:
            self._table.evict_ahead(size_class)
        return writes

    def _is_storable(self, item: PutItem, nbytes: int) -> bool:
        largest = self._budget.slab_bytes
        if nbytes > largest:
            sizes = f"{format_size(nbytes)}, more than a slab of {format_size(largest)}"
            self._warn_once("blocks are too large (%s): create a new folder with more space", sizes)
        longest_key = max(len(item.key), len(item.parent or b""))
        return 0 < nbytes <= largest and bool(item.key) and longest_key <= MAX_KEY_BYTES

    def _write(self, writes: Sequence[BlockWrite]) -> None:
        if time.monotonic() < self._backoff.until:
            return  # another batch failed just now
        places = [
            Place(
                self._table.offset(write.slot, write.payload.nbytes),
                write.payload,
                write.item.checksum,
            )
            for write in writes
        ]
        begun_at = time.monotonic()
        outcomes = self._data.write_blocks(places)
        if places:
            self.write_times.observe(time.monotonic() - begun_at)
        for write, moved in zip(writes, outcomes, strict=True):
            write.checksum = moved.checksum
            if moved.refused:
                self._warn_once(
                    "a block is refused (%s)", "it does not have the checksum sent with it"
                )
            elif moved.error is None:
                write.result = PutResult.STORED
            elif moved.error.errno != errno.ECANCELED:  # the block that failed has the reason
                write.retire = moved.error.errno == errno.EIO
                self._pause_writing(moved.error)

    def _seal(self, writes: list[BlockWrite], results: list[PutResult], failures: int) -> None:
        """Makes written blocks visible and queues their records.

        `failures` is the number of failed data syncs before the write. If there were more since,
        the data may be lost without an error of the next sync, so the blocks fail.
        """
        may_be_lost = self._committer.data_failures != failures
        for write in writes:
            if may_be_lost and write.result is PutResult.STORED:
                write.result = PutResult.FAILED
            if write.result is not PutResult.STORED:
                if write.retire:
                    self._index.retire(write.slot)
                    self.counters.retired_slots += 1
                else:
                    self._index.abort(write.slot)
            else:
                length = write.payload.nbytes
                write.is_readable = self._table.commit(
                    write.item, write.slot, length, write.checksum
                )
                if not write.is_readable:
                    write.result = PutResult.DROPPED  # deleted while being written
                else:
                    self._backoff.succeeded()
            results[write.position] = write.result
        self._sealed.notify_all()

    def _make_durable(
        self, items: Sequence[PutItem], writes: list[BlockWrite], results: list[PutResult]
    ) -> None:
        """Waits until the records of this batch are durable, including those already present."""
        self._await_others(items, results)
        stored = [write for write in writes if write.is_readable]
        if not stored and PutResult.PRESENT not in results:
            return
        if self._committer.wait(self._committer.barrier()):
            return
        for write in stored:
            self._table.forget(write.slot, write.item.key)
            results[write.position] = PutResult.FAILED
        for position, result in enumerate(results):
            if result is PutResult.PRESENT:  # it stays, but may not be durable
                results[position] = PutResult.FAILED

    def _await_others(self, items: Sequence[PutItem], results: list[PutResult]) -> None:
        """Waits for blocks that another put is writing: they have no record yet and may fail."""
        present = [n for n, result in enumerate(results) if result is PutResult.PRESENT]
        while any(self._index.lookup(items[n].key) is Lookup.PENDING for n in present):
            self._sealed.wait()
        for n in present:
            if self._index.lookup(items[n].key) is Lookup.MISS:
                results[n] = PutResult.DROPPED

    # ---- removal ------------------------------------------------------------------------------

    def delete(self, keys: Sequence[StoreKey]) -> int:
        """Returns when the removal is durable, so that no block is back after the next start."""
        try:
            with self._operation(), self._lock:
                here = [key for key in keys if self._index.lookup(key) is Lookup.HIT]
                removed = sum(self._index.remove(key) for key in here)
                # Also if none are here: a concurrent call may just have removed them.
                if not self._committer.wait(self._committer.barrier()):
                    raise NotDeletedError(len(keys), f"{self.folder} cannot be written")
                return removed
        except _ClosedError:
            return 0

    def flush(self) -> bool:
        with self._lock:
            is_durable = self._closed or self._committer.flush()
        if not is_durable:
            logger.error("%s: not all blocks could be made durable", self.folder)
        return is_durable

    def take_lost(self) -> list[StoreKey]:
        """See LowerStore. Without this call, the next `flush` returns False if blocks were lost."""
        if not self._table.lost:  # without the lock: evictions from memory ask
            return []
        with self._lock:
            lost, self._table.lost = self._table.lost, []
            self._committer.has_lost = False
            return lost

    def retry(self) -> None:
        with self._lock:
            self._backoff.until = 0.0
            if not self._closed and not self._committer.is_writable:
                self._committer.wait(self._committer.kick())

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._active:
                self._idle.wait()
            blocks = len(self._index)
        self._progress(f"writing the index of {blocks} blocks")
        self._committer.close(rewrite=self._order_changed)
        self._data.close()
        self._folder_lock.release()

    # ---- inside -------------------------------------------------------------------------------

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Keeps the files open during a call."""
        with self._lock:
            if self._closed:
                raise _ClosedError
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self._idle.notify_all()

    def _touch(self, keys: Sequence[StoreKey]) -> None:
        if keys:
            self._index.touch(keys)
            self._order_changed = True

    def _warn_once(self, message: str, detail: object) -> None:
        """Logs each message once, because a failing disk repeats it; the counters have the rest."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(
                "%s: " + message + "; further ones are only counted", self.folder, detail
            )

    def _pause_writing(self, error: OSError) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._backoff.until:
                return
            delay = self._backoff.failed(now)
        logger.error(
            "%s: a block cannot be written (%s); writes pause for %g s, reads continue",
            self.folder,
            error,
            delay,
        )
