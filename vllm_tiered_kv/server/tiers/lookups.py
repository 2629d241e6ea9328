"""Finds which tier holds each key. Memory and SSD are asked first, the backing tier only for the
rest; a backing tier that does not answer in time counts as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from vllm_tiered_kv.core.store import LowerStore, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

MAX_INLINE_LOOKUPS = 4096  # more would block the caller, or the lock of a tier, for too long
_FIRST_BATCH = 256
_ORDER = (Tier.MEMORY, Tier.SSD, Tier.BACKING)


@dataclass(frozen=True)
class Located:
    """How many leading positions are stored, and how many of them lie in each tier."""

    count: int
    tiers: dict[Tier, int]


class Locator:
    """Synchronous lookups over some of the tiers. Calls may be made from any thread; with a backing
    store they may take long."""

    def __init__(
        self, memory: MemoryStore, ssd: LowerStore | None, backing: LowerStore | None
    ) -> None:
        self._memory = memory
        self._slower = [
            (tier, store)
            for tier, store in ((Tier.SSD, ssd), (Tier.BACKING, backing))
            if store is not None
        ]

    def tiers_of(self, keys: Sequence[StoreKey]) -> list[Tier | None]:
        """The fastest tier that holds each key."""
        tiers: list[Tier | None] = [
            Tier.MEMORY if here else None for here in self._memory.contains(keys)
        ]
        for tier, store in self._slower:
            missing = [n for n, found in enumerate(tiers) if found is None]
            if not missing:
                break
            for n, here in zip(missing, store.contains([keys[n] for n in missing]), strict=True):
                if here:
                    tiers[n] = tier
        return tiers

    def locate(self, keys: Sequence[StoreKey], endings: Sequence[bytes]) -> Located:
        """The leading keys that are stored with every ending. The slowest of its blocks determines
        the tier of a position. Stops at the first gap: blocks after it are useless."""
        stride = len(endings)
        counts = dict.fromkeys(_ORDER, 0)
        start = 0
        batch = max(1, _FIRST_BATCH // stride)
        while start < len(keys):
            some = keys[start : start + batch]
            tiers = self.tiers_of(_with_endings(some, endings))
            whole = tiers.index(None) // stride if None in tiers else len(some)
            for tier, count in _slowest_of_each(tiers[: whole * stride], stride).items():
                counts[tier] += count
            start += whole
            if whole < len(some):
                break
            batch = min(2 * batch, max(1, MAX_INLINE_LOOKUPS // stride))
        return Located(start, counts)


def _with_endings(keys: Sequence[StoreKey], endings: Sequence[bytes]) -> Sequence[StoreKey]:
    if len(endings) == 1 and not endings[0]:
        return keys
    return cast("list[StoreKey]", [key + end for key in keys for end in endings])


def _slowest_of_each(tiers: Sequence[Tier | None], stride: int) -> dict[Tier, int]:
    """How many groups of `stride` blocks have their slowest block in each tier."""
    if stride == 1 or len(set(tiers)) <= 1:
        return {tier: tiers.count(tier) // stride for tier in _ORDER}
    counts = dict.fromkeys(_ORDER, 0)
    for start in range(0, len(tiers), stride):
        group = tiers[start : start + stride]
        counts[next(tier for tier in reversed(_ORDER) if tier in group)] += 1
    return counts


class Lookups:
    """Asynchronous lookups in all tiers of a `TieredStore`. Calls return at once and answer through
    a callback, from this thread or another."""

    def __init__(
        self,
        memory: MemoryStore,
        ssd: LowerStore | None,
        backing: LowerStore | None,
        recorder: Recorder,
        pool: StoreExecutor,
        backing_executor: StoreExecutor | None,
    ) -> None:
        """If there is a backing store, it has an executor of its own."""
        self._memory = memory
        self._backing = backing
        self._recorder = recorder
        self._pool = pool
        self._executor = backing_executor
        self._near = Locator(memory, ssd, None)
        self._everywhere = Locator(memory, ssd, backing)

    def match(
        self,
        keys: Sequence[StoreKey],
        suffixes: Sequence[bytes],
        done: Callable[[Located], None],
    ) -> None:
        """Counts the leading keys that are stored with every suffix; without suffixes the keys are
        complete."""
        endings = suffixes or [b""]

        def found(located: Located) -> None:
            self._count_misses(len(keys) - located.count, endings)
            done(located)

        self._run_or_submit(
            len(keys) * len(endings),
            lambda: self._search_backing(self._near.locate(keys, endings), keys, endings, found),
            lambda: found(Located(0, {})),
        )

    def match_and_hold(
        self,
        keys: Sequence[StoreKey],
        suffixes: Sequence[bytes],
        nbytes: int,
        max_blocks: int,
        done: Callable[[list[PinnedSlot], Located], None],
    ) -> None:
        """Like `match`, but pins leading blocks of `nbytes` bytes that are in memory for the
        receiver, at most `max_blocks` of them; the others are only counted."""
        endings = suffixes or [b""]

        def work() -> None:
            held = self._memory.hold_head(keys, endings, nbytes, max_blocks)
            rest = keys[len(held) // len(endings) :]
            try:
                near = self._near.locate(rest, endings)
            except BaseException:
                self._memory.let_go(held)
                raise
            self._recorder.add(names.HITS, len(held), Tier.MEMORY.value)
            self._search_backing(near, rest, endings, partial(found, held, len(rest)))

        def found(held: list[PinnedSlot], asked: int, located: Located) -> None:
            self._count_misses(asked - located.count, endings)
            done(held, located)

        self._run_or_submit(
            len(keys) * len(endings), work, lambda: found([], len(keys), Located(0, {}))
        )

    def _count_misses(self, positions: int, endings: Sequence[bytes]) -> None:
        """Counts the misses of a lookup, which the engine will compute. Hits are counted when they
        are read or leased."""
        self._recorder.add(names.MISSES, positions * len(endings))

    def contains(self, keys: Sequence[StoreKey], done: Callable[[list[Tier | None]], None]) -> None:
        def work() -> None:
            near = self._near.tiers_of(keys)
            missing = [n for n, tier in enumerate(near) if tier is None]
            backing = self._backing
            if backing is None or self._executor is None or not missing:
                done(near)
                return

            def found(here: list[bool]) -> None:
                further = {n for n, is_here in zip(missing, here, strict=True) if is_here}
                done([Tier.BACKING if n in further else tier for n, tier in enumerate(near)])

            wanted = [keys[n] for n in missing]
            self._executor.submit(lambda: backing.contains(wanted), found, lambda: done(near))

        self._run_or_submit(len(keys), work, lambda: done([None] * len(keys)))

    def near(self, keys: Sequence[StoreKey]) -> list[Tier | None]:
        """The tier of each key, without asking the backing tier."""
        return self._near.tiers_of(keys)

    def _run_or_submit(
        self, lookups: int, work: Callable[[], None], failed: Callable[[], None]
    ) -> None:
        """Runs short work on this thread and long work in the pool."""
        if lookups <= MAX_INLINE_LOOKUPS:
            work()
        else:
            self._pool.submit(work, failed=failed)

    def _search_backing(
        self,
        near: Located,
        keys: Sequence[StoreKey],
        endings: Sequence[bytes],
        done: Callable[[Located], None],
    ) -> None:
        if self._executor is None or near.count == len(keys):
            done(near)
            return
        self._executor.submit(
            lambda: self._everywhere.locate(keys, endings), done, lambda: done(near)
        )
