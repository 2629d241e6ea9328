"""The protocol: messages round-trip, errors name the invalid field, decoding is cheap."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.wire_samples import (
    REPLY_SAMPLES,
    REQUEST_SAMPLES,
    SAMPLES,
    A,
    B,
    decode,
    encode,
    is_request,
    lengths_of,
)
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode, ProtocolError, TieredKVError
from vllm_tiered_kv.wire import limits
from vllm_tiered_kv.wire.codec import (
    REPLIES,
    REQUESTS,
    SPECS,
    UNREADABLE_ID,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.messages import (
    Contains,
    ErrorReply,
    Get,
    GetReply,
    HelloReply,
    InfoReply,
    LendReply,
    Limits,
    Match,
    MatchReply,
    Put,
    Release,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    put_codes,
    put_results,
)

EXAMPLE = Path(__file__).parents[2] / "docs" / "protocol.md"
ID = 77


def header_with(message: Request | Reply, /, **changes: Any) -> bytes:
    """Returns a message's header with fields replaced, or removed if the value is `...`."""
    fields = {**msgpack.unpackb(encode(ID, message)), **changes}
    return msgpack.packb({name: value for name, value in fields.items() if value is not ...})


def refusal(message: Request | Reply, /, **changes: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(is_request(message), header_with(message, **changes), lengths_of(message))
    return caught.value


def name_of(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
@pytest.mark.parametrize("request_id", [1, 255, (1 << 64) - 1])
def test_messages_round_trip(message: Request | Reply, request_id: int) -> None:
    header = encode(request_id, message)
    for buffer in (header, bytearray(header), memoryview(header)):
        found = decode(is_request(message), buffer, lengths_of(message))
        assert found == (request_id, message)
    assert peek_request_id(header) == request_id


def test_samples_cover_every_message() -> None:
    assert {type(message) for message in REQUEST_SAMPLES} == set(REQUESTS.values())
    assert {type(message) for message in REPLY_SAMPLES} == {*REPLIES.values(), ErrorReply}
    assert list(REQUESTS) == list(REPLIES)


FIELDS = [
    pytest.param(message, name, id=f"{name_of(message)}.{name}")
    for message in SAMPLES
    for name in ["id", "op", *([] if is_request(message) else ["ok"]), *SPECS[type(message)]]
]


@pytest.mark.parametrize(("message", "name"), FIELDS)
def test_decode_wrong_type_names_field(message: Request | Reply, name: str) -> None:
    right = msgpack.unpackb(encode(ID, message)).get(name)
    wrong: list[Any] = [None, True, -1, 1 << 63, 1.5, "text", b"\0\0\0\0\0", [1], [[]], {"a": None}]
    tried = 0
    for value in wrong:
        if type(value) is type(right) or (name == "more" and value is True):
            continue
        error = refusal(message, **{name: value})
        assert name in error.message
        assert error.request_id == (None if name == "id" else ID)
        assert error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.UNSUPPORTED_VERSION)
        tried += 1
    assert tried >= 7


REQUIRED = [field for field in FIELDS if field.values[1] != "more"]


@pytest.mark.parametrize(("message", "name"), REQUIRED)
def test_decode_missing_field_names_field(message: Request | Reply, name: str) -> None:
    error = refusal(message, **{name: ...})
    assert error.code is ErrorCode.BAD_MESSAGE
    assert name in error.message
    assert error.request_id == (None if name == "id" else ID)


def test_decode_only_default_fields_may_be_absent() -> None:
    assert len(REQUIRED) == len(FIELDS) - sum(isinstance(sample, GetReply) for sample in SAMPLES)
    last = GetReply([], [], [], False)
    assert "more" not in msgpack.unpackb(encode(ID, last))
    assert decode_reply(header_with(last, more=False), []) == (ID, last)


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_decode_unknown_fields_and_extra_frames_are_refused(message: Request | Reply) -> None:
    assert "'surplus'" in refusal(message, surplus=1).message
    with pytest.raises(ProtocolError, match="frames"):
        decode(is_request(message), encode(ID, message), [*lengths_of(message), 1])


@pytest.mark.parametrize(
    "message", [m for m in SAMPLES if m.payload and lengths_of(m)], ids=name_of
)
def test_decode_frames_must_match_header(message: Request | Reply) -> None:
    header, lengths = encode(ID, message), lengths_of(message)
    for wrong in ([], lengths[:-1], lengths[::-1], [*lengths[:-1], lengths[-1] + 1]):
        with pytest.raises(ProtocolError, match="frame") as caught:
            decode(is_request(message), header, wrong)
        assert caught.value.code is ErrorCode.BAD_MESSAGE
        assert caught.value.request_id == ID
        assert caught.value.op == message.op


@pytest.mark.parametrize(
    ("message", "changes", "code"),
    [
        (Get(25, [A], True), {"width": 24}, ErrorCode.BAD_MESSAGE),
        (Get(25, [A], True), {"width": 0}, ErrorCode.BAD_MESSAGE),
        (Get(25, [A], True), {"width": limits.MAX_WIRE_KEY_BYTES + 1}, ErrorCode.BAD_MESSAGE),
        (Get(1, [], True), {"keys": bytes(limits.MAX_KEYS + 1)}, ErrorCode.TOO_LARGE),
        (Get(1, [], False), {"keys": bytes(limits.MAX_FRAMES + 1)}, ErrorCode.TOO_LARGE),
        (Release([1]), {"leases": bytes(8)}, ErrorCode.BAD_MESSAGE),
        (Release([1]), {"leases": b"\1" * 7}, ErrorCode.BAD_MESSAGE),
        (Release([1]), {"leases": b"\1" * 16}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": [b"a", b"bc"]}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": [b"a", b"b", b"a"]}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": [b""]}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": ["a"]}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": [bytes(41)]}, ErrorCode.BAD_MESSAGE),
        (Match(8, [], [], 0), {"suffixes": [b"a"] * 1025}, ErrorCode.TOO_LARGE),
        (
            Match(1, [], [bytes([n % 256, n >> 8]) for n in range(1024)], 0),
            {"keys": bytes(1025)},
            ErrorCode.TOO_LARGE,
        ),
        (Match(8, [], [], 0), {"pin_ms": limits.MAX_TTL_MS + 1}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[0], {"namespace": bytes(31)}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[0], {"arena": bytes(15)}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[0], {"client": "x" * 257}, ErrorCode.TOO_LARGE),
        (REQUEST_SAMPLES[0], {"block_bytes": b"\1\0\0\0\0\0\0\0" * 2}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[5], {"durability": "forever"}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[5], {"parents": A}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[5], {"lengths": bytes(16)}, ErrorCode.BAD_MESSAGE),
        (REQUEST_SAMPLES[5], {"checksums": bytes(8)}, ErrorCode.BAD_MESSAGE),
        (MatchReply(1, [1, 0, 0]), {"count": 2}, ErrorCode.BAD_MESSAGE),
        (MatchReply(0, [0, 0, 0]), {"tiers": bytes(16)}, ErrorCode.BAD_MESSAGE),
        (REPLY_SAMPLES[2], {"tiers": b"\4"}, ErrorCode.BAD_MESSAGE),
        (REPLY_SAMPLES[5], {"results": b"\0"}, ErrorCode.BAD_MESSAGE),
        (ReserveReply([9], [0], [0], b"\0"), {"results": b"\1"}, ErrorCode.BAD_MESSAGE),
        (ReserveReply([0], [0], [0], b"\1"), {"results": b"\0"}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {"a": {"b": {"c": {"d": {}}}}}}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {"a": [[[[]]]]}}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {"a": None}}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {"a": b"bytes"}}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {b"a": 1}}, ErrorCode.BAD_MESSAGE),
        (InfoReply({}), {"facts": {"a": float("nan")}}, ErrorCode.BAD_MESSAGE),
        (ErrorReply(ErrorCode.INTERNAL, ""), {"code": "other"}, ErrorCode.BAD_MESSAGE),
        (ErrorReply(ErrorCode.INTERNAL, ""), {"message": "x" * 1025}, ErrorCode.TOO_LARGE),
        (REQUEST_SAMPLES[8], {"op": "no such op"}, ErrorCode.UNKNOWN_OP),
        (REPLY_SAMPLES[8], {"op": "no such op"}, ErrorCode.UNKNOWN_OP),
        (REQUEST_SAMPLES[8], {"op": "x" * 33}, ErrorCode.TOO_LARGE),
    ],
)
def test_decode_values_out_of_range_are_refused(
    message: Request | Reply, changes: dict[str, Any], code: ErrorCode
) -> None:
    decode(is_request(message), header_with(message), lengths_of(message))
    error = refusal(message, **changes)
    assert error.code is code
    assert error.request_id == ID
    assert isinstance(error, TieredKVError)


@pytest.mark.parametrize(
    "message",
    [
        Get(25, [A[:24]], True),
        Get(25, [A[:24], A + b"x"], True),
        Get(49, [bytes(49)], True),
        Get(25, ["x" * 25], True),  # type: ignore[list-item]
        Get(25, [A] * 65537, True),
        Put(25, [A], [bytes(25)], [1], [0], Durability.MEMORY),
        Put(25, [A, B], [None], [1, 1], [0, 0], Durability.MEMORY),
        Put(25, [A, B], [None, A], [1 << 30, 1], [0, 0], Durability.MEMORY),
        Put(25, [A], [None], [1], [0], "memory"),  # type: ignore[arg-type]
        Release([-1]),
        Release([1 << 64]),
        Release([1.5]),  # type: ignore[list-item]
        Match(48, [], [b"a"], 0),
        GetReply([1, 1], [1, 1], [0, 0]),
        InfoReply({"many": [0] * limits.MAX_HEADER_VALUES}),
        InfoReply({"big": 1 << 64}),
        InfoReply({"bad": "\ud800"}),
        HelloReply(1, "s", [], bytes(16), bytes(16), Limits(keys=-1)),
    ],
    ids=name_of,
)
def test_encode_refuses_invalid_messages(message: Request | Reply) -> None:
    with pytest.raises(ProtocolError):
        encode(ID, message)


def test_encode_refuses_too_long_header() -> None:
    key = bytes(limits.MAX_WIRE_KEY_BYTES)
    most = Contains(len(key), [key] * limits.MAX_KEYS)
    assert decode_request(encode_request(1, most), []) == (1, most)
    lengths = [1] * limits.MAX_KEYS
    reserve = Reserve(len(key), most.keys, [None] * len(lengths), lengths)
    with pytest.raises(ProtocolError) as caught:
        encode_request(1, reserve)
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_decode_checks_version_before_fields() -> None:
    future = msgpack.packb({"id": 5, "op": "hello", "protocol": 2, "news": [1, 2], "client": 7})
    with pytest.raises(ProtocolError, match=r"version 2 .* only version 1") as caught:
        decode_request(future, [])
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
    reply = ErrorReply.of(caught.value)
    assert reply.request_op == "hello"
    assert decode_reply(encode_reply(5, reply), []) == (5, reply)
    with pytest.raises(ProtocolError) as caught:
        decode_reply(header_with(REPLY_SAMPLES[0], protocol=2, news=1), [])
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_request_id_zero_is_refused() -> None:
    with pytest.raises(ProtocolError):
        encode_request(UNREADABLE_ID, Release([1]))
    with pytest.raises(ProtocolError) as caught:
        decode_request(header_with(Release([1]), id=0), [])
    assert caught.value.request_id is None
    unreadable = ErrorReply(ErrorCode.BAD_MESSAGE, "what?")
    assert decode_reply(encode_reply(UNREADABLE_ID, unreadable), []) == (0, unreadable)


@pytest.mark.parametrize("text", ["x" * 5000, "\N{GRINNING FACE}" * 5000, "a\ud800b"])
def test_error_reply_text_is_truncated(text: str) -> None:
    _, reply = decode_reply(encode_reply(1, ErrorReply(ErrorCode.INTERNAL, text, "get")), [])
    assert isinstance(reply, ErrorReply)
    assert reply.message == text[: limits.MAX_ERROR_TEXT].replace("\ud800", "?")
    assert reply.request_op == "get"


def test_put_results_have_fixed_codes() -> None:
    assert put_codes(PutResult) == bytes([1, 2, 3, 4])
    assert put_results(bytes([4, 3, 2, 1])) == [
        PutResult.FAILED,
        PutResult.DROPPED,
        PutResult.PRESENT,
        PutResult.STORED,
    ]


BROKEN_HEADERS = {
    "empty": b"",
    "not a map": b"\x07",
    "an array": b"\x91\x01",
    "twice": b"\x82\xa2id\x01\xa2id\x02",
    "twice, inside": b"\x81\xa2id\x82\xa1a\x01\xa1a\x02",
    "bytes behind": msgpack.packb({"id": 1, "op": "flush"}) + b"\0",
    "key not text": b"\x81\x01\x02",
    "not UTF-8": b"\x81\xa2id\xa1\xff",
    "extension": b"\x81\xa2id\xd4\x01\x00",
    "empty extension": b"\x82\xa2id\x01\xa2op\xc7\x00\x05",
    "nested too deep": b"\x83\xa2id\x01\xa2op\xa5flush\xa1x" + b"\x91" * 9 + b"\x01",
    "timestamp": b"\x81\xa2id\xd6\xff\0\0\0\0",
    "reserved type": b"\x81\xa2id\xc1",
    "length cut off": b"\x81\xa2id\xc6\x00",
    "bytes as field names": b"\x81\xc4\x02id\x01",
}


@pytest.mark.parametrize("name", BROKEN_HEADERS)
def test_decode_broken_header_is_refused(name: str) -> None:
    for request in (True, False):
        with pytest.raises(ProtocolError) as caught:
            decode(request, BROKEN_HEADERS[name], [])
        assert caught.value.code is ErrorCode.BAD_MESSAGE


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_decode_truncated_header_error_has_request_id(message: Request | Reply) -> None:
    header = encode(ID, message)
    for length in range(len(header)):
        with pytest.raises(ProtocolError) as caught:
            decode(is_request(message), header[:length], lengths_of(message))
        assert caught.value.request_id == (ID if length >= 5 else None)


def _nested(opening: bytes, depth: int) -> bytes:
    return b"\x81\xa1k" + opening * depth


HOSTILE = {
    "huge array": b"\x81\xa1k\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge bin": b"\x81\xa1k\xc6\xff\xff\xff\xff",
    "huge text": b"\x81\xa1k\xdb\xff\xff\xff\xff",
    "huge extension": b"\x81\xa1k\xc9\xff\xff\xff\xff\x01",
    "nested arrays of many": _nested(b"\xdd\x00\x00\xff\xff", 1000) + bytes(70000),
    "nested arrays of few": _nested(b"\xdc\x10\x00", 1000) + bytes(70000),
    "deep": _nested(b"\x91", 1 << 20),
    "many empty arrays": b"\x81\xa1k\xdd\x00\x3f\xff\xff" + b"\x90" * 0x3FFFFF,
    "many empty maps": b"\x81\xa1k\xdd\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF,
    "arrays of empty maps": b"\x81\xa1k\xdc\x1f\x00" + (b"\xdc\x01\x00" + b"\x80" * 256) * 0x1F00,
    "many fields": b"\xde\xff\xff" + b"".join(b"\xa4%04x\x01" % n for n in range(0xFFFF)),
    "a long field name": b"\x81\xc6\x00\x30\x00\x00" + bytes(0x300000) + b"\x01",
    "tiny keys": msgpack.packb(
        {"id": 1, "op": "get", "width": 2, "keys": bytes(3 << 20), "stream": True}
    ),
    "too long": bytes(limits.MAX_HEADER_BYTES + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_decode_hostile_header_needs_no_memory(name: str) -> None:
    header = HOSTILE[name]
    tracemalloc.start()
    try:
        for request in (True, False):
            with pytest.raises(ProtocolError) as caught:
                decode(request, header, [])
            assert len(str(caught.value)) < 1000
        peek_request_id(header)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(header) + (1 << 20)


def test_decode_largest_valid_header_memory_is_bounded() -> None:
    header = encode_request(1, Contains(2, [bytes(2)] * limits.MAX_KEYS))
    values = [index << 32 for index in range(limits.MAX_KEYS)]
    many = encode_reply(1, LendReply(values, values, [0] * len(values), values))
    tracemalloc.start()
    try:
        decode_request(header, [])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        decode_reply(many, [])
        peak_of_many = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(header)
    assert peak_of_many < 16 * len(many)


@pytest.mark.parametrize(
    "lengths", [[0] * (limits.MAX_FRAMES + 1), [16 << 20] * 65], ids=["frames", "bytes"]
)
def test_decode_payload_beyond_the_limits_is_refused(lengths: list[int]) -> None:
    for message in (REQUEST_SAMPLES[5], REQUEST_SAMPLES[8]):
        with pytest.raises(ProtocolError) as caught:
            decode(True, encode(ID, message), lengths)
        assert caught.value.code is ErrorCode.TOO_LARGE
        assert caught.value.request_id == ID


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"\x81\xa2id\x05", 5),
        (b"\x85\xa2id\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc1 broken", (1 << 64) - 1),
        (b"\x81\xa2id\x00", None),
        (b"\x81\xa2id\xff", None),
        (b"\x81\xa2id\xc3", None),
        (b"\x81\xa2id\xa15", None),
        (b"\x81\xa2op\x05", None),
        (b"\x81\xa2id", None),
        (b"\x81\xa2id\xdd\xff\xff\xff\xff", None),
        (b"\x05", None),
        (b"", None),
    ],
)
def test_peek_request_id_of_broken_header(header: bytes, found: int | None) -> None:
    assert peek_request_id(header) == found


def documented(kind: str) -> bytes:
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", EXAMPLE.read_text(), re.M | re.S)
    return bytes.fromhex("".join(line.partition("|")[0] for line in block.splitlines()))


def test_documented_exchange_matches_encoding() -> None:
    keys = [bytes.fromhex("aabbccdd"), bytes.fromhex("11223344")]
    request, reply = Match(4, keys, [b"\0", b"\1"], 0), MatchReply(1, [1, 0, 0])
    assert encode_request(7, request) == documented("request")
    assert encode_reply(7, reply) == documented("reply")
    assert decode_request(documented("request"), []) == (7, request)
    assert decode_reply(documented("reply"), []) == (7, reply)
