"""The messages of the protocol. Each is defined here once; `codec` and the docs derive from it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from vllm_tiered_kv.core.store import NAMESPACE_BYTES, Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.fields import (
    Bin,
    Choice,
    Codes,
    CutText,
    Flag,
    Keys,
    PackedUints,
    Parents,
    Record,
    Spec,
    Suffixes,
    Text,
    Texts,
    Tree,
    Uint,
    Uints,
    invalid,
    too_large,
)
from vllm_tiered_kv.wire.limits import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_LENGTHS,
    MAX_CAPABILITIES,
    MAX_CLAIM_KEYS,
    MAX_CLAIM_MS,
    MAX_ERROR_TEXT,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_KEYS,
    MAX_LOOKUPS,
    MAX_MESSAGE_BYTES,
    MAX_SUFFIXES,
    MAX_TEXT,
    MAX_TTL_MS,
    MAX_WIRE_KEY_BYTES,
    PROTOCOL_VERSION,
)

BORROW_CAPABILITY = "borrow"
CLAIM_CAPABILITY = "claim"
DELETE_NAMESPACE_CAPABILITY = "delete_namespace"
"""Each announced by a daemon that supports the op of this name."""


class Message:
    """Base of all messages. `payload` names the field with the lengths of its payload frames."""

    __slots__ = ()
    op: ClassVar[str]
    payload: ClassVar[str | None] = None

    def check(self) -> None:
        """Raises ProtocolError where fields that are valid alone do not fit each other."""


class Request(Message):
    """A message from a client."""

    __slots__ = ()


class Reply(Message):
    """A message from the daemon."""

    __slots__ = ()


def check_total(lengths: list[int]) -> None:
    if sum(lengths) > MAX_MESSAGE_BYTES:
        raise too_large(f"a payload of {sum(lengths)} bytes; at most {MAX_MESSAGE_BYTES} allowed")


def check_suffixes(width: int, keys: list[bytes], suffixes: list[bytes]) -> None:
    if suffixes and width + len(suffixes[0]) > MAX_WIRE_KEY_BYTES:
        raise invalid(f"key and suffix are longer than {MAX_WIRE_KEY_BYTES} bytes")
    if len(keys) * len(suffixes) > MAX_LOOKUPS:
        raise too_large(f"keys times suffixes are more than {MAX_LOOKUPS}")


# ---- requests of a client -----------------------------------------------------------------------

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
class Hello(Request):
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
class Match(Request):
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
class Contains(Request):
    """Reports which tier holds each key. Changes nothing, not even the eviction order."""

    op: ClassVar[str] = "contains"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class Get(Request):
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
class Put(Request):
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
class Pin(Request):
    """Protects blocks from eviction for a limited time."""

    op: ClassVar[str] = "pin"
    width: Width
    keys: KeyList
    ttl_ms: Annotated[int, Spec(Uint(0, MAX_TTL_MS), "duration of the pin; 0 releases it")]


@dataclass(frozen=True, slots=True)
class Claim(Request):
    """Announces that this client computes blocks, so that others wait for them.

    Claims the leading keys that no other client has claimed, or extends claims of this client. Says
    nothing about which of the blocks are present. Needs the capability `claim`.
    """

    op: ClassVar[str] = "claim"
    width: Width
    keys: Annotated[
        list[bytes], Spec(Keys(MAX_CLAIM_KEYS), "keys to compute, head of the chain first")
    ]
    owner: Annotated[
        bytes, Spec(Bin((16,)), "random id of the client, the same in all of its sessions")
    ]
    ttl_ms: Annotated[
        int, Spec(Uint(0, MAX_CLAIM_MS), "duration of the claims; 0 releases those of this client")
    ]


@dataclass(frozen=True, slots=True)
class Delete(Request):
    """Deletes blocks and their pins."""

    op: ClassVar[str] = "delete"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class DeleteNamespace(Request):
    """Deletes the blocks that memory and SSD hold of a namespace, and their pins.

    It may be another namespace than the session's. A backing store keeps its blocks. Blocks that
    are stored meanwhile may stay. Needs the capability `delete_namespace`.
    """

    op: ClassVar[str] = "delete_namespace"
    namespace: Annotated[
        bytes, Spec(Bin((NAMESPACE_BYTES,)), "first bytes of its keys, which `info` shows in hex")
    ]


@dataclass(frozen=True, slots=True)
class Flush(Request):
    """Makes everything acknowledged before as durable as the daemon can."""

    op: ClassVar[str] = "flush"


@dataclass(frozen=True, slots=True)
class Info(Request):
    """Asks for facts about the daemon: version, tiers, capacities."""

    op: ClassVar[str] = "info"


@dataclass(frozen=True, slots=True)
class Stats(Request):
    """Asks for the daemon's counters: what it has done and what it holds."""

    op: ClassVar[str] = "stats"


@dataclass(frozen=True, slots=True)
class Lend(Request):
    """Leases blocks in shared memory for reading. A block stays in its slot until released."""

    op: ClassVar[str] = "lend"
    width: Width
    keys: KeyList


@dataclass(frozen=True, slots=True)
class Borrow(Request):
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
class Release(Request):
    """Releases leases. A reserved block that was not sealed is dropped."""

    op: ClassVar[str] = "release"
    leases: LeaseList


@dataclass(frozen=True, slots=True)
class Reserve(Request):
    """Leases free slots in shared memory for new blocks, which the client then writes and seals."""

    op: ClassVar[str] = "reserve"
    width: Width
    keys: KeyList
    parents: ParentList
    lengths: BlockLengths


@dataclass(frozen=True, slots=True)
class Seal(Request):
    """Makes reserved blocks readable. Ends their leases, whatever the result."""

    op: ClassVar[str] = "seal"
    leases: LeaseList


# ---- replies of the daemon ----------------------------------------------------------------------


class TierCode(enum.IntEnum):
    """The tier of a block, as one byte."""

    MISS = 0
    MEMORY = 1
    SSD = 2
    BACKING = 3


RESERVED = 0  # in ReserveReply.results: the client holds a lease
_PUT_CODES = {
    PutResult.STORED: 1,
    PutResult.PRESENT: 2,
    PutResult.DROPPED: 3,
    PutResult.FAILED: 4,
}
_PUT_RESULTS = {code: result for result, code in _PUT_CODES.items()}


def put_codes(results: Iterable[PutResult]) -> bytes:
    return bytes(_PUT_CODES[result] for result in results)


def put_results(codes: bytes) -> list[PutResult]:
    """The outcomes in a valid `results`; those of ReserveReply may also hold RESERVED."""
    return [_PUT_RESULTS[code] for code in codes]


@dataclass(frozen=True, slots=True)
class Limits:
    """What this daemon accepts in one message; never more than the protocol allows."""

    keys: int = MAX_KEYS
    frames: int = MAX_FRAMES
    message_bytes: int = MAX_MESSAGE_BYTES
    header_bytes: int = MAX_HEADER_BYTES


Count: TypeAlias = Annotated[
    int, Spec(Uint(0, MAX_KEYS), "number of keys or leases this applied to")
]
Matched: TypeAlias = Annotated[
    int, Spec(Uint(0, MAX_KEYS), "leading positions that are present without a gap")
]
TierCounts: TypeAlias = Annotated[
    list[int],
    Spec(Uints(3, 0, MAX_KEYS), "how many of them are in memory, on SSD and in the backing tier"),
]
Results: TypeAlias = Annotated[bytes, Spec(Codes(1, 4, MAX_KEYS), "put code of each key or lease")]
Facts: TypeAlias = Annotated[dict[str, Any], Spec(Tree(), "values by name")]
Leases: TypeAlias = Annotated[list[int], Spec(Uints(MAX_KEYS), "lease id of each key; 0: no lease")]
Offsets: TypeAlias = Annotated[
    list[int],
    Spec(Uints(MAX_KEYS), "offset of each block from the first slot", per="leases"),
]
Generations: TypeAlias = Annotated[
    list[int], Spec(Uints(MAX_KEYS), "generation of each block's slot", per="leases")
]


def _check_tiers(count: int, tiers: list[int]) -> None:
    if len(tiers) != 3 or sum(tiers) != count:
        raise invalid("tiers must be three numbers that add up to count")


@dataclass(frozen=True, slots=True)
class HelloReply(Reply):
    """The session is open."""

    op: ClassVar[str] = "hello"
    protocol: Annotated[
        int, Spec(Uint(PROTOCOL_VERSION, PROTOCOL_VERSION), "protocol version of the session")
    ]
    server: Annotated[str, Spec(CutText(MAX_TEXT), "name and version of the daemon, for logs")]
    capabilities: Annotated[list[str], Spec(Texts(MAX_CAPABILITIES), "capabilities of this daemon")]
    instance: Annotated[bytes, Spec(Bin((16,)), "random id, new at each start of the daemon")]
    session: Annotated[bytes, Spec(Bin((16,)), "random id of this session")]
    limits: Annotated[Limits, Spec(Record(Limits), "limits of this daemon for one message")]


@dataclass(frozen=True, slots=True)
class MatchReply(Reply):
    """The leading positions that are present, counted by the fastest tier that holds them."""

    op: ClassVar[str] = "match"
    count: Matched
    tiers: TierCounts

    def check(self) -> None:
        _check_tiers(self.count, self.tiers)


@dataclass(frozen=True, slots=True)
class ContainsReply(Reply):
    """A tier code for each key of the request."""

    op: ClassVar[str] = "contains"
    tiers: Annotated[
        bytes, Spec(Codes(min(TierCode), max(TierCode), MAX_KEYS), "tier code of each key")
    ]


@dataclass(frozen=True, slots=True)
class GetReply(Reply):
    """Some or all of the requested blocks, one payload frame each.

    A key that no reply of the stream names is a miss.
    """

    op: ClassVar[str] = "get"
    payload: ClassVar[str | None] = "lengths"
    positions: Annotated[
        list[int],
        Spec(
            Uints(MAX_FRAMES, 0, MAX_KEYS - 1, distinct=True),
            "index of each block in the request's keys, from 0",
        ),
    ]
    lengths: Annotated[
        list[int],
        Spec(Uints(MAX_FRAMES, 1, MAX_BLOCK_BYTES), "bytes of each block", per="positions"),
    ]
    checksums: Annotated[
        list[int], Spec(Uints(MAX_FRAMES), "XXH3-64 of each payload frame", per="positions")
    ]
    more: Annotated[bool, Spec(Flag(), "more replies to this request follow; absent: false")] = (
        False
    )

    def check(self) -> None:
        check_total(self.lengths)


@dataclass(frozen=True, slots=True)
class PutReply(Reply):
    """A put code for each key of the request."""

    op: ClassVar[str] = "put"
    results: Results


@dataclass(frozen=True, slots=True)
class PinReply(Reply):
    """How many keys are present and were pinned, or whose pins were released."""

    op: ClassVar[str] = "pin"
    count: Count


@dataclass(frozen=True, slots=True)
class ClaimReply(Reply):
    """Which of the keys are claimed, by whom, and until when."""

    op: ClassVar[str] = "claim"
    count: Annotated[
        int, Spec(Uint(0, MAX_CLAIM_KEYS), "leading keys that this client holds, or has released")
    ]
    others: Annotated[
        int, Spec(Uint(0, MAX_CLAIM_KEYS), "keys after them that another client has claimed")
    ]
    wait_ms: Annotated[
        int, Spec(Uint(0, MAX_CLAIM_MS), "until the first of the others' claims ends; 0: none")
    ]

    def check(self) -> None:
        if bool(self.others) != bool(self.wait_ms):
            raise invalid("there is a time to wait exactly when others have claims")


@dataclass(frozen=True, slots=True)
class DeleteReply(Reply):
    """How many of the keys were present."""

    op: ClassVar[str] = "delete"
    count: Count


@dataclass(frozen=True, slots=True)
class DeleteNamespaceReply(Reply):
    """How many blocks were deleted. None of them is back after a crash."""

    op: ClassVar[str] = "delete_namespace"
    count: Annotated[int, Spec(Uint(), "number of blocks, each counted once")]


@dataclass(frozen=True, slots=True)
class FlushReply(Reply):
    """Everything is as durable as the daemon can make it."""

    op: ClassVar[str] = "flush"


@dataclass(frozen=True, slots=True)
class InfoReply(Reply):
    """Facts about the daemon, for display only: a client must not depend on them."""

    op: ClassVar[str] = "info"
    facts: Facts


@dataclass(frozen=True, slots=True)
class StatsReply(Reply):
    """The daemon's counters, for display only: a client must not depend on them."""

    op: ClassVar[str] = "stats"
    facts: Facts


@dataclass(frozen=True, slots=True)
class LendReply(Reply):
    """Where the blocks are; all lists have one entry per key. A key without a lease is a miss.

    Blocks may share a lease; they are then released together.
    """

    op: ClassVar[str] = "lend"
    leases: Leases
    offsets: Offsets
    lengths: Annotated[
        list[int],
        Spec(Uints(MAX_KEYS, 0, MAX_BLOCK_BYTES), "bytes of each block", per="leases"),
    ]
    generations: Generations


@dataclass(frozen=True, slots=True)
class BorrowReply(Reply):
    """The reply of `match`, and where the leased positions are.

    Blocks are ordered by position, then by suffix, as in the request. They share one lease.
    """

    op: ClassVar[str] = "borrow"
    count: Matched
    tiers: TierCounts
    lent: Annotated[int, Spec(Uint(0, MAX_KEYS), "leading positions that are leased")]
    lease: Annotated[int, Spec(Uint(), "lease id of all of them; 0: nothing is leased")]
    offsets: Annotated[
        bytes, Spec(PackedUints(MAX_KEYS), "offset of each leased block from the first slot")
    ]
    generations: Annotated[
        bytes, Spec(PackedUints(MAX_KEYS), "generation of each block's slot", per="offsets")
    ]

    def check(self) -> None:
        _check_tiers(self.count, self.tiers)
        if self.lent > self.tiers[0]:
            raise invalid("more is lent than lies in memory")
        if not (bool(self.lent) == bool(self.lease) == bool(self.offsets)):
            raise invalid("blocks are lent exactly when there is a lease")
        if self.lent and len(self.offsets) // 8 % self.lent:
            raise invalid("positions must have as many blocks each")


@dataclass(frozen=True, slots=True)
class ReleaseReply(Reply):
    """How many of the leases existed and were released."""

    op: ClassVar[str] = "release"
    count: Count


@dataclass(frozen=True, slots=True)
class ReserveReply(Reply):
    """Where to write; all lists have one entry per key."""

    op: ClassVar[str] = "reserve"
    leases: Leases
    offsets: Offsets
    generations: Generations
    results: Annotated[
        bytes,
        Spec(
            Codes(RESERVED, 4, MAX_KEYS),
            "0: reserved; otherwise a put code, and no lease",
            per="leases",
        ),
    ]

    def check(self) -> None:
        for lease, result in zip(self.leases, self.results, strict=True):
            if (lease != 0) != (result == RESERVED):
                raise invalid("a key has a lease exactly when its result is 0")


@dataclass(frozen=True, slots=True)
class SealReply(Reply):
    """A put code for each lease of the request."""

    op: ClassVar[str] = "seal"
    results: Results


@dataclass(frozen=True, slots=True)
class ErrorReply(Reply):
    """The request was refused or failed. Ends a stream. Any request may get it."""

    op: ClassVar[str] = ""  # on the wire it carries the op of the request
    code: Annotated[ErrorCode, Spec(Choice(ErrorCode), "error code, for programs")]
    message: Annotated[
        str, Spec(CutText(MAX_ERROR_TEXT), "text for people; the sender truncates it")
    ]
    request_op: str = ""  # the request's op; empty where it could not be read

    @classmethod
    def of(cls, error: ProtocolError) -> ErrorReply:
        return cls(error.code, error.message, error.op)
