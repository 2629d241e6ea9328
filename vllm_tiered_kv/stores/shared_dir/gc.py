"""Garbage collection of a shared directory: expired blocks, blocks beyond the capacity, leftovers.

Any number of collectors may run at once, on any number of hosts, without coordination:

- Ages are measured by the clock of the file server (`recency.py`).
- A block is a candidate only if it was neither used nor published within the grace period. Its
  mtime is the time of the last write or use, its ctime that of publication.
- A removal is undone if the block has changed since the scan (`block_files.py`).
- Two collectors choose the same blocks. A block that another collector has removed counts as freed,
  so that two of them do not free twice as much as necessary.

The capacity is a target: between collections, and while all blocks are within the grace period, the
directory may hold more. Memory is bounded: a scan keeps the coldest `max_candidates` blocks; if
these are not enough, the report says that there is `more` to do.

Tails are removed before heads. A block counts as recent as its most recent descendant, because its
removal makes the descendants useless. Candidates are ordered by this recency, and by depth if it is
equal, so no block comes before its descendants. Only the coldest part of the directory is examined
(`coldest_part`). A descendant outside of it is warmer than the part, and `recency.py` ensures that
its ancestors are at most one interval colder. Therefore the part extends one interval beyond the
blocks that are to be removed.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.stores.shared_dir.block_files import Removal
from vllm_tiered_kv.stores.shared_dir.file_ops import is_absent
from vllm_tiered_kv.stores.shared_dir.store import SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import FOLDER, Entry, EntryKind, Identity

logger = logging.getLogger(__name__)

MAX_CANDIDATES = 100_000
_FUTURE_NS = 300 * 10**9  # a file dated further in the future was dated by a wrong clock
_ALL_TIME_NS = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that may be removed."""

    key: StoreKey
    mtime_ns: int
    nbytes: int
    inode: int

    @property
    def seen(self) -> Identity:
        return Identity(self.inode, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate in the order of removal."""

    block: Candidate
    parent: StoreKey | None
    recency_ns: int


def coldest_part(
    blocks: Sequence[Candidate], free_bytes: int, expire_before_ns: int, margin_ns: int
) -> list[Candidate]:
    """Returns the oldest blocks that hold `free_bytes`, all expired ones, and a margin of younger
    ones."""
    ordered = sorted(blocks, key=lambda block: (block.mtime_ns, block.key))
    limit_ns: int | None = None
    for at, block in enumerate(ordered):
        if free_bytes <= 0 and block.mtime_ns >= expire_before_ns:
            if limit_ns is None or block.mtime_ns > limit_ns:
                return ordered[:at]
        else:
            free_bytes -= block.nbytes
            limit_ns = block.mtime_ns + margin_ns
    return ordered


def removal_order(
    blocks: Sequence[Candidate], parents: Mapping[StoreKey, StoreKey | None]
) -> list[Ranked]:
    """Orders blocks coldest first, each after all of its descendants among `blocks`."""
    by_key = {block.key: block for block in blocks}
    depth = _depths(by_key.keys(), parents)
    recency = {key: block.mtime_ns for key, block in by_key.items()}
    for key in sorted(by_key, key=lambda key: -depth[key]):
        parent = parents.get(key)
        if parent is not None and parent in recency and depth[parent] < depth[key]:
            recency[parent] = max(recency[parent], recency[key])
    order = sorted(by_key, key=lambda key: (recency[key], -depth[key], key))
    return [Ranked(by_key[key], parents.get(key), recency[key]) for key in order]


def _depths(
    keys: Iterable[StoreKey], parents: Mapping[StoreKey, StoreKey | None]
) -> dict[StoreKey, int]:
    """Returns the distance of each key to its first ancestor among `keys`. A cycle, which only
    corrupt headers can form, is cut."""
    known = set(keys)
    depth: dict[StoreKey, int] = {}
    for start in known:
        path: list[StoreKey] = []
        on_path: set[StoreKey] = set()
        key: StoreKey | None = start
        while key is not None and key in known and key not in depth and key not in on_path:
            path.append(key)
            on_path.add(key)
            key = parents.get(key)
        below = depth[key] if key is not None and key in depth else -1
        depth.update((passed, below + steps) for steps, passed in enumerate(reversed(path), 1))
    return depth


@dataclass
class GcReport:
    """The result of one collection."""

    scanned_blocks: int = 0
    scanned_bytes: int = 0
    removed_blocks: int = 0
    removed_bytes: int = 0
    gone_blocks: int = 0  # another collector removed them first
    gone_bytes: int = 0
    spared_blocks: int = 0  # used or published again since the scan
    removed_temps: int = 0
    removed_trash: int = 0  # removals finished for a collector that died
    restored_blocks: int = 0  # taken back from the trash of a collector that died
    redated_blocks: int = 0  # dated in the future; touched
    foreign_files: int = 0  # unknown files, ignored
    errors: int = 0
    more: bool = False  # another collection would find more to remove at once
    interrupted: bool = False  # because `stop` returned True
    error_text: str = ""


@dataclass
class _Scan:
    """The coldest blocks of a scan, in a heap with the warmest of them on top."""

    coldest: list[tuple[int, bytes, Candidate]] = field(default_factory=list)
    overflowed: bool = False


class SharedDirGc:
    """Collects one shared directory. Any thread may call `collect`; calls are serialised."""

    def __init__(
        self,
        store: SharedDirStore,
        max_candidates: int = MAX_CANDIDATES,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._settings = store.settings
        self._tree = store.tree
        self._ops = store.ops
        self._max_candidates = max_candidates
        self._is_stopping = stop
        self._lock = threading.Lock()

    def collect(self, now: float | None = None) -> GcReport:
        """Runs one collection. Tests pass `now` instead of the time of the file server."""
        report = GcReport()
        with self._lock:
            try:
                with contextlib.suppress(OSError):  # only informs the collectors of other hosts
                    self._ops.touch(self._tree.collected_path)
                present = self._store.clock.measure() if now is None else now
                self._collect(report, int(present * 1e9))
            except OSError as error:
                report.errors += 1
                report.error_text = str(error)
                logger.warning("garbage collection of %s failed: %s", self._tree.folder, error)
        return report

    def due(self, interval_s: float) -> bool:
        """Whether no collection, on any host, started within the interval."""
        try:
            began = self._ops.lstat(self._tree.collected_path).st_mtime_ns / 1e9
            return abs(self._store.clock.measure() - began) >= interval_s
        except OSError:
            return True

    # ---- scanning -------------------------------------------------------------------------------

    def _collect(self, report: GcReport, now_ns: int) -> None:
        scan = _Scan()
        for namespace in self._tree.namespaces():
            for shard in self._tree.shards(namespace):
                self._scan_shard(shard, report, scan, now_ns)
                if report.interrupted:
                    return
                self._remove_if_abandoned(shard, now_ns)
            self._remove_if_abandoned(namespace, now_ns)
        self._remove_drafts(now_ns)
        self._evict(report, scan, now_ns)
        self._store.usage_tracker.scanned(
            report.scanned_blocks - report.removed_blocks - report.gone_blocks,
            report.scanned_bytes - report.removed_bytes - report.gone_bytes,
        )

    def _scan_shard(self, shard: str, report: GcReport, scan: _Scan, now_ns: int) -> None:
        try:
            for entry in self._tree.shard_entries(shard):
                if self._is_stopping():
                    report.interrupted = True
                    return
                self._scan_entry(entry, report, scan, now_ns)
        except OSError as error:  # continue with the other folders
            report.errors += 1
            report.error_text = str(error)

    def _scan_entry(self, entry: Entry, report: GcReport, scan: _Scan, now_ns: int) -> None:
        age_ns = now_ns - entry.newest_ns
        if entry.kind is EntryKind.FOREIGN:
            report.foreign_files += 1
        elif entry.kind is EntryKind.TEMP:
            if abs(age_ns) >= self._settings.stale_temp_s * 1e9 and self._unlink(entry, report):
                report.removed_temps += 1
        elif entry.kind is EntryKind.TRASH:
            if abs(age_ns) >= self._settings.grace_s * 1e9:
                self._settle(entry, report)
        elif entry.key is not None:
            report.scanned_blocks += 1
            report.scanned_bytes += entry.status.st_size
            if age_ns < -_FUTURE_NS:
                self._redate(entry.key, report)
            elif age_ns >= self._settings.grace_s * 1e9:
                self._add_candidate(entry.key, entry.status, scan)

    def _add_candidate(self, key: StoreKey, status: os.stat_result, scan: _Scan) -> None:
        block = Candidate(key, status.st_mtime_ns, status.st_size, status.st_ino)
        item = (-block.mtime_ns, key, block)
        if len(scan.coldest) < self._max_candidates:
            heapq.heappush(scan.coldest, item)
        else:
            scan.overflowed = True
            heapq.heappushpop(scan.coldest, item)

    # ---- removing -------------------------------------------------------------------------------

    def _evict(self, report: GcReport, scan: _Scan, now_ns: int) -> None:
        settings = self._settings
        free_bytes = 0
        if settings.capacity_bytes and report.scanned_bytes > settings.capacity_bytes:
            goal = int(settings.capacity_bytes * settings.low_watermark)
            free_bytes = report.scanned_bytes - goal
        expire_before_ns = _ALL_TIME_NS
        if settings.ttl_s is not None:
            expire_before_ns = now_ns - int(settings.ttl_s * 1e9)
        blocks = coldest_part(
            [block for _, _, block in scan.coldest],
            free_bytes,
            expire_before_ns,
            int(settings.touch_interval_s * 1e9),
        )
        parents: dict[StoreKey, StoreKey | None] = {}
        for block in blocks:
            if self._is_stopping():
                report.interrupted = True
                return
            found = self._store.files.peek(block.key)
            parents[block.key] = None if found is None else found.header.parent
        order = removal_order(blocks, parents)
        left_bytes = self._remove_in_order(order, free_bytes, expire_before_ns, report)
        # Not if a block was in use: `recency.py` is touching its ancestors just now.
        if scan.overflowed and report.removed_blocks and not report.spared_blocks:
            warmest_ns = -scan.coldest[0][0]
            report.more = left_bytes > 0 or warmest_ns < expire_before_ns

    def _remove_in_order(
        self, order: list[Ranked], free_bytes: int, expire_before_ns: int, report: GcReport
    ) -> int:
        """Removes blocks until enough is freed; returns the bytes that are still to be freed."""
        in_use: set[StoreKey] = set()  # blocks with a successor that was used since the scan
        for ranked in order:
            block = ranked.block
            if free_bytes <= 0 and ranked.recency_ns >= expire_before_ns:
                break
            if self._is_stopping():
                report.interrupted = True
                break
            outcome = Removal.SPARED
            if block.key not in in_use:
                outcome = self._store.files.remove(block.key, block.seen)
            if outcome is Removal.REMOVED:
                report.removed_blocks += 1
                report.removed_bytes += block.nbytes
                free_bytes -= block.nbytes
            elif outcome is Removal.GONE:
                report.gone_blocks += 1
                report.gone_bytes += block.nbytes
                free_bytes -= block.nbytes
            else:
                report.errors += outcome is Removal.FAILED
                report.spared_blocks += outcome is Removal.SPARED
                if ranked.parent is not None:
                    in_use.add(ranked.parent)
        return free_bytes

    def _settle(self, entry: Entry, report: GcReport) -> None:
        assert entry.key is not None
        assert entry.condemned is not None
        outcome = self._store.files.settle(entry.key, entry.path, entry.condemned)
        report.removed_trash += outcome is Removal.REMOVED
        report.restored_blocks += outcome is Removal.SPARED
        report.errors += outcome is Removal.FAILED

    def _redate(self, key: StoreKey, report: GcReport) -> None:
        """Touches a block dated in the future, which would otherwise never be removed."""
        try:
            self._ops.touch(self._tree.block_path(key))
            report.redated_blocks += 1
        except OSError as error:
            report.errors += not is_absent(error)

    def _unlink(self, entry: Entry, report: GcReport) -> bool:
        try:
            self._ops.unlink(entry.path)
        except OSError as error:
            report.errors += not is_absent(error)
            return False
        return True

    def _remove_if_abandoned(self, folder: str, now_ns: int) -> None:
        """Removes an empty folder that has not changed for long, as of a retired model."""
        with contextlib.suppress(OSError):  # usually because it is not empty
            changed_ns = self._ops.lstat(folder).st_mtime_ns
            if now_ns - changed_ns >= self._settings.stale_temp_s * 1e9:
                self._ops.rmdir(folder)

    def _remove_drafts(self, now_ns: int) -> None:
        """Removes drafts of processes that died while they created the tree."""
        root = os.path.dirname(self._tree.folder)
        with contextlib.suppress(OSError):  # another collector may remove them too
            for found in self._ops.scandir(root):
                if found.name.startswith(f".{FOLDER}-") and found.is_dir(follow_symlinks=False):
                    age_ns = now_ns - found.stat(follow_symlinks=False).st_ctime_ns
                    if abs(age_ns) >= self._settings.stale_temp_s * 1e9:
                        shutil.rmtree(found.path, ignore_errors=True)


class GcThread:
    """Collects periodically in a thread until `stop`.

    Each host may run one; a round is skipped if a collection has started recently on any host. The
    daemon owns it.
    """

    def __init__(self, store: SharedDirStore, interval_s: float) -> None:
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._gc = SharedDirGc(store, stop=self._stopping.is_set)
        self._thread = threading.Thread(target=self._run, name="tiered-kv-gc", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Collects soon, regardless of other hosts, because a put found the disk full."""
        self._wake.set()

    def stop(self) -> None:
        """Interrupts a running collection at its next file."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            # Hosts that started together should not all scan together.
            is_woken = self._wake.wait(self._interval_s * random.uniform(0.9, 1.1))
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                if is_woken or self._gc.due(self._interval_s / 2):
                    self._collect_all()
            except Exception:
                logger.exception("garbage collection of the shared directory failed; will retry")

    def _collect_all(self) -> None:
        more = True
        while more and not self._stopping.is_set():
            more = self._gc.collect().more
