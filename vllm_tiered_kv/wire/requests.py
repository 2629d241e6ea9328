"""Requests of a client. Each message is defined here once; codecs and docs derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from vllm_tiered_kv.core.store import Durability
from vllm_tiered_kv.wire.fields import (
    Bin,
    Choice,
    Flag,
    Keys,
    Parents,
    Spec,
    Suffixes,
    Text,
    Uint,
    Uints,
    invalid,
    too_large,
)
from vllm_tiered_kv.wire.limits import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_LENGTHS,
    MAX_FRAMES,
    MAX_KEYS,
    MAX_LOOKUPS,
    MAX_MESSAGE_BYTES,
    MAX_SUFFIXES,
    MAX_TTL_MS,
    MAX_WIRE_KEY_BYTES,
    PROTOCOL_VERSION,
)

BORROW_CAPABILITY = "borrow"
"""Announced by a daemon that supports the op of this name."""


class Message:
    """Base of all messages. `payload` names the field with the lengths of its payload frames."""

    __slots__ = ()
    op: ClassVar[str]
    payload: ClassVar[str | None] = None

    def check(self) -> None:
        """Raises ProtocolError where fields that are valid alone do not fit each other."""


def check_total(lengths: list[int]) -> None:
    if sum(lengths) > MAX_MESSAGE_BYTES:
        raise too_large(f"a payload of {sum(lengths)} bytes; at most {MAX_MESSAGE_BYTES} allowed")


def check_suffixes(width: int, keys: list[bytes], suffixes: list[bytes]) -> None:
    if suffixes and width + len(suffixes[0]) > MAX_WIRE_KEY_BYTES:
        raise invalid(f"key and suffix are longer than {MAX_WIRE_KEY_BYTES} bytes")
    if len(keys) * len(suffixes) > MAX_LOOKUPS:
        raise too_large(f"keys times suffixes are more than {MAX_LOOKUPS}")


Width: TypeAlias = Annotated[
    int, Spec(Uint(1, MAX_WIRE_KEY_BYTES), "bytes per key in this message")
]
KeyList: TypeAlias = Annotated[
    list[bytes], Spec(Keys(MAX_KEYS), "keys of the blocks, head of the chain first")
]
SuffixList: TypeAlias = Annotated[
    list[bytes],
    Spec(
        Suffixes(MAX_SUFFIXES, MAX_WIRE_KEY_BYTES - 1), "suffixes that complete the keys, or empty"
    ),
]
ParentList: TypeAlias = Annotated[
    list[bytes | None],
    Spec(Parents(MAX_KEYS), "key of the preceding block in the chain", per="keys"),
]
BlockLengths: TypeAlias = Annotated[
    list[int],
    Spec(Uints(MAX_KEYS, 1, MAX_BLOCK_BYTES), "bytes of each block", per="keys"),
]
LeaseList: TypeAlias = Annotated[list[int], Spec(Uints(MAX_KEYS, 1, distinct=True), "lease ids")]


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Opens a session and binds its namespace, key width and block lengths."""

    op: ClassVar[str] = "hello"
    protocol: Annotated[
        int, Spec(Uint(PROTOCOL_VERSION, PROTOCOL_VERSION), "protocol version of the client")
    ]
    client: Annotated[
        str,
        Spec(Text(), "name of the client, for logs and status; an engine sends its model's name"),
    ]
    namespace: Annotated[
        bytes, Spec(Bin((32,)), "digest of everything that makes blocks incompatible")
    ]
    key_bytes: Annotated[
        int, Spec(Uint(1, MAX_WIRE_KEY_BYTES), "bytes of a full key in this session")
    ]
    block_bytes: Annotated[
        list[int],
        Spec(
            Uints(MAX_BLOCK_LENGTHS, 1, MAX_BLOCK_BYTES, distinct=True),
            f"block lengths the client will use, at most {MAX_BLOCK_LENGTHS} of them",
        ),
    ]
    layout: Annotated[str, Spec(Text(), "byte layout of a block")]
    arena: Annotated[
        bytes, Spec(Bin((0, 16)), "token of an attached shared-memory session, or empty")
    ]


@dataclass(frozen=True, slots=True)
class Match(Message):
    """Counts the leading positions that are present without a gap.

    Each key followed by each suffix is a full key; a position counts only if all of its full keys
    are present. Without suffixes, the keys are full keys.
    """

    op: ClassVar[str] = "match"
    width: Width
    keys: KeyList
    suffixes: SuffixList
    pin_ms: Annotated[
        int, Spec(Uint(0, MAX_TTL_MS), "pin the matched blocks for this long; 0: no pin")
    ]

    def check(self) -> None:
        check_suffixes(self.width, self.keys, self.suffixes)


@dataclass(frozen=True, slots=True)
class Contains(Message):
    """Reports which tier holds each key. Changes nothing, not even the eviction order."""

    op: ClassVar[str] = "contains"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class Get(Message):
    """Reads blocks.

    Blocks that do not fit in one message must be requested with `stream`.
    """

    op: ClassVar[str] = "get"
    width: Width
    keys: KeyList
    stream: Annotated[bool, Spec(Flag(), "the daemon may answer in several messages, in any order")]

    def check(self) -> None:
        if not self.stream and len(self.keys) > MAX_FRAMES:
            raise too_large(f"{len(self.keys)} keys; more than {MAX_FRAMES} need a stream")


@dataclass(frozen=True, slots=True)
class Put(Message):
    """Stores blocks, one payload frame each."""

    op: ClassVar[str] = "put"
    payload: ClassVar[str | None] = "lengths"
    width: Width
    keys: Annotated[
        list[bytes], Spec(Keys(MAX_FRAMES), "keys of the blocks, head of the chain first")
    ]
    parents: ParentList
    lengths: BlockLengths
    checksums: Annotated[
        list[int], Spec(Uints(MAX_FRAMES), "XXH3-64 of each payload frame", per="keys")
    ]
    durability: Annotated[
        Durability, Spec(Choice(Durability), "durability at which the daemon acknowledges")
    ]

    def check(self) -> None:
        check_total(self.lengths)


@dataclass(frozen=True, slots=True)
class Pin(Message):
    """Protects blocks from eviction for a limited time."""

    op: ClassVar[str] = "pin"
    width: Width
    keys: KeyList
    ttl_ms: Annotated[int, Spec(Uint(0, MAX_TTL_MS), "duration of the pin; 0 releases it")]


@dataclass(frozen=True, slots=True)
class Delete(Message):
    """Deletes blocks and their pins."""

    op: ClassVar[str] = "delete"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class Flush(Message):
    """Makes everything acknowledged before as durable as the daemon can."""

    op: ClassVar[str] = "flush"


@dataclass(frozen=True, slots=True)
class Info(Message):
    """Asks for facts about the daemon: version, tiers, capacities."""

    op: ClassVar[str] = "info"


@dataclass(frozen=True, slots=True)
class Stats(Message):
    """Asks for the daemon's counters: what it has done and what it holds."""

    op: ClassVar[str] = "stats"


@dataclass(frozen=True, slots=True)
class Lend(Message):
    """Leases blocks in shared memory for reading. A block stays in its slot until released."""

    op: ClassVar[str] = "lend"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class Borrow(Message):
    """Like `match`, and leases the leading positions that are in memory.

    A position is leased with all its suffixes or not at all. Needs the capability `borrow`.
    """

    op: ClassVar[str] = "borrow"
    width: Width
    keys: KeyList
    suffixes: SuffixList
    length: Annotated[
        int, Spec(Uint(1, MAX_BLOCK_BYTES), "block length; blocks of other lengths are not leased")
    ]

    def check(self) -> None:
        check_suffixes(self.width, self.keys, self.suffixes)


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Releases leases. A reserved block that was not sealed is dropped."""

    op: ClassVar[str] = "release"
    leases: LeaseList


@dataclass(frozen=True, slots=True)
class Reserve(Message):
    """Leases free slots in shared memory for new blocks, which the client then writes and seals."""

    op: ClassVar[str] = "reserve"
    width: Width
    keys: KeyList
    parents: ParentList
    lengths: BlockLengths


@dataclass(frozen=True, slots=True)
class Seal(Message):
    """Makes reserved blocks readable. Ends their leases, whatever the result."""

    op: ClassVar[str] = "seal"
    leases: LeaseList


Request: TypeAlias = (
    Hello
    | Match
    | Contains
    | Get
    | Put
    | Pin
    | Delete
    | Flush
    | Info
    | Stats
    | Lend
    | Borrow
    | Release
    | Reserve
    | Seal
)
