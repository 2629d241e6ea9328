"""The hash chain of block keys in Python, to compare the native implementation with."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from vllm_tiered_kv.core.key import CONTENT_BYTES, BlockKey


def extend_chain(
    parent: bytes,
    tokens: Sequence[int],
    block_size: int,
    extras: Mapping[int, bytes] | None = None,
    suffix: bytes = b"\0",
) -> tuple[list[BlockKey], bytes]:
    """Returns the keys of the full blocks of `tokens`, and the digest that continues the chain.

    This is the definition in `core/key.py`, written down in Python.
    """
    extras = extras or {}
    keys: list[BlockKey] = []
    for index, start in enumerate(range(0, len(tokens) - block_size + 1, block_size)):
        extra = extras.get(index, b"")
        body = struct.pack(f"<{block_size}I", *tokens[start : start + block_size])
        parent = hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + body).digest()
        keys.append(BlockKey(parent[:CONTENT_BYTES] + suffix))
    return keys, parent
