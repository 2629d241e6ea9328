"""Replies of the daemon. Each message is defined here once; codecs and docs derive from it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.fields import (
    Bin,
    Choice,
    Codes,
    CutText,
    Flag,
    PackedUints,
    Record,
    Spec,
    Texts,
    Tree,
    Uint,
    Uints,
    invalid,
)
from vllm_tiered_kv.wire.limits import (
    MAX_BLOCK_BYTES,
    MAX_CAPABILITIES,
    MAX_ERROR_TEXT,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    PROTOCOL_VERSION,
)
from vllm_tiered_kv.wire.requests import Message, check_total


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
class HelloReply(Message):
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
class MatchReply(Message):
    """The leading positions that are present, counted by the fastest tier that holds them."""

    op: ClassVar[str] = "match"
    count: Matched
    tiers: TierCounts

    def check(self) -> None:
        _check_tiers(self.count, self.tiers)


@dataclass(frozen=True, slots=True)
class ContainsReply(Message):
    """A tier code for each key of the request."""

    op: ClassVar[str] = "contains"
    tiers: Annotated[
        bytes, Spec(Codes(min(TierCode), max(TierCode), MAX_KEYS), "tier code of each key")
    ]


@dataclass(frozen=True, slots=True)
class GetReply(Message):
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
class PutReply(Message):
    """A put code for each key of the request."""

    op: ClassVar[str] = "put"
    results: Results


@dataclass(frozen=True, slots=True)
class PinReply(Message):
    """How many keys are present and were pinned, or whose pins were released."""

    op: ClassVar[str] = "pin"
    count: Count


@dataclass(frozen=True, slots=True)
class DeleteReply(Message):
    """How many of the keys were present."""

    op: ClassVar[str] = "delete"
    count: Count


@dataclass(frozen=True, slots=True)
class FlushReply(Message):
    """Everything is as durable as the daemon can make it."""

    op: ClassVar[str] = "flush"


@dataclass(frozen=True, slots=True)
class InfoReply(Message):
    """Facts about the daemon, for display only: a client must not depend on them."""

    op: ClassVar[str] = "info"
    facts: Facts


@dataclass(frozen=True, slots=True)
class StatsReply(Message):
    """The daemon's counters, for display only: a client must not depend on them."""

    op: ClassVar[str] = "stats"
    facts: Facts


@dataclass(frozen=True, slots=True)
class LendReply(Message):
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
class BorrowReply(Message):
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
class ReleaseReply(Message):
    """How many of the leases existed and were released."""

    op: ClassVar[str] = "release"
    count: Count


@dataclass(frozen=True, slots=True)
class ReserveReply(Message):
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
class SealReply(Message):
    """A put code for each lease of the request."""

    op: ClassVar[str] = "seal"
    results: Results


@dataclass(frozen=True, slots=True)
class ErrorReply(Message):
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


Reply: TypeAlias = (
    HelloReply
    | MatchReply
    | ContainsReply
    | GetReply
    | PutReply
    | PinReply
    | DeleteReply
    | FlushReply
    | InfoReply
    | StatsReply
    | LendReply
    | BorrowReply
    | ReleaseReply
    | ReserveReply
    | SealReply
    | ErrorReply
)
