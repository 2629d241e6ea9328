"""States of token sequences whose bytes depend on the tokens, so that a wrong state is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.api import TokenCache

TOKEN_BYTES = 96


def states(
    prefix: Sequence[int], tokens: Sequence[int], token_bytes: int = TOKEN_BYTES
) -> NDArray[np.uint8]:
    """Returns one row per token behind `prefix`; it depends on all tokens up to its own."""
    rows = np.empty((len(tokens), token_bytes), np.uint8)
    before = hashlib.sha256(str(list(map(int, prefix)))[1:-1].encode())
    for n, token in enumerate(tokens):
        before.update(b", %d" % token if prefix or n else b"%d" % token)
        seed = before.digest()
        row = (seed * (token_bytes // len(seed) + 1))[:token_bytes]
        rows[n] = np.frombuffer(row, np.uint8)
    return rows


def store(cache: TokenCache, tokens: Sequence[int], durability: str = "memory") -> int:
    return cache.update(None, tokens, states((), tokens, cache.token_bytes), durability)


def read(cache: TokenCache, tokens: Sequence[int]) -> int:
    """Like `query`, but fails if the states are not those of these tokens."""
    into = np.zeros((len(tokens), cache.token_bytes), np.uint8)
    count = cache.query(tokens, into)
    assert np.array_equal(into[:count], states((), tokens[:count], cache.token_bytes))
    return count
