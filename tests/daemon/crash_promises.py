"""Blocks for the crash tests, and a record of which ones a daemon must not lose.

Two families of blocks share the tiers. The *passing* ones exceed the capacity: they are evicted,
demoted and promoted all the time, limited by a quota. The *lasting* ones fit into what the quota
leaves, so they are never evicted: a lasting block acknowledged as on disk must survive any crash
until it is deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.daemon.raw_client import block, key
from vllm_tiered_kv.core.store import PutResult, key_prefix

KIB = 1 << 10
CHAIN = 6

KEPT = (PutResult.STORED, PutResult.PRESENT)


@dataclass(frozen=True)
class Family:
    """Numbered blocks in chains of six; the bytes of a block are a function of its number."""

    namespace: bytes
    first: int
    count: int
    sizes: Sequence[int]

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def chains(self) -> list[range]:
        return [range(n, n + CHAIN) for n in self.numbers[::CHAIN]]

    def nbytes(self, n: int) -> int:
        return self.sizes[n // CHAIN % len(self.sizes)]

    def content(self, n: int) -> bytes:
        return block(n, self.nbytes(n))

    def parents(self, numbers: Sequence[int]) -> list[bytes | None]:
        return [key(n - 1) if n % CHAIN else None for n in numbers]


# The SSD's data are eight slabs of 480 KiB. The lasting blocks fill two, or three with the slots
# of deleted ones that wait for their release; the passing ones get no more than four.
SPACE = ("--memory", "2MiB", "--ssd-space", "4MiB")
PASSING = Family(bytes([1]) * 32, 0, 240, (20 * KIB, 40 * KIB))
LASTING = Family(bytes([2]) * 32, 6000, 48, (16 * KIB,))
QUOTA = ("--ssd-quota", f"{key_prefix(PASSING.namespace).hex()}=2000KiB")


@dataclass
class Promises:
    """Which lasting blocks must be stored. Requests in flight may overtake each other, so an
    acknowledged put counts only if no delete of the block was sent before or meanwhile."""

    durable: set[int] = field(default_factory=set)
    may_lose: int = 0  # blocks that damage to the files may have destroyed since the last check
    may_lose_all: bool = False
    _deletes: Counter[int] = field(default_factory=Counter)  # asked for, ever
    _deleting: Counter[int] = field(default_factory=Counter)  # asked for, not answered yet

    def asked_to_put(self, numbers: Sequence[int]) -> list[tuple[int, int | None]]:
        """Returns the argument for `put_answered`."""
        return [(n, None if self._deleting[n] else self._deletes[n]) for n in numbers]

    def put_answered(
        self, asked: Sequence[tuple[int, int | None]], results: Sequence[PutResult]
    ) -> None:
        for (n, deletes), result in zip(asked, results, strict=True):
            if result in KEPT and deletes == self._deletes[n]:
                self.durable.add(n)

    def asked_to_delete(self, numbers: Sequence[int]) -> None:
        self._deletes.update(numbers)
        self._deleting.update(numbers)
        self.durable.difference_update(numbers)

    def delete_answered(self, numbers: Sequence[int]) -> None:
        self._deleting.subtract(numbers)

    def crashed(self) -> None:
        """Requests in flight will never be answered."""
        self._deleting.clear()

    def check(self, found: set[int]) -> None:
        """`found` are all the blocks that a daemon has after it was started again."""
        lost = self.durable - found
        if not self.may_lose_all:
            assert len(lost) <= self.may_lose, f"acknowledged as on disk and lost: {sorted(lost)}"
        self.durable = set(found)  # nothing is served before it is durable
        self.may_lose, self.may_lose_all = 0, False
