"""Which tier holds what, found without reading a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from vllm_tiered_kv.core.store import LowerStore, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.stores.memory import MemoryStore

LOOKUPS_AT_ONCE = 4096  # more would keep the caller, or the lock of a tier, for too long
_FIRST_LOOKUPS = 256
_ORDER = (Tier.MEMORY, Tier.SSD, Tier.BACKING)


@dataclass(frozen=True)
class Located:
    """How many leading positions are here, and in which tier each lies."""

    count: int
    tiers: dict[Tier, int]


class Locator:
    """Calls may be made from any thread. With a backing store they may take long."""

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
        """The leading keys that are here with every ending. A position lies where its slowest part
        lies. Looks no further than it has to: what lies behind a gap is of no use."""
        stride = len(endings)
        counts = dict.fromkeys(_ORDER, 0)
        start = 0
        at_once = max(1, _FIRST_LOOKUPS // stride)
        while start < len(keys):
            some = keys[start : start + at_once]
            tiers = self.tiers_of(_with_endings(some, endings))
            whole = tiers.index(None) // stride if None in tiers else len(some)
            for tier, count in _slowest_of_each(tiers[: whole * stride], stride).items():
                counts[tier] += count
            start += whole
            if whole < len(some):
                break
            at_once = min(2 * at_once, max(1, LOOKUPS_AT_ONCE // stride))
        return Located(start, counts)


def _with_endings(keys: Sequence[StoreKey], endings: Sequence[bytes]) -> Sequence[StoreKey]:
    if len(endings) == 1 and not endings[0]:
        return keys
    return cast("list[StoreKey]", [key + end for key in keys for end in endings])


def _slowest_of_each(tiers: Sequence[Tier | None], stride: int) -> dict[Tier, int]:
    """How many groups of `stride` have their slowest part in each tier."""
    if stride == 1 or len(set(tiers)) <= 1:
        return {tier: tiers.count(tier) // stride for tier in _ORDER}
    counts = dict.fromkeys(_ORDER, 0)
    for start in range(0, len(tiers), stride):
        group = tiers[start : start + stride]
        counts[next(tier for tier in reversed(_ORDER) if tier in group)] += 1
    return counts
