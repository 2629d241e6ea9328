"""The protocol of all block stores: memory, SSD, a shared directory, a daemon.

One contract suite (`tests/stores/contract.py`) runs over every implementation. Calls are batched
and may be made from any thread. Every implementation guarantees:

- A reader gets the whole block that was put under the key, or a miss; never anything else.
- A damaged block is a miss. The store counts it and removes it.
- A key identifies one content: a put of a present key changes nothing and returns PRESENT.
- The capacity is never exceeded. Eviction removes the tails of a chain before its heads.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from vllm_tiered_kv.core.key import BlockKey, RankTag

NAMESPACE_BYTES = 16
MAX_KEY_BYTES = 64

StoreKey = NewType("StoreKey", bytes)
"""`key_prefix` of the namespace + BlockKey + RankTag: unique over the blocks of all engines."""


def store_key(namespace: bytes, key: BlockKey, rank: RankTag) -> StoreKey:
    return StoreKey(namespace[:NAMESPACE_BYTES] + key + rank.encode())


def announced_namespace(namespace: bytes) -> bytes:
    """Returns the namespace an engine sends in `hello`: the 16-byte prefix of its keys and a digest
    of that prefix. The digest tells the daemon that it can use the prefix as it is."""
    head = namespace[:NAMESPACE_BYTES]
    return head + hashlib.sha256(head).digest()[: len(namespace) - NAMESPACE_BYTES]


def key_prefix(announced: bytes) -> bytes:
    """Returns the prefix of a daemon's keys in an announced namespace.

    All 32 bytes of the namespace matter. If a client chose the namespace freely, instead of with
    `announced_namespace`, the prefix is a digest of it.
    """
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
    """What a store did with one block of a put."""

    STORED = enum.auto()  # as durable as requested
    PRESENT = enum.auto()  # already stored as durably as requested, or another put is writing it
    DROPPED = enum.auto()  # no room, or a queue was full; nothing was kept
    FAILED = enum.auto()  # an I/O error or a checksum mismatch; nothing was kept

    __hash__ = object.__hash__  # members are singletons, and Enum.__hash__ is slow Python code


class PutItem(NamedTuple):
    """One block of a put. `parent` is the block before it in its chain, if any.

    It is a tuple because a daemon creates one for every block it receives, and creating a dataclass
    takes several times as long.
    """

    key: StoreKey
    parent: StoreKey | None
    payload: memoryview  # contiguous; the caller must not change it until `put` returns
    checksum: int | None = None  # XXH3-64 of the payload if the sender knows it; put verifies it


@dataclass(frozen=True)
class BlockFacts:
    """Metadata of a block that a store knows without reading the block."""

    nbytes: int
    checksum: int
    parent: StoreKey | None


@dataclass(frozen=True)
class StoreUsage:
    """How many blocks and bytes a store currently holds."""

    blocks: int
    used_bytes: int
    capacity_bytes: int  # 0: the store has no limit of its own


class BlockStore(Protocol):
    """Holds blocks by key. Any thread may call it.

    `put` and `delete` change the content; `get` and `match` only change the eviction order.
    """

    def match(self, keys: Sequence[StoreKey]) -> int:
        """Returns how many leading keys are present without a gap."""

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Returns whether each key is present. Changes nothing, not even the eviction order."""

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        """Reads each block into its buffer; True if it is whole and verified, False on a miss.

        A block whose length differs from its buffer is a miss. The content of a buffer is undefined
        after a miss.
        """

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        """Stores blocks, in chain order (heads before tails)."""

    def delete(self, keys: Sequence[StoreKey]) -> int:
        """Deletes blocks and returns how many were present.

        Raises NotDeletedError if some may still be present; all others are deleted by then.
        """

    def flush(self) -> bool:
        """Makes everything acknowledged so far as durable as this store can; False on failure."""

    def usage(self) -> StoreUsage: ...

    def close(self) -> None:
        """Flushes and releases all resources. Idempotent."""


class LowerStore(BlockStore, Protocol):
    """A store that can serve as the lower tier of another store.

    It knows the metadata of its blocks without reading them.
    """

    @property
    def read_batch(self) -> int:
        """How many blocks a `get` should read. It answers for all of them when the last one has
        arrived, so 1 is best where one may hang and the others not."""

    def take_lost(self) -> list[StoreKey]:
        """Returns, once, the blocks that were acknowledged but lost before they were durable. After
        a flush that has lost blocks they are among them. Never waits for I/O."""

    def retry(self) -> None:
        """Uses a failed disk again at once, without waiting for the pause after the failure."""

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        """Returns length, checksum and parent of each block; None if it is not present.

        Reads no payload and changes nothing.
        """
