"""Fast traversal of linked lists of Python objects."""

from __future__ import annotations

from typing import Any

from vllm_tiered_kv.native import _cpu


def follow(first: Any, last: Any, next: str, wanted: str, most: int) -> list[Any]:
    """Returns the attribute `wanted` of `first` and of the objects that follow it by `next`.

    It stops before `last` and after `most` objects. The loop is native, because a Python loop over
    thousands of objects is slow.
    """
    return _cpu.follow(first, last, next, wanted, most)
