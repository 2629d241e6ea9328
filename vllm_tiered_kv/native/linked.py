"""Lists of objects that name the next one each."""

from __future__ import annotations

from typing import Any

from vllm_tiered_kv.native import _cpu


def follow(first: Any, last: Any, next: str, wanted: str, most: int) -> list[Any]:
    """The attribute `wanted` of `first` and those that follow it by the attribute `next`, at most
    so many and up to `last`, which does not count; without a step of the interpreter for each."""
    return _cpu.follow(first, last, next, wanted, most)
