"""Generates the reference part of docs/protocol.md from the message definitions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.wire import fields, limits
from vllm_tiered_kv.wire.codec import REPLIES, REQUESTS, SPECS
from vllm_tiered_kv.wire.messages import ErrorReply, Message, TierCode, put_codes

_ERRORS = {
    ErrorCode.BAD_MESSAGE: "A header, field or payload breaks this protocol.",
    ErrorCode.UNKNOWN_OP: "There is no such op in this version.",
    ErrorCode.UNSUPPORTED_VERSION: "The version in `hello` is not supported; the message says "
    "which one is.",
    ErrorCode.NO_HELLO: "The session is not open, or the daemon has restarted: send `hello` again.",
    ErrorCode.MISMATCH: "The namespace is known with another key length, other block lengths or "
    "another layout; or a key or block in a message has another length than its session announced.",
    ErrorCode.UNAUTHORIZED: "This client is not allowed to do this.",
    ErrorCode.READ_ONLY: "This client, or the daemon, is read-only.",
    ErrorCode.TOO_LARGE: "A limit is exceeded; request less at a time.",
    ErrorCode.UNAVAILABLE: "The daemon is shutting down or overloaded. The only code after which "
    "retrying the same request makes sense.",
    ErrorCode.NO_ARENA: "The session has no shared memory attached, or its token is unknown.",
    ErrorCode.NOT_WRITTEN: "`flush`: some blocks could not be written or made durable. `delete`: a "
    "tier refuses or does not answer; blocks may still be there, or be deleted later. `put` with "
    "`disk`: the daemon has no disk; nothing was kept.",
    ErrorCode.INTERNAL: "The daemon failed; its log says why.",
}
_PUTS = {
    PutResult.STORED: "Stored, with the requested durability.",
    PutResult.PRESENT: "The key is already present, or another client is putting it.",
    PutResult.DROPPED: "No room, or a queue is full. Nothing was kept; with `disk`, the block may "
    "be in memory only.",
    PutResult.FAILED: "An I/O error, or a wrong checksum. Nothing was kept; with `disk`, the block "
    "may be in memory only.",
}
_TIERS = {
    TierCode.MISS: "Not present.",
    TierCode.MEMORY: "In the daemon's memory.",
    TierCode.SSD: "On its SSD.",
    TierCode.BACKING: "In its backing tier.",
}
_LIMITS = {
    "MAX_HEADER_BYTES": "bytes of a header",
    "MAX_HEADER_VALUES": "msgpack values in a header: entries of arrays, and keys and values of "
    "maps, the outermost map's included",
    "MAX_HEADER_DEPTH": "nested maps and arrays, the header's own map included",
    "MAX_FRAMES": "payload frames of a message",
    "MAX_MESSAGE_BYTES": "bytes of all payload frames of a message",
    "MAX_BLOCK_BYTES": "bytes of one block",
    "MAX_KEYS": "keys of a message",
    "MAX_WIRE_KEY_BYTES": "bytes of one key",
    "MAX_SUFFIXES": "suffixes of a match",
    "MAX_LOOKUPS": "keys times suffixes of a match",
    "MAX_BLOCK_LENGTHS": "block lengths in a `hello`",
    "MAX_CAPABILITIES": "capabilities in the reply to `hello`",
    "MAX_TTL_MS": "milliseconds of a pin",
    "MAX_CLAIM_KEYS": "keys of a claim",
    "MAX_CLAIM_MS": "milliseconds of a claim",
    "MAX_TEXT": "characters (code points) of a text",
    "MAX_ERROR_TEXT": "characters of the message of an error",
}


def protocol_reference() -> str:
    """Limits, codes and a table of fields for each message, as Markdown."""
    parts = [
        "### Limits\n",
        _table(
            ("maximum", "number of"), [(getattr(limits, name), of) for name, of in _LIMITS.items()]
        ),
        "### Error codes\n",
        _table(("code", "meaning"), [(f"`{code.value}`", _ERRORS[code]) for code in ErrorCode]),
        "### Tier codes\n",
        _table(("code", "location of the block"), [(int(t), _TIERS[t]) for t in TierCode]),
        "### Put codes\n",
        _table(("code", "outcome"), [(put_codes([put])[0], _PUTS[put]) for put in PutResult]),
    ]
    for op, request in REQUESTS.items():
        parts += [f"### {op}\n", *_message("Request", request), *_message("Reply", REPLIES[op])]
    parts += ["### error\n", *_message("Reply with `ok` false", ErrorReply)]
    return "\n".join(parts)


def _message(title: str, cls: type[Message]) -> list[str]:
    parts = [f"{title}. {inspect.getdoc(cls)}\n"]
    specs = SPECS[cls]
    if specs:
        rows = []
        for name, spec in specs.items():
            each = f"; as many as `{spec.per}`" if spec.per else ""
            rows.append((f"`{name}`", _values(spec.kind), spec.meaning + each))
        parts.append(_table(("field", "type and values", "meaning"), rows))
    else:
        parts.append("No fields.\n")
    if cls.payload is not None:
        parts.append(f"Payload: one frame for each entry of `{cls.payload}`, of that length.\n")
    return parts


def _values(kind: fields.Kind) -> str:
    """The msgpack type of a field and its valid values."""
    match kind:
        case fields.Uint():
            return f"uint, {fields.range_text(kind.low, kind.high)}"
        case fields.Flag():
            return "bool"
        case fields.Text():
            return f"str, at most {kind.max_chars} characters"
        case fields.Bin():
            return f"bin, {' or '.join(map(str, kind.sizes))} bytes"
        case fields.Codes():
            return f"bin, a byte each, {kind.low} to {kind.high}"
        case fields.Choice():
            return "str: " + ", ".join(f"`{choice.value}`" for choice in kind.choices)
        case fields.Uints():
            numbers = "distinct numbers" if kind.distinct else "numbers"
            return f"bin, u64le {numbers}, {fields.range_text(kind.low, kind.high)}"
        case fields.PackedUints():
            return f"bin, u64le numbers, {fields.range_text(0, limits.MAX_UINT64)}"
        case fields.Keys():
            none = "; zeros: none" if isinstance(kind, fields.Parents) else ""
            return f"bin, n times `width` bytes, at most {kind.max_count} keys{none}"
        case fields.Suffixes():
            return (
                f"array of at most {kind.max_count} distinct bins, all of one length from 1 to "
                f"{kind.max_bytes} bytes"
            )
        case fields.Texts():
            return (
                f"array of at most {kind.max_count} str, each at most {limits.MAX_TEXT} characters"
            )
        case fields.Record():
            return f"map of {', '.join(f'`{name}`' for name in kind.names)}, each a uint"
        case fields.Tree():
            return (
                "map of str to int, float, bool, str, array or map, "
                f"nested at most {limits.MAX_TREE_DEPTH} levels"
            )
    raise TypeError(f"{type(kind).__name__} has no description")


def _table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
