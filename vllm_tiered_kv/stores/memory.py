"""The memory tier of the daemon: blocks in shared memory.

Nothing is copied in or out here: `hold` pins blocks in place, `reserve` hands out a slot to fill,
and `commit` or `abort` ends the reservation.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, cast

from vllm_tiered_kv.cache.index import NOWHERE, BlockIndex
from vllm_tiered_kv.core.arena_geometry import SlabGeometry, default_slab
from vllm_tiered_kv.core.store import (
    NAMESPACE_BYTES,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
    namespace_of,
)
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.device.shared_arena import PAGE, SharedArena
from vllm_tiered_kv.native.cpu import hash_buffers
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.namespaces import (
    NamespaceUsage,
    QuotaOf,
    no_quota,
    owner_of,
)

logger = logging.getLogger(__name__)

_REMEMBERED_DROPS = 65536
_AUTO_THREADS = 0  # the native code chooses how many threads pay off
_MAX_LOGGED_LENGTHS = 64  # bounds the log: clients can send blocks of any length
_KEYS_AT_ONCE = 256


class PinnedSlot(NamedTuple):
    """A slot that cannot be reused: pinned for reading, or reserved for writing.

    A tuple, because every put creates two of them and a dataclass takes several times as long.
    """

    key: StoreKey
    parent: StoreKey | None
    slot: int
    offset: int  # in the arena
    nbytes: int
    generation: int
    checksum: int  # of a readable block; 0 while it is being written
    view: memoryview


make_pinned_slot: Callable[[tuple[object, ...]], PinnedSlot] = functools.partial(
    tuple.__new__, PinnedSlot
)
"""Like `PinnedSlot(...)`, but faster: it skips the generated `__new__`."""


class HandoffResult(enum.Enum):
    """The result of `MemoryStore.hand_over`."""

    TAKEN = enum.auto()
    REFUSED = enum.auto()
    ABSENT = enum.auto()  # the block is no longer in this store


NewBlock: TypeAlias = tuple[StoreKey, StoreKey | None, int]
"""Key, parent and length."""


def kind_of(block: NewBlock) -> tuple[bytes, int]:
    """Returns namespace and length. Blocks with the same kind compete for the same slots."""
    key, _, nbytes = block
    return key[:NAMESPACE_BYTES], nbytes


def split_by_kind(blocks: list[NewBlock]) -> list[list[NewBlock]]:
    """Splits blocks into runs of one namespace and length."""
    if len({(key[:NAMESPACE_BYTES], nbytes) for key, _, nbytes in blocks}) == 1:
        return [blocks]
    return [list(run) for _, run in itertools.groupby(blocks, kind_of)]


class MemoryStore:
    """Holds blocks by key with an exact capacity, in memory that other processes can map.

    The daemon owns one. All calls may be made from any thread.
    """

    def __init__(
        self,
        capacity_bytes: int,
        eviction: str = "lru",
        huge_pages: bool = False,
        may_evict: Callable[[bytes], bool] | None = None,
        on_evict: Callable[[bytes, int], None] = lambda key, nbytes: None,
        is_below: Callable[[bytes], bool] | None = None,
        quota_of: QuotaOf = no_quota,
    ) -> None:
        """The callbacks run under this store's lock; see BlockIndex. Namespaces without a quota
        share slabs."""
        self.arena = SharedArena.create(capacity_bytes, huge_pages)
        capacity = self.arena.capacity_bytes
        self._geometry = SlabGeometry(capacity, default_slab(capacity, PAGE), PAGE)
        self._index = BlockIndex(
            self._geometry, eviction, self._evicted, may_evict, is_below, quota_of=quota_of
        )
        self._on_evict = on_evict
        self._quota_of = quota_of
        self._readable: dict[StoreKey, PinnedSlot] = {}
        self._written: set[StoreKey] = set()  # see `is_written`
        self._by_namespace = NamespaceUsage()
        self._slab_slot_bytes = [0] * self._geometry.num_slabs  # slot size of each slab
        self._lock = threading.RLock()
        self._dropped: OrderedDict[StoreKey, None] = OrderedDict()  # blocks that got no slot
        self._too_large: set[int] = set()  # lengths of blocks that were logged
        self._closed = False

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        with self._lock:
            return [key in self._readable for key in keys]

    def delete(self, keys: Sequence[StoreKey]) -> int:
        with self._lock:
            present = sum(self._unpublish(key) for key in keys)
            for key in keys:
                self._index.remove(key)  # also blocks that are still being written
            return present

    def keys_of(self, namespace: bytes) -> list[StoreKey]:
        """Returns the keys of all readable blocks of a namespace."""
        with self._lock:
            keys = list(self._readable)
        return [key for key in keys if namespace_of(key) == namespace]

    def usage(self) -> StoreUsage:
        with self._lock:
            return StoreUsage(
                len(self._readable), self._index.used_bytes, self._geometry.capacity_bytes
            )

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        """Returns the number of readable blocks and their bytes for each namespace."""
        with self._lock:
            return self._by_namespace.snapshot()

    def evictions_by_namespace(self) -> dict[bytes, int]:
        with self._lock:
            return self._by_namespace.evictions()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._readable.clear()
                self._written.clear()
                self.arena.close()

    # ---- zero-copy ------------------------------------------------------------------------------

    def lookup(self, key: StoreKey) -> Lookup:
        with self._lock:
            return self._index.lookup(key)

    def hold(self, keys: Sequence[StoreKey], touch: bool = True) -> list[PinnedSlot | None]:
        """Pins readable blocks until `let_go`; returns None for each block that is not here.

        `touch` counts as a use of the blocks. `may_evict` must not pass it, because the eviction
        policy is being traversed at that time.
        """
        with self._lock:
            held = [self._readable.get(key) for key in keys]
            present = [block.key for block in held if block is not None]
            self._index.pin(present)
            if touch:
                self._touch(present)
            return held

    def visit(self, keys: Sequence[StoreKey], use: Callable[[list[PinnedSlot]], bool]) -> bool:
        """Passes blocks to `use` if all of them are readable, and returns its result, or False.

        The blocks are valid during the call only: instead of a pin, this store's lock protects
        them. If `use` returns True, it counts as a use of the blocks.
        """
        with self._lock:
            try:
                blocks = list(map(self._readable.__getitem__, keys))
            except KeyError:
                return False
            is_used = use(blocks)
            if is_used:
                self._touch(keys)
            return is_used

    def hold_head(
        self, keys: Sequence[StoreKey], endings: Sequence[bytes], nbytes: int, max_blocks: int
    ) -> list[PinnedSlot]:
        """Pins the longest prefix of `keys` of which this store has every ending with this length,
        at most `max_blocks` blocks, until `let_go`. This is not a use of them: see `touch`."""
        stride = len(endings)
        held: list[PinnedSlot] = []
        with self._lock:
            find: Callable[[bytes], PinnedSlot | None] = cast(Any, self._readable).get
            max_keys = max_blocks // stride
            # In batches, so that keys after a gap are not concatenated in vain.
            for start in range(0, max_keys, _KEYS_AT_ONCE):
                some = keys[start : min(start + _KEYS_AT_ONCE, max_keys)]
                blocks = list(map(find, [key + ending for key in some for ending in endings]))
                found = 0
                for block in blocks:
                    if block is None or block.nbytes != nbytes:
                        break
                    found += 1
                held += cast("list[PinnedSlot]", blocks[:found])
                if found < _KEYS_AT_ONCE * stride:
                    break
            del held[len(held) // stride * stride :]
            self._index.pin_slots([block.slot for block in held])
        return held

    def touch(self, held: Sequence[PinnedSlot]) -> None:
        """Counts as a use of these blocks, as far as they are still here."""
        with self._lock:
            self._touch([block.key for block in held])

    def _touch(self, keys: Sequence[StoreKey]) -> None:
        self._index.touch(keys)
        if self._written:
            self._written.difference_update(keys)

    def is_readable(self, block: PinnedSlot) -> bool:
        """Whether this is still the block of its key: neither deleted nor replaced."""
        with self._lock:
            known = self._readable.get(block.key)
            return known is not None and known.slot == block.slot

    def let_go(self, held: Iterable[PinnedSlot]) -> None:
        """Unpins blocks pinned by `hold`, `hold_head` or `commit`."""
        with self._lock:
            self._index.unpin(block.slot for block in held)

    def hand_over(self, key: StoreKey, take: Callable[[PinnedSlot], bool]) -> HandoffResult:
        """Pins a block and passes it to `take`, which returns whether it keeps the pin.

        This is atomic: a concurrent `delete` either comes first, or finds that the receiver has
        the block by the time it returns. `take` runs under this store's lock.
        """
        with self._lock:
            (block,) = self.hold([key], touch=False)
            if block is None:
                return HandoffResult.ABSENT
            if take(block):
                return HandoffResult.TAKEN
            self.let_go([block])
            return HandoffResult.REFUSED

    def mark_written(self, blocks: Iterable[PinnedSlot]) -> None:
        """Records that these blocks are now written to a slower tier."""
        with self._lock:
            self._written.update(block.key for block in blocks if self.is_readable(block))

    def is_written(self, key: StoreKey) -> bool:
        """Whether this block was marked as written and nobody has used it since. The slower tier
        may have evicted it by now."""
        return key in self._written

    def reserve(
        self, key: StoreKey, parent: StoreKey | None, nbytes: int
    ) -> PinnedSlot | PutResult:
        """Returns a slot to fill, until `commit` or `abort`, or the reason why there is none."""
        with self._lock:
            return next(iter(self._reserve_run([(key, parent, nbytes)])), PutResult.DROPPED)

    def reserve_chain(
        self,
        blocks: Iterable[NewBlock],
        is_elsewhere: Callable[[StoreKey], bool] = lambda key: False,
    ) -> list[PinnedSlot | PutResult]:
        """Reserves slots for blocks in chain order.

        Successors of a block that got no slot, now or recently, are dropped too: a lookup could not
        reach them, and they would evict the heads of other chains. They are kept if `is_elsewhere`
        says that another tier has that block.
        """
        slots: list[PinnedSlot | PutResult] = []

        def is_reachable(block: NewBlock) -> bool:
            key, parent, _ = block
            is_cut_off = parent in self._dropped and self._index.lookup(key) is Lookup.MISS
            return not is_cut_off or is_elsewhere(cast(StoreKey, parent))

        with self._lock, self.giving_back(slots):
            # A failed search for a slot is slow, and others wait for the lock meanwhile: search
            # only once for each kind of block.
            full: set[tuple[bytes, int]] = set()
            for run in split_by_kind(list(blocks)):
                kind = kind_of(run[0])
                done = 0
                while done < len(run):
                    wanted = [] if kind in full else run[done:]
                    if self._dropped:
                        wanted = list(itertools.takewhile(is_reachable, wanted))
                    found = self._reserve_run(wanted)
                    if len(found) < len(wanted):
                        full.add(kind)
                    if not found:  # no room for this block, or for one before it
                        key = run[done][0]
                        is_missing = self._index.lookup(key) is Lookup.MISS
                        found = [PutResult.DROPPED if is_missing else PutResult.PRESENT]
                        self.turn_away([key])
                    slots += found
                    done += len(found)
        return slots

    def _reserve_run(self, run: list[NewBlock]) -> list[PinnedSlot | PutResult]:
        """Reserves slots for blocks of one kind at once, because a message has hundreds of them.
        The list ends before the first block without room."""
        if not run or self._closed:
            return []
        nbytes = run[0][2]
        size_class = self._class_for(run[0][0], nbytes)
        if size_class is None:
            return []
        found = self._index.reserve_all(
            [key for key, _, _ in run], [parent for _, parent, _ in run], size_class
        )
        taken = [
            (key, parent, slot)
            for (key, parent, _), slot in zip(run, found, strict=False)
            if slot != NOWHERE
        ]
        begun = iter(self._begin(taken, size_class, nbytes))
        return [PutResult.PRESENT if slot == NOWHERE else next(begun) for slot in found]

    def _begin(
        self, taken: Sequence[tuple[StoreKey, StoreKey | None, int]], size_class: int, nbytes: int
    ) -> list[PinnedSlot]:
        """Starts writing slots of one class; `taken` has (key, parent, slot) of each."""
        for key, _, _ in taken if self._dropped else []:
            self._dropped.pop(key, None)
        self._assign_slabs(
            {slot // self._geometry.slots_per_slab for _, _, slot in taken}, size_class
        )
        offsets = self._geometry.offsets((slot for _, _, slot in taken), size_class)
        generations = self.arena.begin_writing(offsets)
        views = self.arena.views(offsets, nbytes)
        return [
            make_pinned_slot((key, parent, slot, offset, nbytes, generation, 0, view))
            for (key, parent, slot), offset, generation, view in zip(
                taken, offsets, generations, views, strict=True
            )
        ]

    def turn_away(self, keys: Sequence[StoreKey]) -> None:
        """Records that these blocks got no slot, so that their successors are dropped too."""
        with self._lock:
            for key in keys:
                if self._index.lookup(key) is Lookup.MISS:
                    self._dropped[key] = None
            while len(self._dropped) > _REMEMBERED_DROPS:
                self._dropped.popitem(last=False)

    @staticmethod
    def copies(
        slots: Sequence[PinnedSlot | PutResult], items: Sequence[PutItem]
    ) -> tuple[list[memoryview], list[memoryview]]:
        """Returns targets and sources of the copies, for the items that got a slot."""
        taken = [
            (slot.view, item.payload)
            for slot, item in zip(slots, items, strict=True)
            if not isinstance(slot, PutResult)
        ]
        return [view for view, _ in taken], [payload for _, payload in taken]

    def filled(
        self,
        slots: Sequence[PinnedSlot | PutResult],
        items: Sequence[PutItem],
        checksums: Sequence[int],
    ) -> list[PutResult]:
        """Ends the reservations after `copies` were made; `checksums` are those of the copies."""
        taken = [slot for slot in slots if isinstance(slot, PinnedSlot)]
        if len(taken) == len(slots):  # the common case
            return self._end_all(taken, [item.checksum for item in items], checksums)
        expected = [
            item.checksum
            for slot, item in zip(slots, items, strict=True)
            if isinstance(slot, PinnedSlot)
        ]
        ended = iter(self._end_all(taken, expected, checksums))
        return [next(ended) if isinstance(slot, PinnedSlot) else slot for slot in slots]

    def seal(self, slots: Sequence[PinnedSlot]) -> list[PutResult]:
        """Hashes blocks that an attached process wrote to these slots and makes them readable."""
        with self.giving_back(slots):
            checksums = hash_buffers([slot.view for slot in slots], threads=_AUTO_THREADS)
        return self._end_all(slots, [None] * len(slots), checksums)

    @contextmanager
    def giving_back(self, slots: Sequence[PinnedSlot | PutResult]) -> Iterator[None]:
        """Frees the reserved slots if the body raises."""
        try:
            yield
        except BaseException:
            for slot in slots:
                if not isinstance(slot, PutResult):
                    self.abort(slot)
            raise

    def _end_all(
        self, slots: Sequence[PinnedSlot], expected: Sequence[int | None], actual: Sequence[int]
    ) -> list[PutResult]:
        """Ends reservations. An error with one of them does not affect the others."""
        results = [PutResult.FAILED] * len(slots)
        verified = []
        with self._lock:
            for n, (wanted, found) in enumerate(zip(expected, actual, strict=True)):
                if wanted is None or wanted == found:
                    verified.append(n)
                    continue
                try:
                    self.abort(slots[n])
                except Exception:
                    logger.exception("a reserved slot of the memory tier could not be freed")
            outcomes = self._index.commit_each([slots[n].slot for n in verified])
            generations = self.arena.next_generations(slots[n].offset for n in verified)
            for n, outcome, generation in zip(verified, outcomes, generations, strict=True):
                if isinstance(outcome, str):
                    logger.error("a block could not be committed to the memory tier: %s", outcome)
                elif outcome:
                    results[n] = PutResult.STORED
                    self._publish(slots[n], generation, actual[n])
                else:
                    results[n] = PutResult.DROPPED
        return results

    def commit(self, slot: PinnedSlot, checksum: int, hold: bool = False) -> bool:
        """Makes the block readable; returns False if it was deleted while being written. `hold`
        pins it until `let_go`, before it can be evicted."""
        with self._lock:
            generation = self.arena.next_generation(slot.offset)
            if not self._index.commit(slot.slot):
                return False
            self._publish(slot, generation, checksum)
            if hold:
                self._index.pin_slots([slot.slot])
            return True

    def _publish(self, slot: PinnedSlot, generation: int, checksum: int) -> None:
        key, parent, number, offset, nbytes, _, _, view = slot
        self._readable[key] = make_pinned_slot(
            (key, parent, number, offset, nbytes, generation, checksum, view)
        )
        self._by_namespace.add(key, nbytes)

    def _unpublish(self, key: StoreKey) -> bool:
        """Removes a readable block from lookups; returns whether it was readable."""
        block = self._readable.pop(key, None)
        if block is None:
            return False
        self._written.discard(key)
        self._by_namespace.remove(key, block.nbytes)
        return True

    def abort(self, slot: PinnedSlot) -> None:
        with self._lock:
            self._index.abort(slot.slot)

    def check(self) -> None:
        """Raises InvariantError unless the bookkeeping is consistent."""
        with self._lock:
            self._index.check()

    # ---- inside ---------------------------------------------------------------------------------

    def _class_for(self, key: StoreKey, nbytes: int) -> int | None:
        if not 0 < nbytes <= self._geometry.slab_bytes:
            if nbytes not in self._too_large and len(self._too_large) < _MAX_LOGGED_LENGTHS:
                self._too_large.add(nbytes)
                logger.warning(
                    "blocks of %s are not cached: this memory tier takes blocks up to %s; "
                    "give the daemon more memory",
                    format_size(nbytes),
                    format_size(self._geometry.slab_bytes),
                )
            return None
        return self._index.class_for(nbytes, owner_of(key, self._quota_of))

    def _assign_slabs(self, slabs: set[int], size_class: int) -> None:
        """Records the slot size of slabs, and renews all their generations when it changes.

        A generation is stored only for the first page of a block. With another slot size, a block
        leased before may start in the middle of a new block.
        """
        new = self._geometry.slot_bytes[size_class]
        for slab in slabs:
            old, self._slab_slot_bytes[slab] = self._slab_slot_bytes[slab], new
            if old not in (0, new):
                self.arena.renew(slab * self._geometry.slab_bytes, self._geometry.slab_bytes)

    def _evicted(self, key: bytes, nbytes: int) -> None:
        self._unpublish(StoreKey(key))
        self._by_namespace.count_eviction(key)
        self._on_evict(key, nbytes)
