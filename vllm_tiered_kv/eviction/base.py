"""The protocol of an eviction policy.

A policy orders slots; it never decides whether a slot may leave. The index does: it skips pinned
slots and lets a block leave only when no block behind it in its chain is still there ("tails leave
before heads"). Slots whose block has followers are *shielded*; a policy is told so, because a
long chain of shielded heads must not be walked again for every eviction.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Mutating calls: everything but `candidates`, which may reorder but never forgets."""

    def admit(self, slot: int, key: bytes, shielded: bool = False) -> None:
        """A block became readable in `slot`; `shielded`: it has followers already."""

    def touch(self, slot: int) -> None:
        """The block in `slot` was used."""

    def forget(self, slot: int, key: bytes, evicted: bool) -> None:
        """The block left `slot`: evicted for room, or removed for another reason."""

    def shield(self, slot: int) -> None:
        """The block gained its first follower: it cannot leave for now."""

    def unshield(self, slot: int) -> None:
        """The last follower is gone: the block may leave again."""

    def candidates(self) -> Generator[int, None, None]:
        """Slots in the order they should leave. The caller may `forget` each one it is given."""

    def slots(self) -> set[int]:
        """All slots the policy knows, shielded or not (for checks)."""

    def leaves(self) -> set[int]:
        """The slots `candidates` can offer (for checks; nothing is reordered)."""
