"""Maps blocks to slots of the data file, and queues the journal records of every change.

All calls are made under the store's lock. The index keeps everything that a journal record says
about a block, so that a new generation of the journal can be written from it, in order of use.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.core.arena_geometry import SlabGeometry, aligned
from vllm_tiered_kv.core.store import (
    BlockFacts,
    PutItem,
    PutResult,
    StoreKey,
)
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.stores.namespaces import NamespaceUsage, QuotaOf, owner_of
from vllm_tiered_kv.stores.ssd.committer import Committer
from vllm_tiered_kv.stores.ssd.disk import OsDisk
from vllm_tiered_kv.stores.ssd.opening import OpenFolder
from vllm_tiered_kv.stores.ssd.record_format import (
    ALIGNMENT,
    encode_del,
    encode_put,
    rows_of,
)
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks
from vllm_tiered_kv.stores.ssd.settings import Backoff, FsyncPolicy, SsdCounters

logger = logging.getLogger(__name__)

_ROOM_ATTEMPTS = 32  # concurrent puts may take the slots that were just freed
# A put evicts ahead of the next one, so that the next need not wait until an eviction is durable.
_MAX_AHEAD = 1024  # most slots of a class kept free
_AHEAD_SHARE = 32  # at most one in this many slots of a class
_MIN_SLOTS_FOR_AHEAD = 512  # no slots are kept free in smaller classes


class BlockTable:
    """Index and journal records of one store. `SsdStore` owns it and starts its committer."""

    def __init__(
        self,
        lock: threading.Lock,
        disk: OsDisk,
        folder: Path,
        opened: OpenFolder,
        eviction: str,
        fsync: FsyncPolicy,
        counters: SsdCounters,
        retry_seconds: float,
        quota_of: QuotaOf,
    ) -> None:
        self._folder = folder
        self._budget = budget = opened.budget
        self._counters = counters
        self._quota_of = quota_of
        self._logged_full = False
        self._awaited: Counter[int] = Counter()  # slots that waiting puts need, by class
        self.geometry = SlabGeometry(budget.data_bytes, budget.slab_bytes, ALIGNMENT)
        self.index = DurableIndex(self.geometry, eviction, self._on_evict, self._on_leave, quota_of)
        self.live_bytes = 0  # bytes of the slots of readable blocks
        self.by_namespace = NamespaceUsage()  # of the same slots
        self.lost: list[StoreKey] = []  # not taken yet
        self.committer = Committer(
            lock,
            self.index,
            self.drop_lost,
            disk,
            folder,
            opened,
            fsync,
            counters,
            Backoff(retry_seconds),
        )

    def restore(self, live: LiveBlocks) -> None:
        """Fills an empty table with recovered blocks."""
        classes = [
            self.index.add_class(slot_bytes, owner) for owner, slot_bytes in live.class_shapes
        ]
        of_block = np.array(classes, np.int64)[live.classes]
        rows = rows_of(live.records)
        self.index.restore_rows(rows, of_block)
        slot_bytes = np.array(self.geometry.slot_bytes, np.int64)[of_block]
        self.live_bytes = int(slot_bytes.sum())
        self.by_namespace.add_rows(rows.keys, slot_bytes)

    def size_class(self, key: StoreKey, nbytes: int) -> int:
        """Returns the size class of a block; valid as long as the class has a block."""
        return self.index.class_for(nbytes, owner_of(key, self._quota_of))

    def offset(self, slot: int, length: int) -> int:
        slab, position = divmod(slot, self.geometry.slots_per_slab)
        return slab * self.geometry.slab_bytes + position * aligned(length, ALIGNMENT)

    def facts(self, key: StoreKey) -> BlockFacts | None:
        if self.index.lookup(key) is not Lookup.HIT:
            return None
        slot = self.index.slot_of(key)
        _, parent = self.index.block_in(slot)
        length, checksum = self.index.facts_in(slot)
        return BlockFacts(length, checksum, StoreKey(parent) if parent is not None else None)

    # ---- adding blocks ------------------------------------------------------------------------

    def reserve(self, item: PutItem, nbytes: int, pending: Sequence[PutItem]) -> int | PutResult:
        """Reserves a slot, or returns why there is none; may wait for evictions to be durable.

        It evicts at once for all `pending` blocks of the batch, which include this one, and for
        other waiting puts, which would otherwise take the freed slots.
        """
        for _ in range(_ROOM_ATTEMPTS):
            if self.index.lookup(item.key) is not Lookup.MISS:
                return PutResult.PRESENT
            if self.index.held >= self._budget.max_blocks:
                self._warn_full_once()
                if not self.index.evict_coldest(item.parent):
                    return PutResult.DROPPED
            size_class = self.size_class(item.key, nbytes)  # may have changed while waiting
            slot = self.index.reserve(item.key, item.parent, size_class)
            if slot is not None:
                return slot
            missing = sum(self.index.lookup(other.key) is Lookup.MISS for other in pending)
            if not (self.index.has_quarantined or self.committer.is_releasing):
                wanted = missing + self._awaited[size_class]
                slots = min(wanted, _MAX_AHEAD) + self._slots_ahead(size_class)
                if not self.index.make_room(size_class, slots, item.parent):
                    return PutResult.DROPPED
            self._awaited[size_class] += missing
            is_released = self.committer.wait_release()
            self._awaited[size_class] -= missing
            if not is_released:
                return PutResult.FAILED
        return PutResult.DROPPED

    def evict_ahead(self, size_class: int) -> None:
        """Evicts so that the next put finds free slots."""
        ahead = self._slots_ahead(size_class)
        if (
            ahead
            and not (self.index.has_quarantined or self.committer.is_releasing)
            and self.index.free_slots(size_class) < ahead // 2
            and self.index.make_room(size_class, ahead)
        ):
            self.committer.kick()

    def _slots_ahead(self, size_class: int) -> int:
        """Returns how many slots of the class should be kept free."""
        slots = self.index.owned_slots(size_class)
        return min(_MAX_AHEAD, slots // _AHEAD_SHARE) if slots >= _MIN_SLOTS_FOR_AHEAD else 0

    def _warn_full_once(self) -> None:
        if not self._logged_full:
            self._logged_full = True
            logger.warning(
                "%s: the index is full with %d blocks. The blocks are small for this capacity, so "
                "part of the space stays unused",
                self._folder,
                self._budget.max_blocks,
            )

    def commit(self, item: PutItem, slot: int, length: int, checksum: int) -> bool:
        """Makes a written block visible and queues its record; False if it was deleted before."""
        if not self.index.commit(slot):
            return False
        self.index.set_facts(slot, length, checksum)
        self.live_bytes += aligned(length, ALIGNMENT)
        self.by_namespace.add(item.key, aligned(length, ALIGNMENT))
        self.committer.append(encode_put(item.key, item.parent, slot, length, checksum), slot)
        return True

    def forget(self, slot: int, key: bytes) -> bool:
        """Removes the block if it is still in this slot."""
        return self.index.lookup(key) is Lookup.HIT and self.index.remove(key, slot)

    # ---- removing blocks ----------------------------------------------------------------------

    def _on_leave(self, slot: int) -> None:
        key, _ = self.index.block_in(slot)
        length, _ = self.index.facts_in(slot)
        self.live_bytes -= aligned(length, ALIGNMENT)
        self.by_namespace.remove(key, aligned(length, ALIGNMENT))
        self.committer.append(encode_del(key, slot))

    def _on_evict(self, key: bytes, nbytes: int) -> None:
        self._counters.evicted_blocks += 1
        self.by_namespace.count_eviction(key)

    def drop_lost(self, slots: list[int]) -> int:
        """Removes blocks whose data may never reach the disk; returns how many of them were there.
        For the committer."""
        keys = []
        for slot in slots:
            with suppress(InvariantError):  # the slot is free by now
                key, _ = self.index.block_in(slot)
                if self.forget(slot, key):
                    keys.append(StoreKey(key))
        self._counters.failed_blocks += len(keys)
        self.lost += keys
        return len(keys)
