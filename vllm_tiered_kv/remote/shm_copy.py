"""Copies blocks between this process's own memory and a daemon's shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.transfer import int64_array
from vllm_tiered_kv.native.cpu import BlockLayout, copy_and_hash, copy_bytes, gather, scatter
from vllm_tiered_kv.remote.shared_memory import Reservation, SharedMemory

ByteRows = NDArray[np.uint8]
"""Blocks of one length, one per row; contiguous."""


def read_rows(
    memory: SharedMemory, keys: Sequence[StoreKey], into: ByteRows, deadline: float
) -> int:
    """Copies leading blocks, each to its row, and returns how many; other rows are undefined."""
    lease = memory.lease(keys, deadline)
    try:
        nbytes = into.shape[1]
        facts = zip(lease.leases, lease.lengths, strict=True)
        count = sum(1 for _ in takewhile(lambda fact: fact[0] and fact[1] == nbytes, facts))
        if not count:
            return 0
        offsets = int64_array(lease.offsets[:count])
        scatter(_layout(into), np.arange(count, dtype=np.int64), memory.arena.region, offsets)
        generations = np.array(lease.generations[:count], np.uint64)
        return count if memory.arena.have_generations(offsets, generations) else 0
    finally:
        lease.release()


def read_block(memory: SharedMemory, key: StoreKey, into: memoryview, deadline: float) -> bool:
    """Copies one block; False if the daemon does not have it in memory."""
    lease = memory.lease([key], deadline)
    try:
        if not lease.is_complete or list(lease.lengths) != [into.nbytes]:
            return False
        copy_bytes(into, memory.arena.view(lease.offsets[0], into.nbytes))
        return memory.are_still_valid(lease)
    finally:
        lease.release()


def write_blocks(
    memory: SharedMemory,
    blocks: Sequence[tuple[StoreKey, StoreKey | None, int]],
    fill: Callable[[Mapping[int, Reservation]], None],
    deadline: float,
) -> list[PutResult]:
    """Stores blocks given as (key, parent, length), parents first. `fill` writes the blocks for
    which the daemon reserved slots; it gets the reservations by the index of the block."""
    outcome = memory.reserve(blocks, deadline)
    places = {n: place for n, place in enumerate(outcome) if isinstance(place, Reservation)}
    try:
        fill(places)
    except BaseException:
        memory.abandon(places.values())
        raise
    sealed = iter(memory.seal(list(places.values()), deadline))
    return [next(sealed) if isinstance(place, Reservation) else place for place in outcome]


def write_items(memory: SharedMemory, items: Sequence[PutItem], deadline: float) -> list[PutResult]:
    """Stores blocks, parents first."""

    def fill(places: Mapping[int, Reservation]) -> None:
        # One native call for all blocks: re-acquiring the GIL after each block would take longer
        # than its copy while an engine is busy.
        views = [memory.arena.view(place.offset, place.nbytes) for place in places.values()]
        copy_and_hash(views, [items[index].payload for index in places])

    blocks = [(item.key, item.parent, item.payload.nbytes) for item in items]
    return write_blocks(memory, blocks, fill, deadline)


def copy_rows(memory: SharedMemory, rows: ByteRows, places: Mapping[int, Reservation]) -> None:
    """Fills reservations from rows, for `write_blocks`, in one native call."""
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
