"""What lies where on the disk, and what the journal has to be told about it.

Everything here happens under the store's lock. The index keeps all that a record of the journal
says of a block: a new generation of the journal is made from it, in order of use.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.core.arena_geometry import SlabGeometry, aligned
from vllm_tiered_kv.core.store import (
    MAX_KEY_BYTES,
    BlockFacts,
    OnLost,
    PutItem,
    PutResult,
    StoreKey,
)
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import InvariantError
from vllm_tiered_kv.stores.namespaces import HasQuota, NamespaceUsage, owner_of
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.committer import Committer
from vllm_tiered_kv.stores.ssd.record_format import (
    ALIGNMENT,
    RecordArray,
    encode_del,
    encode_put,
    put_records,
    rows_of,
)
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks
from vllm_tiered_kv.stores.ssd.settings import SsdCounters

logger = logging.getLogger(__name__)

_ROOM_ATTEMPTS = 32  # others may take the room that was just made
_MAX_AHEAD = 1024  # slots kept free, so that a put need not wait for an eviction to be durable
_AHEAD_SHARE = 32  # but no more than one in this many of a class
_MANY_SLOTS = 512  # and none where there are fewer


class BlockTable:
    """Index and records of one store; the `CommitOwner` of its committer."""

    committer: Committer  # set before the first change

    def __init__(
        self,
        folder: Path,
        budget: Budget,
        eviction: str,
        counters: SsdCounters,
        has_quota: HasQuota,
    ) -> None:
        self._folder = folder
        self._budget = budget
        self._counters = counters
        self._has_quota = has_quota
        self._told_too_many = False
        self._awaited: Counter[int] = Counter()  # slots that puts wait for, by class
        self.geometry = SlabGeometry(budget.data_bytes, budget.slab_bytes, ALIGNMENT)
        self.index = DurableIndex(self.geometry, eviction, self._on_evict, self._on_leave)
        self.live_bytes = 0  # slots of readable blocks
        self.by_namespace = NamespaceUsage()  # of these slots
        self.on_lost: OnLost | None = None

    def restore(self, live: LiveBlocks) -> None:
        """Fills an empty table."""
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
        """Good while a block of the class is here."""
        return self.index.class_for(nbytes, owner_of(key, self._has_quota))

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

    # ---- blocks coming ------------------------------------------------------------------------

    def reserve(self, item: PutItem, nbytes: int, coming: Sequence[PutItem]) -> int | PutResult:
        """A slot for the block, or why there is none; may wait for evictions to be durable.

        Room is made at once for all that is `coming`, this block included, and for all that
        others wait for: they would take it, and leave none.
        """
        for _ in range(_ROOM_ATTEMPTS):
            if self.index.lookup(item.key) is not Lookup.MISS:
                return PutResult.PRESENT
            if self.index.held >= self._budget.max_blocks:
                self._tell_too_many()
                if not self.index.evict_coldest(item.parent):
                    return PutResult.DROPPED
            size_class = self.size_class(item.key, nbytes)  # another after a wait
            slot = self.index.reserve(item.key, item.parent, size_class)
            if slot is not None:
                return slot
            missing = sum(self.index.lookup(other.key) is Lookup.MISS for other in coming)
            if not (self.index.has_quarantined or self.committer.is_releasing):
                wanted = missing + self._awaited[size_class]
                slots = min(wanted, _MAX_AHEAD) + self._step_loads(size_class)
                if not self.index.make_room(size_class, slots, item.parent):
                    return PutResult.DROPPED
            self._awaited[size_class] += missing
            is_released = self.committer.wait_release()
            self._awaited[size_class] -= missing
            if not is_released:
                return PutResult.FAILED
        return PutResult.DROPPED

    def evict_ahead(self, size_class: int) -> None:
        """Keeps a few slots free, so that the next put finds them."""
        ahead = self._step_loads(size_class)
        if (
            ahead
            and not (self.index.has_quarantined or self.committer.is_releasing)
            and self.index.free_slots(size_class) < ahead // 2
            and self.index.make_room(size_class, ahead)
        ):
            self.committer.kick()

    def _step_loads(self, size_class: int) -> int:
        slots = self.index.owned_slots(size_class)
        return min(_MAX_AHEAD, slots // _AHEAD_SHARE) if slots >= _MANY_SLOTS else 0

    def _tell_too_many(self) -> None:
        if not self._told_too_many:
            self._told_too_many = True
            logger.warning(
                "%s: the index is full with %d blocks: they are small for this space, and part "
                "of it stays unused",
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

    # ---- blocks leaving -----------------------------------------------------------------------

    def _on_leave(self, slot: int) -> None:
        key, _ = self.index.block_in(slot)
        length, _ = self.index.facts_in(slot)
        self.live_bytes -= aligned(length, ALIGNMENT)
        self.by_namespace.remove(key, aligned(length, ALIGNMENT))
        self.committer.append(encode_del(key, slot))

    def _on_evict(self, key: bytes, nbytes: int) -> None:
        self._counters.evicted_blocks += 1
        self._counters.evicted_bytes += nbytes

    # ---- for the committer --------------------------------------------------------------------

    def live_records(self) -> RecordArray:
        return put_records(self.index.rows(MAX_KEY_BYTES))

    def live_count(self) -> int:
        return len(self.index)

    def take_leaving(self) -> list[int]:
        return self.index.take_quarantined()

    def released(self, slots: list[int]) -> None:
        self.index.release(slots)

    def retake(self, slots: list[int]) -> None:
        self.index.quarantine_again(slots)

    def lost(self, slots: list[int]) -> int:
        keys = []
        for slot in slots:
            with suppress(InvariantError):  # it is free by now
                key, _ = self.index.block_in(slot)
                if self.forget(slot, key):
                    keys.append(StoreKey(key))
        self._counters.failed_blocks += len(keys)
        if keys and self.on_lost is not None:
            self.on_lost(keys)
            return 0
        return len(keys)
