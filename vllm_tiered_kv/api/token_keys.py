"""Keys of token sequences: the hash chain of `core/key.py`, in a namespace that no engine uses."""

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
    """Computes the block keys of a `TokenCache`. Thread-safe."""

    def __init__(self, name: str, token_bytes: int, chunk_tokens: int) -> None:
        # The namespace does not depend on the sizes, so that a daemon can refuse a client that uses
        # a name with other sizes, instead of missing forever. The root of the chain does depend on
        # them, in case the daemon no longer knows the sizes of the namespace.
        self.namespace = hashlib.sha256(
            b"tiered-kv token cache\0" + canonical((FORMAT_VERSION, name))
        ).digest()
        self._root = root_digest(self.namespace, (token_bytes, chunk_tokens))
        self._chunk = chunk_tokens

    def of(self, prefix: Tokens, tokens: Tokens) -> list[BlockKey]:
        """Returns the keys of all complete chunks of `prefix` + `tokens`.

        `prefix` must consist of complete chunks.
        """
        keys, digest = self._extend(self._root, prefix, "prefix")
        return keys + self._extend(digest, tokens, "tokens")[0]

    def _extend(self, parent: bytes, tokens: Tokens, name: str) -> tuple[list[BlockKey], bytes]:
        if not len(tokens):  # an empty array may have a float dtype, which native code refuses
            return [], parent
        whole = len(tokens) - len(tokens) % self._chunk
        try:
            keys, digest = extend_keys(parent, tokens, 0, whole, self._chunk, None, _SUFFIX)
            if whole < len(tokens):  # validates the rest, which gets no key
                extend_keys(parent, tokens, whole, len(tokens), 1, None, _SUFFIX)
        except NativeError as error:
            raise NativeError(str(error).replace("tokens", name, 1)) from None
        return cast("list[BlockKey]", keys), digest
