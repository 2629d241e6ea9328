"""Memory, SSD and backing store combined into one store.

A hit in a slower tier is read into memory and served from there (promotion). Every block stored is
written behind to the slower tiers, so a block evicted from memory is usually on the SSD already;
one that is not written yet stays in memory until it is, as long as the queue accepts it (demotion).

Calls return at once and answer through a callback, from this thread or another. The caller's thread
only accesses memory; everything that reads a disk runs in the pool. The backing store may hang
without affecting the other tiers: its calls run on executors with a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from vllm_tiered_kv.core.store import (
    Durability,
    LowerStore,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.device.pinning import Prefaulter
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.demotion import Demotion, Unwritten
from vllm_tiered_kv.server.tiers.fills import Fills, Watch
from vllm_tiered_kv.server.tiers.lookups import Lookups
from vllm_tiered_kv.server.tiers.promotion import Promotion, Ready
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot
from vllm_tiered_kv.stores.namespaces import QuotaOf, no_quota
from vllm_tiered_kv.stores.ssd.store import SsdStore

logger = logging.getLogger(__name__)

BACKING_THREADS = 8  # for lookups, reads and deletes
_WRITE_TIMEOUT_FACTOR = 10  # a write may take this many times as long as a read: no request waits
_DELETED_AT_ONCE = 4096  # of a namespace; other requests take their turns in between
_MAX_LOOP_BLOCKS = 64  # larger requests are finished in the pool, not on the loop
_MEMORY, _SSD, _BACKING = Tier.MEMORY.value, Tier.SSD.value, Tier.BACKING.value


@dataclass(frozen=True)
class TierSettings:
    """What the daemon's options say about its tiers, the stores aside."""

    eviction: str = "lru"
    huge_pages: bool = False
    prefault: bool = False
    workers: int = 16  # threads that finish calls
    write_queue_bytes: int | None = None  # of each slower tier; None: a part of the memory
    backing_timeout_s: float = 2.0
    """How long a request waits for an answer or a block of the backing store. Writes to it may take
    ten times as long."""
    quota_of: QuotaOf = no_quota


_DEFAULTS = TierSettings()


class TieredStore:
    """The daemon's store over all tiers. Request handlers call it on the reactor's thread."""

    def __init__(
        self,
        memory_bytes: int,
        ssd: SsdStore | None,
        backing: LowerStore | None,
        recorder: Recorder,
        settings: TierSettings = _DEFAULTS,
        on_deleted: Callable[[Sequence[StoreKey]], None] = lambda keys: None,
        watch: Watch | None = None,
    ) -> None:
        """`on_deleted` is called from any thread with keys of which memory has just deleted some.
        The event loop of `watch` collects finished copies; without one, `put` waits for them."""
        self._recorder = recorder
        self.memory = MemoryStore(
            memory_bytes,
            settings.eviction,
            settings.huge_pages,
            lambda key: self._demotion.may_leave_memory(StoreKey(key)),
            lambda key, nbytes: self._demotion.left_memory(StoreKey(key)),
            None if ssd is None else lambda key: ssd.contains([StoreKey(key)])[0],
            settings.quota_of,
        )
        self._prefaulter = Prefaulter(self.memory.arena.region) if settings.prefault else None
        self.ssd = ssd
        self.backing = backing
        self._slower: list[tuple[str, LowerStore]] = []
        if ssd is not None:
            self._slower.append((_SSD, ssd))
        if backing is not None:
            self._slower.append((_BACKING, backing))
        # Queued blocks are pinned, so the queues must leave room for new blocks; see
        # `ClientLimits`.
        default = memory_bytes // 4 // max(1, len(self._slower))
        self._demotion = Demotion(
            self.memory,
            self._slower,
            backing,
            recorder,
            settings.write_queue_bytes or default,
            _WRITE_TIMEOUT_FACTOR * settings.backing_timeout_s,
        )
        self._pool = StoreExecutor("io", settings.workers)
        self._flusher = StoreExecutor("flush", 1)  # of its own: what it does may take long
        if ssd is not None:
            self._pool.submit(ssd.measure_reads)  # engines ask for the speed before any read
        self.backing_executor = (
            None
            if backing is None
            else StoreExecutor(_BACKING, BACKING_THREADS, settings.backing_timeout_s, recorder)
        )
        self._promotion = Promotion(
            self.memory, self._slower, ssd, backing, recorder, self._pool, self.backing_executor
        )
        self.lookups = Lookups(
            self.memory, ssd, backing, recorder, self._pool, self.backing_executor
        )
        self._lock = threading.Lock()
        self._fills = Fills(watch)
        self._finishing: set[Future[None]] = set()  # large puts that are finished in the pool
        self._on_deleted = on_deleted
        self._flush_waiters: list[Callable[[list[str]], None]] = []

    # ---- reading --------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[StoreKey], ready: Ready, client: Hashable = "") -> None:
        """Passes blocks to `ready`, pinned in memory, in any order. Reads of the backing store are
        fair-queued per client."""
        here, missing = self.hold_in_memory(keys)
        for n, block in here:
            ready(n, block)
        if missing:
            self.fetch_slower([(n, keys[n]) for n in missing], ready, client)

    def hold_all(self, keys: Sequence[StoreKey]) -> list[PinnedSlot] | None:
        """All blocks, pinned for the receiver, or None if one of them is not in memory. The caller
        counts the hits."""
        held = self.memory.hold(keys)
        found = [block for block in held if block is not None]
        if len(found) < len(keys):
            self.memory.let_go(found)
            return None
        return found

    def count_hits(self, blocks: int) -> None:
        """Counts reads by `hold_all` and directly from memory."""
        self._recorder.add(names.HITS, blocks, _MEMORY)

    def hold_in_memory(
        self, keys: Sequence[StoreKey]
    ) -> tuple[list[tuple[int, PinnedSlot]], list[int]]:
        """Blocks in memory with their positions, pinned for the receiver; and the positions of the
        others."""
        held = self.memory.hold(keys)
        here = [(n, block) for n, block in enumerate(held) if block is not None]
        self._recorder.add(names.HITS, len(here), _MEMORY)
        return here, [n for n, block in enumerate(held) if block is None]

    def fetch_slower(
        self, wanted: Sequence[tuple[int, StoreKey]], ready: Ready, client: Hashable = ""
    ) -> None:
        """Like `fetch`, for (position, key) of blocks that are not in memory."""
        self._promotion.fetch(wanted, ready, client)

    # ---- writing --------------------------------------------------------------------------------

    def put(
        self,
        items: Sequence[PutItem],
        durability: Durability,
        done: Callable[[list[PutResult]], None],
        copied: Callable[[], None],
    ) -> None:
        """Stores blocks. Calls `copied` when the payloads are no longer needed, and `done` when the
        blocks are as durable as requested."""
        try:
            slots = self.reserve([(item.key, item.parent, item.payload.nbytes) for item in items])
        except BaseException:
            copied()
            raise
        if durability is Durability.RECEIVED:
            done([PutResult.STORED if isinstance(slot, PinnedSlot) else slot for slot in slots])
            done = _ignore
        filled = partial(self._filled, items, slots, durability, done, copied)
        try:
            with self.memory.giving_back(slots):
                self._fills.start(*self.memory.copies(slots, items), filled)
        except Exception:  # the client must get an answer
            logger.exception("cannot copy received blocks into memory")
            copied()
            done([s if isinstance(s, PutResult) else PutResult.FAILED for s in slots])

    def _filled(
        self,
        items: Sequence[PutItem],
        slots: list[PinnedSlot | PutResult],
        durability: Durability,
        done: Callable[[list[PutResult]], None],
        copied: Callable[[], None],
        checksums: list[int],
    ) -> None:
        def end() -> None:
            filled = self.memory.filled(slots, items, checksums)
            copied()
            self._demotion.write_behind([item.key for item in items], filled, durability, done)

        def failed() -> None:
            copied()
            done([PutResult.FAILED] * len(slots))

        if len(slots) > _MAX_LOOP_BLOCKS:
            ended: Future[None] = Future()
            self._finishing.add(ended)
            ended.add_done_callback(self._finishing.discard)

            def fail() -> None:
                failed()
                ended.set_result(None)

            self._pool.submit(end, ended.set_result, fail)
            return
        try:
            end()
        except Exception:
            logger.exception("cannot publish received blocks")
            failed()

    def reserve(
        self, blocks: Sequence[tuple[StoreKey, StoreKey | None, int]]
    ) -> list[PinnedSlot | PutResult]:
        """Reserves slots in memory for (key, parent, length), in chain order."""
        return self.memory.reserve_chain(blocks, self._may_be_elsewhere)

    def _may_be_elsewhere(self, key: StoreKey) -> bool:
        if self.backing is not None:
            return True  # a backing store is not asked here: it may be slow
        return self.ssd is not None and self.ssd.contains([key])[0]

    def sealed(self, slots: Sequence[PinnedSlot], done: Callable[[list[PutResult]], None]) -> None:
        """Verifies and publishes slots that an attached process has filled."""
        self._pool.submit(
            partial(self._seal, slots, done),
            failed=lambda: done([PutResult.FAILED] * len(slots)),
        )

    def _seal(self, slots: Sequence[PinnedSlot], done: Callable[[list[PutResult]], None]) -> None:
        try:
            results = self.memory.seal(slots)
        except Exception:  # the client must get an answer
            logger.exception("cannot publish blocks of an attached process")
            results = [PutResult.FAILED] * len(slots)
        self._demotion.write_behind([slot.key for slot in slots], results, Durability.MEMORY, done)

    # ---- delete, flush, usage -------------------------------------------------------------------

    def delete(self, keys: Sequence[StoreKey], done: Callable[[int | None], None]) -> None:
        """Calls `done` with how many keys were stored; with None if some may still be."""

        def failed() -> None:
            done(None)

        def near() -> None:
            missing = [
                key for key, tier in zip(keys, self.lookups.near(keys), strict=True) if tier is None
            ]
            present = len(keys) - len(missing)
            is_gone = self._delete_near(keys)
            if self.backing_executor is None:
                done(present if is_gone else None)
                return
            self.backing_executor.submit(
                lambda: self._delete_far(keys, missing),
                lambda far: self._pool.submit(partial(again, present, far), failed=failed),
                failed,
            )

        def again(present: int, far: int | None) -> None:
            is_gone = self._delete_near(keys)  # read back from the backing store meanwhile
            done(present + far if is_gone and far is not None else None)

        self._pool.submit(near, failed=failed)

    def delete_namespace(self, namespace: bytes, done: Callable[[int | None], None]) -> None:
        """Deletes the blocks that memory and SSD hold of a namespace. Calls `done` with their
        number; with None if some may still be there. A backing store keeps its blocks: it cannot
        list them, and other daemons use them too."""

        def delete() -> int | None:
            found = dict.fromkeys(self.memory.keys_of(namespace))
            if self.ssd is not None:
                found.update(dict.fromkeys(self.ssd.keys_of(namespace)))
            keys = list(found)
            is_gone = True
            for start in range(0, len(keys), _DELETED_AT_ONCE):
                some = keys[start : start + _DELETED_AT_ONCE]
                is_gone &= self._delete_near(some)
                self._demotion.give_up(some)
            return len(keys) if is_gone else None

        self._flusher.submit(delete, done, lambda: done(None))

    def _delete_near(self, keys: Sequence[StoreKey]) -> bool:
        """Deletes from memory and SSD. False if the SSD may have some again after a crash."""
        with self._promotion.promotion_blocked(keys):
            if self.memory.delete(keys):
                self._on_deleted(keys)
            return self._delete_from(_SSD, keys)

    def _delete_from(self, tier: str, keys: Sequence[StoreKey]) -> bool:
        try:
            self._demotion.delete(tier, keys)
        except NotDeletedError as error:
            logger.warning("%s", error)
            return False
        return True

    def _delete_far(self, keys: Sequence[StoreKey], not_near: Sequence[StoreKey]) -> int | None:
        """How many only the backing store had; None if it may still have some."""
        present = 0 if self.backing is None else sum(self.backing.contains(not_near))
        return present if self._delete_from(_BACKING, keys) else None

    def flush(self, done: Callable[[list[str]], None]) -> None:
        """Calls `done` when everything stored before is as durable as possible, with a sentence for
        each tier that could not write everything."""
        with self._lock:
            self._flush_waiters.append(done)
        self._flusher.submit(
            self._flush,
            failed=lambda: _notify_all(self._take_flush_waiters(), ["the daemon has stopped"]),
        )

    def _take_flush_waiters(self) -> list[Callable[[list[str]], None]]:
        with self._lock:
            waiting, self._flush_waiters = self._flush_waiters, []
            return waiting

    def _flush(self) -> None:
        """Serves all waiting flush requests at once."""
        waiting = self._take_flush_waiters()
        if not waiting:
            return
        try:
            self._fills.settle()
            wait(self._finishing.copy())
            # An SSD without room evicts blocks, which is no error. A backing store without room,
            # as on a full file system, accepts nothing more.
            failed = [
                str(left)
                for left in self._demotion.flush()
                if left.has_failed or left.tier == _BACKING
            ]
        except Exception:
            logger.exception("a flush failed because of an internal error")
            failed = ["the daemon failed; its log says why"]
        _notify_all(waiting, failed)

    @property
    def has_disk(self) -> bool:
        """Whether any tier survives the end of the daemon."""
        return bool(self._slower)

    @property
    def is_backing_absent(self) -> bool:
        """Whether the backing store hangs and is therefore not used."""
        return self.backing_executor is not None and self.backing_executor.is_hung

    def pending_writes(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes waiting to be written, by tier."""
        return self._demotion.pending()

    def usages(self) -> dict[str, StoreUsage]:
        usages = {_MEMORY: self.memory.usage()}
        for tier, store in self._slower:
            usages[tier] = store.usage()
        return usages

    def usages_by_namespace(self) -> dict[str, dict[bytes, tuple[int, int]]]:
        """Blocks and bytes of each namespace, by tier. Unknown for a backing store."""
        usages = {_MEMORY: self.memory.usage_by_namespace()}
        if self.ssd is not None:
            usages[_SSD] = self.ssd.usage_by_namespace()
        return usages

    def evictions_by_namespace(self) -> dict[str, dict[bytes, int]]:
        """Blocks that each tier has evicted. Unknown for a backing store."""
        evictions = {_MEMORY: self.memory.evictions_by_namespace()}
        if self.ssd is not None:
            evictions[_SSD] = self.ssd.evictions_by_namespace()
        return evictions

    def drain(
        self, progress: Callable[[str, int], None] = lambda tier, left: None
    ) -> list[Unwritten]:
        """Finishes requests in flight, writes everything to the slower tiers and returns what could
        not be written. Only `close` may be called afterwards."""
        self._end_threads()
        return self._demotion.flush(progress, is_last=True)

    def close(self) -> bool:
        """False if the backing store hangs and threads are left in it."""
        is_idle = self._end_threads()
        self._flusher.close(runs_queue=True)
        has_ended = self._demotion.close()
        if self._prefaulter is not None:
            self._prefaulter.close()
        self.memory.close()
        return is_idle and has_ended

    def _end_threads(self) -> bool:
        """Starts with the backing store: its results are processed in the pool."""
        is_idle = self.backing_executor is None or self.backing_executor.close()
        self._fills.settle()
        self._pool.close(runs_queue=True)
        return is_idle


def _notify_all(waiting: Sequence[Callable[[list[str]], None]], failed: list[str]) -> None:
    for done in waiting:
        done(failed)


def _ignore(results: list[PutResult]) -> None:
    pass
