"""A valid message of each kind, for the tests of the protocol."""

from __future__ import annotations

from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.wire.codec import decode_reply, decode_request, encode_reply, encode_request
from vllm_tiered_kv.wire.fields import pack_uints
from vllm_tiered_kv.wire.messages import (
    Borrow,
    BorrowReply,
    Claim,
    ClaimReply,
    Contains,
    ContainsReply,
    Delete,
    DeleteNamespace,
    DeleteNamespaceReply,
    DeleteReply,
    ErrorReply,
    Flush,
    FlushReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Info,
    InfoReply,
    Lend,
    LendReply,
    Limits,
    Match,
    MatchReply,
    Message,
    Pin,
    PinReply,
    Put,
    PutReply,
    Release,
    ReleaseReply,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    Stats,
    StatsReply,
    put_codes,
)

A, B, C = (bytes([byte]) * 25 for byte in (0xA1, 0xB2, 0xC3))
TOKEN = bytes(range(16))

REQUEST_SAMPLES: list[Request] = [
    Hello(1, "client", bytes(32), 25, [4096, 8192], "layers, then tokens", TOKEN),
    Match(17, [A[:17], B[:17]], [bytes(8), b"\1" * 8], 5000),
    Match(25, [], [], 0),
    Contains(25, [A, B, C]),
    Get(25, [A, B], True),
    Put(25, [A, B], [None, A], [4096, 1], [0, (1 << 64) - 1], Durability.DISK),
    Pin(25, [A], 0),
    Claim(17, [A[:17], B[:17]], TOKEN, 1500),
    Delete(25, [A]),
    DeleteNamespace(TOKEN),
    Flush(),
    Info(),
    Stats(),
    Lend(25, [A, B]),
    Borrow(17, [A[:17], B[:17]], [bytes(8), b"\1" * 8], 4096),
    Release([1, 2, (1 << 64) - 1]),
    Reserve(25, [A, B], [None, A], [4096, 1 << 30]),
    Seal([3]),
]
REPLY_SAMPLES: list[Reply] = [
    HelloReply(1, "server", ["shared_memory"], TOKEN, bytes(16), Limits()),
    MatchReply(6, [1, 2, 3]),
    ContainsReply(bytes([0, 1, 2, 3])),
    GetReply([5, 2], [4096, 1], [1, 2], True),
    GetReply([], [], []),
    PutReply(put_codes(PutResult)),
    PinReply(1),
    ClaimReply(0, 2, 1),
    DeleteReply(0),
    DeleteNamespaceReply(1 << 40),
    FlushReply(),
    InfoReply({"tiers": [{"name": "memory", "bytes": 1 << 63}], "ratio": 0.5, "on": True}),
    StatsReply({"hits": {"memory": -1}, "none": [], "empty": {}}),
    LendReply([0, 9], [0, 1 << 40], [0, 4096], [0, 7]),
    BorrowReply(3, [2, 1, 0], 2, 9, pack_uints([0, 4096, 1 << 40, 8192]), pack_uints(range(4))),
    BorrowReply(0, [0, 0, 0], 0, 0, b"", b""),
    ReleaseReply(2),
    ReserveReply([9, 0], [4096, 0], [7, 0], bytes([0, 2])),
    SealReply(bytes([1])),
    ErrorReply(ErrorCode.NO_HELLO, "say hello first", "get"),
]
SAMPLES: list[Request | Reply] = [*REQUEST_SAMPLES, *REPLY_SAMPLES]


def lengths_of(message: Message) -> list[int]:
    return [] if message.payload is None else list(getattr(message, message.payload))


def is_request(message: Request | Reply) -> bool:
    return isinstance(message, Request)


def encode(request_id: int, message: Request | Reply) -> bytes:
    if isinstance(message, Request):
        return encode_request(request_id, message)
    return encode_reply(request_id, message)


def decode(
    request: bool, header: bytes | bytearray | memoryview, lengths: list[int]
) -> tuple[int, Request | Reply]:
    return decode_request(header, lengths) if request else decode_reply(header, lengths)
