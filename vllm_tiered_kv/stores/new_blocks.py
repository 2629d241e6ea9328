"""Blocks that are to be stored, cut into runs that can be handled in one step."""

from __future__ import annotations

import itertools
from typing import TypeAlias

from vllm_tiered_kv.core.store import NAMESPACE_BYTES, StoreKey

NewBlock: TypeAlias = tuple[StoreKey, StoreKey | None, int]
"""Key, parent and length."""


def alike(blocks: list[NewBlock]) -> list[list[NewBlock]]:
    """Cut where the namespace or the length changes."""
    if len({(key[:NAMESPACE_BYTES], nbytes) for key, _, nbytes in blocks}) == 1:
        return [blocks]
    runs = itertools.groupby(blocks, lambda block: (block[0][:NAMESPACE_BYTES], block[2]))
    return [list(run) for _, run in runs]
