"""Blocks that are to be stored, cut into runs that can be handled in one step."""

from __future__ import annotations

import itertools
from typing import TypeAlias

from vllm_tiered_kv.core.store import NAMESPACE_BYTES, StoreKey

NewBlock: TypeAlias = tuple[StoreKey, StoreKey | None, int]
"""Key, parent and length."""


def kind_of(block: NewBlock) -> tuple[bytes, int]:
    """Blocks of one kind find room in the same places."""
    key, _, nbytes = block
    return key[:NAMESPACE_BYTES], nbytes


def alike(blocks: list[NewBlock]) -> list[list[NewBlock]]:
    """Cut where the namespace or the length changes."""
    if len({(key[:NAMESPACE_BYTES], nbytes) for key, _, nbytes in blocks}) == 1:
        return [blocks]
    return [list(run) for _, run in itertools.groupby(blocks, kind_of)]
