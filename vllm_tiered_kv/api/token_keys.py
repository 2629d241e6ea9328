"""Keys of token sequences: the chain of `core/key.py`, in a namespace that no engine has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.key import (
    FORMAT_VERSION,
    BlockKey,
    canonical,
    group_suffix,
    root_digest,
)
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native.cpu import extend_keys

Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
"""Token ids, from 0 to 2**32 - 1."""

_SUFFIX = group_suffix(0)


class TokenKeys:
    def __init__(self, name: str, token_bytes: int, chunk_tokens: int) -> None:
        # Not the sizes: a daemon refuses those who use a name with others, rather than have them
        # miss forever. In the root they are, for a daemon that has forgotten.
        self.namespace = hashlib.sha256(
            b"tiered-kv token cache\0" + canonical((FORMAT_VERSION, name))
        ).digest()
        self._root = root_digest(self.namespace, (token_bytes, chunk_tokens))
        self._chunk = chunk_tokens

    def of(self, prefix: Tokens, tokens: Tokens) -> list[BlockKey]:
        """Keys of all whole chunks of `prefix`, itself whole chunks, followed by `tokens`."""
        keys, digest = self._extend(self._root, prefix, "prefix")
        return keys + self._extend(digest, tokens, "tokens")[0]

    def _extend(self, parent: bytes, tokens: Tokens, name: str) -> tuple[list[BlockKey], bytes]:
        if not len(tokens):  # an empty array may be one of floats
            return [], parent
        whole = len(tokens) - len(tokens) % self._chunk
        try:
            keys, digest = extend_keys(parent, tokens, 0, whole, self._chunk, None, _SUFFIX)
            if whole < len(tokens):  # the rest gets no key, and is checked all the same
                extend_keys(parent, tokens, whole, len(tokens), 1, None, _SUFFIX)
        except NativeError as error:
            raise NativeError(str(error).replace("tokens", name, 1)) from None
        return cast("list[BlockKey]", keys), digest
