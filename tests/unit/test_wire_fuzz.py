"""For any bytes, a decoder raises ProtocolError or returns a message that can be encoded again."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import examples
from tests.wire_samples import SAMPLES, decode, encode, is_request, lengths_of
from vllm_tiered_kv.core.store import Durability
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.codec import REPLIES, REQUESTS, SPECS, UNREADABLE_ID
from vllm_tiered_kv.wire.header import peek_request_id
from vllm_tiered_kv.wire.messages import ErrorReply, Message, Put, Reply, Request

EXAMPLES = examples(300)


def survive(as_request: bool, header: bytes, lengths: list[int]) -> Request | Reply | None:
    """Returns the decoded message, None if it is invalid; checks that it round-trips."""
    peek_request_id(header)
    try:
        request_id, message = decode(as_request, header, lengths)
    except ProtocolError as error:
        check_refusal(error)
        return None
    assert is_request(message) == as_request
    again = encode(request_id, message)
    assert decode(as_request, again, lengths) == (request_id, message)
    return message


def check_refusal(error: ProtocolError) -> None:
    """Checks that the error can be sent to the other side and is short."""
    assert isinstance(error.code, ErrorCode)
    assert error.request_id is None or 0 <= error.request_id < 1 << 64
    assert len(error.message) < 1000
    request_id = UNREADABLE_ID if error.request_id is None else error.request_id
    reply = ErrorReply.of(error)
    assert decode(False, encode(request_id, reply), []) == (request_id, reply)


@EXAMPLES
@given(st.booleans(), st.binary(max_size=512), st.lists(st.integers(0, 1 << 40), max_size=3))
def test_decode_arbitrary_bytes(as_request: bool, header: bytes, lengths: list[int]) -> None:
    survive(as_request, header, lengths)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "insert", "remove", "repeat", "cut"]),
        st.integers(0, 1 << 16),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def change(header: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    data = bytearray(header)
    for how, where, value in changes:
        at = where % (len(data) + 1)
        if how == "cut":
            del data[at:]
        elif how == "insert":
            data.insert(at, value)
        elif how == "repeat":
            data[at:at] = data[at : at + value]
        elif at < len(data):
            if how == "remove":
                del data[at : at + 1 + value % 9]
            else:
                data[at] = value if how == "set" else data[at] ^ (1 << (value % 8))
    return bytes(data)


@EXAMPLES
@given(st.sampled_from(SAMPLES), CHANGES, st.booleans())
def test_decode_changed_headers(
    message: Request | Reply, changes: list[tuple[str, int, int]], swap: bool
) -> None:
    header = change(encode(3, message), changes)
    survive(is_request(message) != swap, header, lengths_of(message))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_decode_every_changed_bit_and_byte(message: Request | Reply) -> None:
    header = encode(3, message)
    survived = 0
    for at in range(min(len(header), 200)):
        for value in {header[at] ^ (1 << bit) for bit in range(8)} | {0xC1, 0xDD, 0xDF, 0xFF}:
            changed = header[:at] + bytes([value]) + header[at + 1 :]
            found = survive(is_request(message), changed, lengths_of(message))
            survived += found is not None
    assert survived > 0  # at least a changed id is valid, so the decoder gets that far


NAMES = sorted({name for cls in (*REQUESTS.values(), *REPLIES.values()) for name in SPECS[cls]})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.integers(0, 64),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=64),
    st.sampled_from([bytes(16), bytes(32), b"\1\0\0\0\0\0\0\0", b"\1", b""]),
    st.sampled_from([choice.value for choice in (*Durability, *ErrorCode)]),
)
KEYS = st.one_of(st.sampled_from(["id", "op", "ok", *NAMES]), st.text(max_size=4))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(KEYS, st.binary(max_size=4), st.integers(0, 9)), inner, max_size=4
        ),
    ),
    max_leaves=12,
)


@EXAMPLES
@given(st.booleans(), st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=8)))
def test_decode_arbitrary_structures(as_request: bool, value: Any) -> None:
    survive(as_request, msgpack.packb(value), [])


def likely(cls: type[Message]) -> st.SearchStrategy[dict[str, Any]]:
    """Generates headers with the right fields, whose values are mostly invalid."""
    fields: dict[str, Any] = {"id": st.integers(1, 9), "op": st.just(cls.op)}
    fields |= dict.fromkeys(SPECS[cls], VALUES)
    return st.fixed_dictionaries(fields)


@EXAMPLES
@given(st.data(), st.sampled_from(sorted(REQUESTS)), st.booleans())
def test_decode_right_fields_with_arbitrary_values(
    data: st.DataObject, op: str, as_request: bool
) -> None:
    cls = REQUESTS[op] if as_request else REPLIES[op]
    fields = data.draw(likely(cls))
    survive(as_request, msgpack.packb(fields if as_request else {**fields, "ok": True}), [])


@EXAMPLES
@given(st.data(), st.sampled_from(SAMPLES))
def test_decode_one_arbitrary_value(data: st.DataObject, message: Request | Reply) -> None:
    fields = msgpack.unpackb(encode(3, message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(VALUES)
    survive(is_request(message), msgpack.packb(fields), lengths_of(message))


@EXAMPLES
@given(st.data(), st.integers(1, 48), st.integers(0, 40))
def test_put_round_trips(data: st.DataObject, width: int, count: int) -> None:
    key = st.binary(min_size=width, max_size=width)
    parent = st.one_of(st.none(), key.filter(any))
    number = st.integers(0, (1 << 64) - 1)
    length = st.integers(1, 1 << 20)

    def each(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(st.lists(strategy, min_size=count, max_size=count))

    put = Put(width, each(key), each(parent), each(length), each(number), Durability.MEMORY)
    assert survive(True, encode(1, put), lengths_of(put)) == put
