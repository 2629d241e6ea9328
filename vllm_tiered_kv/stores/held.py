"""A block that stays where it lies in the daemon's memory, as long as somebody uses it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from vllm_tiered_kv.core.store import StoreKey


class Held(NamedTuple):
    """A slot that stays where it is: pinned for reading, or reserved for writing.

    A tuple: every block that is put makes two, and a dataclass takes several times as long.
    """

    key: StoreKey
    parent: StoreKey | None
    slot: int
    offset: int  # in the arena
    nbytes: int
    generation: int
    checksum: int  # of a readable block; 0 while it is written
    view: memoryview


make_held: Callable[[tuple[object, ...]], Held] = functools.partial(tuple.__new__, Held)
"""What `Held` calls, without a step of Python's on the way."""
