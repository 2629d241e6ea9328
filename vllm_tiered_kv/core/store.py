"""The protocol of anything that holds blocks by key: memory, SSD, a shared directory, a daemon.

One contract suite (`tests/stores/contract.py`) runs over every implementation. Calls are batched
and may be made from any thread. What all of them promise:

- A reader gets the whole block that was put under the key, or a miss; never anything else.
- A block found damaged is a miss, is counted, and is gone afterwards.
- A key names one content: putting a key that is present changes nothing and says PRESENT.
- Capacity is exact; where there is no room, tails of a chain leave before its heads.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from vllm_tiered_kv.core.key import BlockKey, RankTag

NAMESPACE_BYTES = 16
MAX_KEY_BYTES = 64

StoreKey = NewType("StoreKey", bytes)
"""`key_prefix` of the namespace, the BlockKey, the RankTag: unique among all engines' blocks."""


def store_key(namespace: bytes, key: BlockKey, rank: RankTag) -> StoreKey:
    return StoreKey(namespace[:NAMESPACE_BYTES] + key + rank.encode())


def announced_namespace(namespace: bytes) -> bytes:
    """What an engine says in `hello`: the 16 bytes its keys begin with and a digest of these, which
    tells a daemon that it need not hash them again."""
    head = namespace[:NAMESPACE_BYTES]
    return head + hashlib.sha256(head).digest()[: len(namespace) - NAMESPACE_BYTES]


def key_prefix(announced: bytes) -> bytes:
    """What a daemon's keys of an announced namespace begin with. All 32 bytes count: of a namespace
    that another client has made up, the prefix is a digest."""
    if announced == announced_namespace(announced):
        return announced[:NAMESPACE_BYTES]
    return hashlib.sha256(announced).digest()[:NAMESPACE_BYTES]


def namespace_of(key: StoreKey) -> bytes:
    return key[:NAMESPACE_BYTES]


class Durability(str, enum.Enum):
    """When a put is acknowledged. Each level includes those before it."""

    RECEIVED = "received"  # the bytes have arrived; they may still be dropped
    MEMORY = "memory"  # readable, and lost if the process dies
    DISK = "disk"  # readable after a crash of process or machine


class PutResult(enum.Enum):
    STORED = enum.auto()  # as durable as was asked for
    PRESENT = enum.auto()  # it was here already (and is as durable as asked for), or is being put
    DROPPED = enum.auto()  # no room, or a queue was full; nothing was kept
    FAILED = enum.auto()  # an I/O error or a checksum that does not match; nothing was kept

    __hash__ = object.__hash__  # there is one object of each; an Enum's own is Python code


class PutItem(NamedTuple):
    """One block on its way in. `parent` is the block before it in its chain, if any.

    A tuple: a daemon makes one for every block it receives, and a dataclass takes several times as
    long.
    """

    key: StoreKey
    parent: StoreKey | None
    payload: memoryview  # contiguous bytes; unchanged until `put` returns
    checksum: int | None = None  # XXH3-64 of the payload when the sender knows it: verified


@dataclass(frozen=True)
class BlockFacts:
    """What a store knows of a block without reading it."""

    nbytes: int
    checksum: int
    parent: StoreKey | None


@dataclass(frozen=True)
class StoreUsage:
    """What a store holds right now."""

    blocks: int
    used_bytes: int
    capacity_bytes: int  # 0: no limit of its own


class BlockStore(Protocol):
    """Mutating calls: `put`, `delete`; `get` and `match` may only change the order of eviction."""

    def match(self, keys: Sequence[StoreKey]) -> int:
        """How many leading keys are here without a gap."""

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Whether each key is here. Changes nothing, not even the order of eviction."""

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        """Reads each block into its buffer: verified and whole (True), or a miss (False).

        A block of another length than its buffer is a miss. A buffer whose read was a miss may
        hold anything.
        """

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        """Stores blocks, in chain order (heads before tails)."""

    def delete(self, keys: Sequence[StoreKey]) -> int:
        """Forgets blocks; how many were here. NotDeletedError where some may still be here, after
        all others are gone."""

    def flush(self) -> bool:
        """Returns when everything acknowledged so far is as durable as this store can make it;
        False when it failed to."""

    def usage(self) -> StoreUsage: ...

    def close(self) -> None:
        """Flushes and gives everything back. Idempotent."""


OnLost = Callable[[Sequence[StoreKey]], None]


class LowerStore(BlockStore, Protocol):
    """A store that another one can be built on: it knows its blocks without reading them."""

    on_lost: OnLost
    """Told of blocks it had stored and lost before they were durable. From any thread, also under
    locks of the store; a flush that loses some has told of them before it returns False."""

    def retry(self) -> None:
        """Tries a disk that failed at once, not when the pause after the failure is over."""

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Length, checksum and parent of each block; None where it is not here. Reads no payload
        and changes nothing."""
