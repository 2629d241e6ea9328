"""What names a block: the namespace, the scope of a request, and the hash chain over its tokens.

This file is the definition of the key format; `vllm_tiered_kv.native.cpu.extend_keys` is the fast
implementation of `extend_chain` and a property test holds the two together.

    namespace  = SHA256 over every fact that makes two caches' bytes incompatible
    root       = SHA256("tiered-kv root" | namespace | scope)       scope: LoRA, salt, epoch
    digest[i]  = SHA256(digest[i-1] | u32le(len(extra)) | extra | tokens as u32le)
    BlockKey   = digest[i][:16] | group id
    tail       = SHA256("tiered-kv tail" | parent | extra | tokens)[:16] | group id

A prompt may end within a block: the tail's key covers the tokens there are, and its parent is the
key of the block before it, or the root.

A digest covers the whole prefix up to its block, so one lookup of a key answers for the chain.
The rank of a worker (TP, PP, DCP, PCP) is not part of the key: all ranks of an engine agree on
it, and one lookup answers for all of them. `RankTag` keeps their bytes apart wherever blocks of
several ranks meet. The data-parallel rank appears nowhere: replicas hold identical blocks.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NewType

FORMAT_VERSION = 1
"""Changes whenever the bytes of a stored block or the meaning of a key change."""

CONTENT_BYTES = 16
DIGEST_BYTES = 32

BlockKey = NewType("BlockKey", bytes)
"""Content hash (16 bytes) followed by the KV-cache group id (1 byte)."""


@dataclass(frozen=True)
class Fingerprint:
    """Every fact that makes the bytes of one engine useless, or wrong, for another.

    Two engines share blocks exactly when all fields are equal; `namespace()` is their digest.
    """

    model: str  # digest of weights, config and overrides, never a name
    revision: str
    dtype: str
    quantization: str
    kv_dtype: str
    layout: str  # layout class: order of the dimensions inside a block
    kernels: str  # whose they are that write and read the numbers, and pack them as they like
    block_sizes: tuple[int, ...]  # tokens a block holds, per KV-cache group
    group_layers: tuple[tuple[str, ...], ...]  # layer names and page geometry, per group
    parallel: Mapping[str, int] = field(default_factory=dict)  # sizes of TP, PP, DCP, PCP
    tenant: str = ""  # the name users gave it, to keep engines apart that could share
    format_version: int = FORMAT_VERSION

    def namespace(self) -> bytes:
        """The 32 bytes every key of this engine starts from."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"tiered-kv namespace\0" + text.encode()).digest()


@dataclass(frozen=True)
class RankTag:
    """Which shard of a block a worker holds. Stays outside the content key."""

    tp: int = 0
    pp: int = 0
    dcp: int = 0
    pcp: int = 0

    def encode(self) -> bytes:
        return struct.pack("<HHHH", self.tp, self.pp, self.dcp, self.pcp)


def canonical(parts: Iterable[Any]) -> bytes:
    """Self-delimiting bytes of a sequence of str, bytes, int, None and nested sequences.

    Type and length precede each value, so no two different sequences give the same bytes.
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
            raise TypeError(f"a key cannot be made of {type(part).__name__}")
        out += tag + struct.pack("<I", len(body)) + body
    return bytes(out)


def root_digest(namespace: bytes, scope: Iterable[Any] = ()) -> bytes:
    """Start of the chain for requests of one scope: (epoch, LoRA digest, cache salt)."""
    return hashlib.sha256(b"tiered-kv root\0" + namespace + canonical(scope)).digest()


def group_suffix(group_id: int) -> bytes:
    return struct.pack("<B", group_id)


def tail_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> BlockKey:
    """The key of a block of group 0 that these tokens fill in part. `parent`: the key of the block
    before it, or the root."""
    body = canonical((parent, extra, struct.pack(f"<{len(tokens)}I", *tokens)))
    digest = hashlib.sha256(b"tiered-kv tail\0" + body).digest()
    return BlockKey(digest[:CONTENT_BYTES] + group_suffix(0))


def extend_chain(
    parent: bytes,
    tokens: Sequence[int],
    block_size: int,
    extras: Mapping[int, bytes] | None = None,
    suffix: bytes = b"\0",
) -> tuple[list[BlockKey], bytes]:
    """Keys of the whole blocks of `tokens` and the digest to go on from. The reference version."""
    extras = extras or {}
    keys: list[BlockKey] = []
    for index, start in enumerate(range(0, len(tokens) - block_size + 1, block_size)):
        extra = extras.get(index, b"")
        body = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + body).digest()
        keys.append(BlockKey(parent[:CONTENT_BYTES] + suffix))
    return keys, parent
