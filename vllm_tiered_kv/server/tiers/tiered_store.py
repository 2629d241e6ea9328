"""Memory over SSD over a backing store, as one.

A hit in a slower tier is read into memory and served from there (promotion). Every block put is
written behind to the slower tiers, so a block that leaves memory is usually on the SSD already;
one that is not may stay until it has been written, as long as the queue takes it (demotion).

Calls return at once and answer through a callback, from this thread or another. Only memory is
touched on the caller's thread; whatever reads a disk runs in the pool. The backing store may hang,
and must not take the other tiers with it: its calls run on executors with a deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
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
from vllm_tiered_kv.device.prefaulter import Prefaulter
from vllm_tiered_kv.errors import NotDeletedError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.demotion import Demotion, Unwritten
from vllm_tiered_kv.server.tiers.fills import Fills
from vllm_tiered_kv.server.tiers.lookups import Located, Lookups
from vllm_tiered_kv.server.tiers.promotion import Promotion, Ready
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot
from vllm_tiered_kv.stores.namespaces import HasQuota, QuotaOf, any_may
from vllm_tiered_kv.stores.ssd.store import SsdStore

logger = logging.getLogger(__name__)

BACKING_THREADS = 8  # for lookups, reads and deletes
_WRITE_TIMEOUT = 10  # times as long as a request waits: for a write that nobody waits for
_FEW = 64  # blocks of a request that the loop may go on with
_MEMORY, _SSD, _BACKING = Tier.MEMORY.value, Tier.SSD.value, Tier.BACKING.value


class TieredStore:
    def __init__(
        self,
        memory_bytes: int,
        ssd: SsdStore | None,
        backing: LowerStore | None,
        recorder: Recorder,
        eviction: str = "lru",
        huge_pages: bool = False,
        workers: int = 16,
        write_queue_bytes: int | None = None,
        prefault: bool = False,
        backing_timeout_s: float = 2.0,
        has_quota: HasQuota = any_may,
        quota_of: QuotaOf | None = None,
    ) -> None:
        """The backing store is waited for, for an answer or a block, for `backing_timeout_s` at
        most. Writing to it is given up when it has written nothing for ten times as long."""
        self._recorder = recorder
        self.memory = MemoryStore(
            memory_bytes,
            eviction,
            huge_pages,
            lambda key: self._lower.may_leave_memory(StoreKey(key)),
            lambda key, nbytes: self._lower.left_memory(StoreKey(key)),
            None if ssd is None else lambda key: ssd.contains([StoreKey(key)])[0],
            has_quota,
            quota_of,
        )
        self._prefaulter = Prefaulter(self.memory.arena.region) if prefault else None
        self.ssd = ssd
        self.backing = backing
        self._slower: list[tuple[str, LowerStore]] = []
        if ssd is not None:
            self._slower.append((_SSD, ssd))
        if backing is not None:
            self._slower.append((_BACKING, backing))
        # Blocks waiting to be written are pinned: they must leave room for new ones, see
        # `ClientLimits`.
        queue_bytes = write_queue_bytes or memory_bytes // 4 // max(1, len(self._slower))
        self._lower = Demotion(
            self.memory,
            self._slower,
            backing,
            recorder,
            queue_bytes,
            _WRITE_TIMEOUT * backing_timeout_s,
        )
        self._pool = StoreExecutor("io", workers)
        self._flusher = StoreExecutor("flush", 1)  # a flush may wait for as long as a disk takes
        if ssd is not None:
            self._pool.submit(ssd.measure_reads)  # engines ask before they read anything
        self.backing_executor = (
            None
            if backing is None
            else StoreExecutor(_BACKING, BACKING_THREADS, backing_timeout_s, recorder)
        )
        self._way_up = Promotion(
            self.memory, self._slower, ssd, backing, recorder, self._pool, self.backing_executor
        )
        self._lookups = Lookups(
            self.memory, ssd, backing, recorder, self._pool, self.backing_executor
        )
        self._lock = threading.Lock()
        self._fills = Fills()
        self._ending: set[Future[None]] = set()  # fills of many blocks
        self.on_deleted: Callable[[Sequence[StoreKey]], None] = lambda keys: None
        """Told, from any thread, of keys that memory has just deleted some of."""
        self._to_flush: list[Callable[[list[str]], None]] = []

    # ---- where is it? ---------------------------------------------------------------------------

    def match(
        self,
        keys: Sequence[StoreKey],
        suffixes: Sequence[bytes],
        done: Callable[[Located], None],
    ) -> None:
        """Counts leading keys that are here with every suffix; without suffixes the keys are
        whole."""
        self._lookups.match(keys, suffixes, done)

    def match_and_hold(
        self,
        keys: Sequence[StoreKey],
        suffixes: Sequence[bytes],
        nbytes: int,
        most: int,
        done: Callable[[list[PinnedSlot], Located], None],
    ) -> None:
        """As `match`. Blocks of so many bytes at the head that lie in memory are held for the
        receiver, `most` of them at most; all others are only counted."""
        self._lookups.match_and_hold(keys, suffixes, nbytes, most, done)

    def contains(self, keys: Sequence[StoreKey], done: Callable[[list[Tier | None]], None]) -> None:
        self._lookups.contains(keys, done)

    # ---- out ------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[StoreKey], ready: Ready, client: Hashable = "") -> None:
        """Brings blocks into memory and hands each to `ready`, in no particular order. Reads
        of the backing store are fair-queued per client."""
        here, missing = self.hold_here(keys)
        for n, block in here:
            ready(n, block)
        self.fetch_slower([(n, keys[n]) for n in missing], ready, client)

    def hold_here(self, keys: Sequence[StoreKey]) -> tuple[list[tuple[int, PinnedSlot]], list[int]]:
        """Blocks in memory with their positions, held for the receiver; and the others'
        positions."""
        held = self.memory.hold(keys)
        here = [(n, block) for n, block in enumerate(held) if block is not None]
        self._recorder.add(names.HITS, len(here), _MEMORY)
        return here, [n for n, block in enumerate(held) if block is None]

    def fetch_slower(
        self, wanted: Sequence[tuple[int, StoreKey]], ready: Ready, client: Hashable = ""
    ) -> None:
        """As `fetch`, for (position, key) of blocks that are not in memory."""
        self._way_up.fetch(wanted, ready, client)

    # ---- in -------------------------------------------------------------------------------------

    def put(
        self,
        items: Sequence[PutItem],
        durability: Durability,
        done: Callable[[list[PutResult]], None],
        copied: Callable[[], None],
    ) -> None:
        """Stores blocks. `copied` is called when the payloads are no longer needed, `done` when
        they are as durable as was asked for."""
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
        except Exception:  # the sender must hear of it
            logger.exception("blocks could not be taken over")
            copied()
            done([s if isinstance(s, PutResult) else PutResult.FAILED for s in slots])

    def collect_with(self, watch: Callable[[int, Callable[[], None]], None]) -> None:
        """Has a loop go on with what was copied, by watching a descriptor. Without one, `put`
        waits for its copies."""
        self._fills.watch(watch)

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
            self._lower.write_behind([item.key for item in items], filled, durability, done)

        def failed() -> None:
            copied()
            done([PutResult.FAILED] * len(slots))

        if len(slots) > _FEW:
            ended: Future[None] = Future()
            self._ending.add(ended)
            ended.add_done_callback(self._ending.discard)

            def fail() -> None:
                failed()
                ended.set_result(None)

            self._pool.submit(end, ended.set_result, fail)
            return
        try:
            end()
        except Exception:
            logger.exception("a request to the tiers failed")
            failed()

    def reserve(
        self, blocks: Sequence[tuple[StoreKey, StoreKey | None, int]]
    ) -> list[PinnedSlot | PutResult]:
        """Slots in memory for (key, parent, length), in chain order."""
        return self.memory.reserve_chain(blocks, self._may_be_elsewhere)

    def _may_be_elsewhere(self, key: StoreKey) -> bool:
        if self.backing is not None:
            return True  # not asked here: it may be slow
        return self.ssd is not None and self.ssd.contains([key])[0]

    def sealed(self, slots: Sequence[PinnedSlot], done: Callable[[list[PutResult]], None]) -> None:
        """Takes over slots an attached process has filled: verifies and publishes them."""
        self._pool.submit(
            partial(self._seal, slots, done),
            failed=lambda: done([PutResult.FAILED] * len(slots)),
        )

    def _seal(self, slots: Sequence[PinnedSlot], done: Callable[[list[PutResult]], None]) -> None:
        try:
            results = self.memory.seal(slots)
        except Exception:  # the sender must hear of it
            logger.exception("blocks could not be taken over")
            results = [PutResult.FAILED] * len(slots)
        self._lower.write_behind([slot.key for slot in slots], results, Durability.MEMORY, done)

    # ---- the rest -------------------------------------------------------------------------------

    def delete(self, keys: Sequence[StoreKey], done: Callable[[int | None], None]) -> None:
        """Calls `done` with how many were here; with None where some may still be."""

        def failed() -> None:
            done(None)

        def near() -> None:
            missing = [
                key
                for key, tier in zip(keys, self._lookups.near(keys), strict=True)
                if tier is None
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
            is_gone = self._delete_near(keys)  # read back from there meanwhile
            done(present + far if is_gone and far is not None else None)

        self._pool.submit(near, failed=failed)

    def _delete_near(self, keys: Sequence[StoreKey]) -> bool:
        """False where the SSD may have some again after a crash."""
        with self._way_up.barring(keys):
            self._delete_here(keys)
            return self._delete_from(_SSD, keys)

    def _delete_from(self, tier: str, keys: Sequence[StoreKey]) -> bool:
        try:
            self._lower.delete(tier, keys)
        except NotDeletedError as error:
            logger.warning("%s", error)
            return False
        return True

    def _delete_here(self, keys: Sequence[StoreKey]) -> None:
        if self.memory.delete(keys):
            self.on_deleted(keys)

    def _delete_far(self, keys: Sequence[StoreKey], not_near: Sequence[StoreKey]) -> int | None:
        """How many were in the backing store and in no other; None where it may still have some."""
        present = 0 if self.backing is None else sum(self.backing.contains(not_near))
        return present if self._delete_from(_BACKING, keys) else None

    def flush(self, done: Callable[[list[str]], None]) -> None:
        """Calls `done` when all that was put before is as durable as it can be, with what could
        not be written, in words."""
        with self._lock:
            self._to_flush.append(done)
        self._flusher.submit(
            self._flush,
            failed=lambda: _tell_all(self._take_flushes(), ["the daemon has stopped"]),
        )

    def _take_flushes(self) -> list[Callable[[list[str]], None]]:
        with self._lock:
            waiting, self._to_flush = self._to_flush, []
            return waiting

    def _flush(self) -> None:
        """Serves all who wait at once."""
        waiting = self._take_flushes()
        if not waiting:
            return
        try:
            self._fills.settle()
            wait(self._ending.copy())
            # An SSD that has no room evicts; a folder that has none, as on a full file system,
            # takes nothing more.
            failed = [
                str(left)
                for left in self._lower.flush()
                if left.has_failed or left.tier == _BACKING
            ]
        except Exception:
            logger.exception("flushing failed")
            failed = ["the daemon failed; its log says why"]
        _tell_all(waiting, failed)

    @property
    def has_disk(self) -> bool:
        """Whether anything here outlives the daemon."""
        return bool(self._slower)

    @property
    def is_backing_absent(self) -> bool:
        """Whether the backing store hangs, so that it is not asked."""
        return self.backing_executor is not None and self.backing_executor.is_hung

    def pending_writes(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes waiting to be written, by tier."""
        return self._lower.pending()

    def usages(self) -> dict[str, StoreUsage]:
        usages = {_MEMORY: self.memory.usage()}
        for tier, store in self._slower:
            usages[tier] = store.usage()
        return usages

    def usages_by_namespace(self) -> dict[str, dict[bytes, tuple[int, int]]]:
        """Blocks and bytes of each namespace, by tier. A backing folder does not know."""
        usages = {_MEMORY: self.memory.usage_by_namespace()}
        if self.ssd is not None:
            usages[_SSD] = self.ssd.usage_by_namespace()
        return usages

    def set_ssd_quota(self, namespace: bytes, quota_bytes: int) -> None:
        if self.ssd is not None:
            self.ssd.set_quota(namespace, quota_bytes)

    def drain(
        self, progress: Callable[[str, int], None] = lambda tier, left: None
    ) -> list[Unwritten]:
        """Ends what is under way and writes everything to the slower tiers; what could not be
        written. Nothing may be asked of this store meanwhile or afterwards."""
        self._end_threads()
        return self._lower.flush(progress, is_last=True)

    def close(self) -> bool:
        """False where the backing store hangs, and threads with it that nobody can end."""
        is_idle = self._end_threads()
        self._flusher.close(runs_queue=True)
        has_ended = self._lower.close()
        if self._prefaulter is not None:
            self._prefaulter.close()
        self.memory.close()
        return is_idle and has_ended

    def _end_threads(self) -> bool:
        """First those of the backing store: what it answers goes on in the pool."""
        is_idle = self.backing_executor is None or self.backing_executor.close()
        self._fills.settle()
        self._pool.close(runs_queue=True)
        return is_idle


def _tell_all(waiting: Sequence[Callable[[list[str]], None]], failed: list[str]) -> None:
    for done in waiting:
        done(failed)


def _ignore(results: list[PutResult]) -> None:
    pass
