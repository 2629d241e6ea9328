"""Defines block keys: the namespace, the scope of a request, and the hash chain over its tokens.

`vllm_tiered_kv.native.cpu.extend_keys` computes the chain; a property test compares its keys with
those of the definition below, in Python.

    namespace  = SHA256 over every property that makes two caches' bytes incompatible
    root       = SHA256("tiered-kv root" | namespace | scope)       scope: LoRA, salt, epoch
    digest[i]  = SHA256(digest[i-1] | u32le(len(extra)) | extra | tokens as u32le)
    BlockKey   = digest[i][:16] | group id
    tail       = SHA256("tiered-kv tail" | parent | extra | tokens)[:16] | group id

With draft layers that read ahead by k tokens (EAGLE, MTP), the chain starts with a digest of the
first k tokens, and block i covers the tokens k positions later. So its key covers k more tokens.

A prompt may end within a block. The key of such a tail covers the tokens present, and its parent is
the key of the block before it, or the root.

A digest covers the whole prefix up to its block, so a hit on a key implies that the whole prefix is
the same. The rank of a worker (TP, PP, DCP, PCP) is not part of the key: all ranks of an engine
compute the same key, so one lookup is valid for all of them. Where blocks of several ranks are
stored together, `RankTag` distinguishes their bytes. The data-parallel rank is not part of any key,
because DP replicas hold identical blocks.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NewType

FORMAT_VERSION = 1
"""Increase it whenever the bytes of a stored block or the meaning of a key change."""

CONTENT_BYTES = 16

BlockKey = NewType("BlockKey", bytes)
"""Content hash (16 bytes) followed by the KV-cache group id (1 byte)."""


@dataclass(frozen=True)
class Fingerprint:
    """All properties of an engine that decide whether another engine can use its blocks.

    Two engines share blocks if and only if all fields are equal; `namespace()` is their digest.
    """

    model: str  # digest of weights, config and overrides, never a name
    revision: str
    dtype: str
    quantization: str
    kv_dtype: str
    layout: str  # layout class: order of the dimensions inside a block
    kernels: str  # attention back-end; each back-end packs the numbers in its own way
    block_sizes: tuple[int, ...]  # tokens a block holds, per KV-cache group
    group_layers: tuple[tuple[str, ...], ...]  # layer names and page geometry, per group
    parallel: Mapping[str, int] = field(default_factory=dict)  # sizes of TP, PP, DCP, PCP
    tenant: str = ""  # configured by users to isolate engines that could share blocks
    format_version: int = FORMAT_VERSION

    def namespace(self) -> bytes:
        """Returns the 32-byte digest that all keys of this engine are derived from."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"tiered-kv namespace\0" + text.encode()).digest()


@dataclass(frozen=True)
class RankTag:
    """Identifies the shard of a block that a worker holds. Not part of the content key."""

    tp: int = 0
    pp: int = 0
    dcp: int = 0
    pcp: int = 0

    def encode(self) -> bytes:
        return struct.pack("<HHHH", self.tp, self.pp, self.dcp, self.pcp)


def canonical(parts: Iterable[Any]) -> bytes:
    """Encodes a sequence of str, bytes, int, bool, None and nested sequences unambiguously.

    Type and length precede each value, so two different sequences never have the same encoding.
    """
    out = bytearray()
    for part in parts:
        if part is None:
            tag, body = b"n", b""
        elif isinstance(part, bool):
            tag, body = b"b", bytes([part])
        elif isinstance(part, bytes):
            tag, body = b"y", part
        elif isinstance(part, str):
            tag, body = b"s", part.encode()
        elif isinstance(part, int):
            tag, body = b"i", str(part).encode()
        elif isinstance(part, (list, tuple)):
            tag, body = b"l", canonical(part)
        else:
            raise TypeError(f"a value of type {type(part).__name__} cannot be part of a key")
        out += tag + struct.pack("<I", len(body)) + body
    return bytes(out)


def root_digest(namespace: bytes, scope: Iterable[Any] = ()) -> bytes:
    """Returns the start of the hash chain of a scope: (epoch, LoRA digest, cache salt)."""
    return hashlib.sha256(b"tiered-kv root\0" + namespace + canonical(scope)).digest()


def group_suffix(group_id: int) -> bytes:
    return struct.pack("<B", group_id)


def tail_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> BlockKey:
    """Returns the key of a partly filled block of group 0 that holds these tokens.

    `parent` is the key of the block before it, or the root.
    """
    body = canonical((parent, extra, struct.pack(f"<{len(tokens)}I", *tokens)))
    digest = hashlib.sha256(b"tiered-kv tail\0" + body).digest()
    return BlockKey(digest[:CONTENT_BYTES] + group_suffix(0))
