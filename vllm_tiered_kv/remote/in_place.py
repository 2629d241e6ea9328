"""Blocks of ordinary memory, copied to and from where they lie in a daemon's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.native.cpu import BlockLayout, gather, scatter
from vllm_tiered_kv.remote.shared_memory import Reservation, SharedMemory

ByteRows = NDArray[np.uint8]
"""Blocks of one length, a row each; contiguous."""


def read_in_place(
    memory: SharedMemory, keys: Sequence[StoreKey], into: ByteRows, deadline: float
) -> int:
    """How many leading blocks were copied, each to its row; other rows may hold anything."""
    lent = memory.lend(keys, deadline)
    try:
        nbytes = into.shape[1]
        facts = zip(lent.leases, lent.lengths, strict=True)
        count = sum(1 for _ in takewhile(lambda fact: fact[0] and fact[1] == nbytes, facts))
        if not count:
            return 0
        offsets = int64_array(lent.offsets[:count])
        scatter(_layout(into), np.arange(count, dtype=np.int64), memory.arena.region, offsets)
        generations = np.array(lent.generations[:count], np.uint64)
        return count if memory.arena.have_generations(offsets, generations) else 0
    finally:
        lent.release()


def write_in_place(
    memory: SharedMemory,
    blocks: Sequence[tuple[StoreKey, StoreKey | None, int]],
    fill: Callable[[Mapping[int, Reservation]], None],
    deadline: float,
) -> list[PutResult]:
    """Stores blocks given as (key, parent, length), heads first. `fill` writes those for which
    there is room, which it gets by their indexes."""
    outcome = memory.reserve(blocks, deadline)
    places = {n: place for n, place in enumerate(outcome) if isinstance(place, Reservation)}
    try:
        fill(places)
    except BaseException:
        memory.abandon(places.values())
        raise
    sealed = iter(memory.seal(list(places.values()), deadline))
    return [next(sealed) if isinstance(place, Reservation) else place for place in outcome]


def copy_rows(memory: SharedMemory, rows: ByteRows, places: Mapping[int, Reservation]) -> None:
    """For `write_in_place`: the blocks are rows. One call for all of them."""
    if places:
        offsets = int64_array([place.offset for place in places.values()])
        gather(_layout(rows), int64_array(list(places)), memory.arena.region, offsets)


def _layout(rows: ByteRows) -> BlockLayout:
    count, nbytes = rows.shape
    return BlockLayout(
        np.array([rows.ctypes.data], np.uint64),
        int64_array([nbytes]),
        int64_array([nbytes]),
        int64_array([0]),
        count,
    )
