"""Encodes and decodes the headers of the messages in `messages`.

A header is a flat msgpack map `{"id", "op", fields...}`; a reply also has `"ok"`. Decoding
validates every field and raises a ProtocolError that names the first invalid one. It raises no
other error, whatever the bytes are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire import messages
from vllm_tiered_kv.wire.fields import Record, Spec, Suffixes, Text, Texts, Tree, Uint
from vllm_tiered_kv.wire.header import Buffer, pack_map, peek_request_id, unpack_map
from vllm_tiered_kv.wire.limits import (
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    MAX_UINT64,
    PROTOCOL_VERSION,
)
from vllm_tiered_kv.wire.messages import ErrorReply, Hello, Message, Reply, Request

_M = TypeVar("_M", bound=Message)

UNREADABLE_ID = 0
"""Request id of an error reply to a message whose id could not be read. No request uses it."""


def _by_op(base: type[_M]) -> dict[str, type[_M]]:
    classes = [one for one in vars(messages).values() if isinstance(one, type)]
    return {cls.op: cls for cls in classes if issubclass(cls, base) and hasattr(cls, "op")}


REQUESTS = _by_op(Request)
REPLIES = _by_op(Reply)
del REPLIES[ErrorReply.op]

_MAX_OP = 32
_ID = Uint(0, MAX_UINT64)
_OP = Text(_MAX_OP)


def _specs(cls: type[Message]) -> dict[str, Spec]:
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: get_args(hints[field.name])[1]
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if get_origin(hints[field.name]) is Annotated
    }


SPECS = {cls: _specs(cls) for cls in (*REQUESTS.values(), *REPLIES.values(), ErrorReply)}
_REQUIRED = object()


class _Field(NamedTuple):
    """One field as the loops of `_encode` and `_decode` need it."""

    name: str
    encode: Callable[[Any, int], Any]
    decode: Callable[[Any, int], Any]
    default: Any  # omitted from the header if equal, as `more` in the last reply of a stream


def _fields(cls: type[Message]) -> list[_Field]:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is not dataclasses.MISSING
    }
    return [
        _Field(name, spec.kind.encode, spec.kind.decode, defaults.get(name, _REQUIRED))
        for name, spec in SPECS[cls].items()
    ]


_FIELDS = {cls: _fields(cls) for cls in SPECS}
# Messages without container fields.
_FLAT = {
    cls
    for cls, specs in SPECS.items()
    if not any(isinstance(spec.kind, (Suffixes, Texts, Record, Tree)) for spec in specs.values())
}
# Pairs of fields that must have equally many entries.
_PAIRS = {
    cls: [(name, spec.per) for name, spec in specs.items() if spec.per is not None]
    for cls, specs in SPECS.items()
}


def encode_request(request_id: int, request: Request) -> bytes:
    if request_id == UNREADABLE_ID:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "a request cannot have the id 0")
    return _encode({"id": request_id, "op": request.op}, request, request_id)


def encode_reply(request_id: int, reply: Reply) -> bytes:
    failed = isinstance(reply, ErrorReply)
    op = reply.request_op[:_MAX_OP] if isinstance(reply, ErrorReply) else reply.op
    return _encode({"id": request_id, "op": op, "ok": not failed}, reply, request_id)


def decode_request(header: Buffer, payload_lengths: Sequence[int]) -> tuple[int, Request]:
    """Returns the id and the request. `payload_lengths` are those of the payload frames."""
    fields, request_id, op = _open(header)
    if request_id == UNREADABLE_ID:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "a request cannot have the id 0", None, op)
    cls = REQUESTS.get(op)
    if cls is None:
        raise ProtocolError(ErrorCode.UNKNOWN_OP, f"unknown op {op!r}", request_id, op)
    return request_id, _decode(cls, fields, payload_lengths, request_id)


def decode_reply(header: Buffer, payload_lengths: Sequence[int]) -> tuple[int, Reply]:
    """Returns the id and the reply. `payload_lengths` are those of the payload frames."""
    fields, request_id, op = _open(header)
    ok = fields.pop("ok", None)
    if not isinstance(ok, bool):
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "ok: expected true or false", request_id, op)
    if not ok:
        error = _decode(ErrorReply, fields, payload_lengths, request_id)
        return request_id, dataclasses.replace(error, request_op=op)
    cls = REPLIES.get(op)
    if cls is None:
        raise ProtocolError(ErrorCode.UNKNOWN_OP, f"unknown op {op!r}", request_id, op)
    return request_id, _decode(cls, fields, payload_lengths, request_id)


def _encode(fields: dict[str, Any], message: Message, request_id: int) -> bytes:
    cls = type(message)
    width = getattr(message, "width", 0)
    name = "id"
    try:
        _ID.check(request_id)
        for name, encode, _, default in _FIELDS[cls]:
            value = getattr(message, name)
            raw = encode(value, width)
            if default is _REQUIRED or value != default:
                fields[name] = raw
        name = "message"
        _check_together(message)
        return pack_map(fields, cls in _FLAT)
    except ProtocolError as error:
        raise _in_context(error, message.op, name, request_id) from None


def _open(header: Buffer) -> tuple[dict[Any, Any], int, str]:
    """Unpacks a header; returns its message-specific fields, the request id and the op."""
    request_id = None
    name = "header"
    try:
        fields = unpack_map(header)
        name = "id"
        _ID.check(fields.get("id"))
        request_id = fields.pop("id")
        name = "op"
        _OP.check(fields.get("op"))
        return fields, request_id, fields.pop("op")
    except ProtocolError as error:
        raise ProtocolError(
            error.code,
            f"{name}: {error.message}",
            peek_request_id(header) if request_id is None else request_id,
        ) from None


def _decode(
    cls: type[_M], fields: dict[Any, Any], payload_lengths: Sequence[int], request_id: int
) -> _M:
    values: list[Any] = []
    name = "message"
    width = 0
    try:
        if cls.op == Hello.op:
            _check_version(fields.get("protocol"))
        for name, _, decode, default in _FIELDS[cls]:
            raw = fields.pop(name, _REQUIRED)
            if raw is not _REQUIRED:
                value = decode(raw, width)
            elif default is not _REQUIRED:
                value = default
            else:
                raise ProtocolError(ErrorCode.BAD_MESSAGE, "is missing")
            if name == "width":
                width = value
            values.append(value)
        name = "message"
        if fields:
            raise ProtocolError(ErrorCode.BAD_MESSAGE, f"unknown field {next(iter(fields))[:32]!r}")
        message = cls(*values)
        _check_together(message)
        name = "payload"
        _check_payload(message, payload_lengths)
        return message
    except ProtocolError as error:
        raise _in_context(error, cls.op, name, request_id) from None


def _check_version(protocol: Any) -> None:
    """Checked before all other fields, because another version may have unknown fields."""
    if type(protocol) is int and protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            ErrorCode.UNSUPPORTED_VERSION,
            f"protocol version {protocol} is not supported, only version {PROTOCOL_VERSION}",
        )


def _check_together(message: Message) -> None:
    for name, per in _PAIRS[type(message)]:
        here, there = getattr(message, name), getattr(message, per)
        if len(here) != len(there):
            raise ProtocolError(ErrorCode.BAD_MESSAGE, f"{len(there)} {per} but {len(here)} {name}")
    message.check()


def _check_payload(message: Message, payload_lengths: Sequence[int]) -> None:
    stated: list[int] = [] if message.payload is None else getattr(message, message.payload)
    if payload_lengths == stated and len(stated) <= MAX_FRAMES:
        return  # the message's own check limits their sum
    if len(payload_lengths) > MAX_FRAMES or sum(payload_lengths) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            ErrorCode.TOO_LARGE,
            f"more than {MAX_FRAMES} payload frames or {MAX_MESSAGE_BYTES} bytes",
        )
    if len(payload_lengths) != len(stated):
        raise ProtocolError(
            ErrorCode.BAD_MESSAGE, f"{len(payload_lengths)} frames, expected {len(stated)}"
        )
    for index, (actual, expected) in enumerate(zip(payload_lengths, stated, strict=True)):
        if actual != expected:
            raise ProtocolError(
                ErrorCode.BAD_MESSAGE,
                f"frame {index} has {actual} bytes, expected {expected}",
            )


def _in_context(error: ProtocolError, op: str, name: str, request_id: int) -> ProtocolError:
    text = f"{op or 'error'}: {name}: {error.message}"
    return ProtocolError(error.code, text, request_id, op)
