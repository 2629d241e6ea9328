"""One block on its way to or from its slot."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.store import PutItem, PutResult


@dataclass
class BlockWrite:
    position: int  # in its batch
    item: PutItem
    payload: memoryview
    slot: int
    checksum: int = 0
    result: PutResult = PutResult.FAILED
    retire: bool = False  # the slot cannot be written
    is_readable: bool = False


@dataclass
class BlockRead:
    position: int
    slot: int
    key: bytes
    length: int
    checksum: int
    into: memoryview
    ended: bool = False  # only then the rest means anything
    good: bool = False
    refused: bool = False  # by the disk


def as_bytes(view: memoryview) -> memoryview:
    """The same memory byte by byte; TypeError where it has gaps."""
    if not view.c_contiguous:
        raise TypeError("a block must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
