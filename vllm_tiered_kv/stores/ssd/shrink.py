"""Fitting a folder into less space than it was filled with: the coldest leave, the rest move.

Blocks beyond the new end of the data file are copied into slots before it. The order survives a
crash at any point: first a journal without the blocks that leave is made durable, only then are
their slots written; a second journal tells of the moves when the copies are durable; only then is
the file cut. A crash in between leaves a folder that is shrunk again when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import compress

import numpy as np

from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.cache.slots import SlotPool
from vllm_tiered_kv.core.arena_geometry import SlabGeometry
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.data_file import DataFile
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, decode, encode_put
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks, RecoveryReport

LEFT = "the space was made smaller"
_PROGRESS_BLOCKS = 1000


def fits(live: LiveBlocks, budget: Budget) -> bool:
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    last = max(live.slots, default=0)
    return last < budget.num_slabs * slots_per_slab and len(live.slots) <= budget.max_blocks


def geometry_for(live: LiveBlocks, num_slabs: int, slab_bytes: int) -> SlabGeometry:
    geometry = SlabGeometry(num_slabs * slab_bytes, slab_bytes, ALIGNMENT)
    for _, slot_bytes in live.class_shapes:
        geometry.add_class(slot_bytes)
    return geometry


def choose_survivors(live: LiveBlocks, budget: Budget, report: RecoveryReport) -> LiveBlocks:
    """What can stay: the coldest leaves of all chains go first."""
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    old_slabs = max(live.slots, default=0) // slots_per_slab + 1
    gone: set[int] = set()
    geometry = geometry_for(live, old_slabs, budget.slab_bytes)
    index = DurableIndex(geometry, "lru", on_leave=gone.add)
    index.restore(live.keys, live.parents, live.slots, live.classes)
    class_of = dict(zip(live.slots, live.classes, strict=True))
    per_slab = [geometry.slots_in_slab(c) for c in range(len(live.class_shapes))]
    counts = np.bincount(live.classes, minlength=len(per_slab)).tolist()
    left = 0
    while _slabs(counts, per_slab) > budget.num_slabs or sum(counts) > budget.max_blocks:
        index.evict_coldest()
        for slot in gone:
            counts[class_of.pop(slot)] -= 1
            left += 1
        gone.clear()
    report.drop(LEFT, left)
    keep = [row for row, slot in enumerate(live.slots) if slot in class_of]
    return select(live, keep)


def _slabs(counts: list[int], per_slab: list[int]) -> int:
    return sum(-(-count // per) for count, per in zip(counts, per_slab, strict=True))


def select(live: LiveBlocks, rows: list[int]) -> LiveBlocks:
    return replace(
        live,
        records=[live.records[row] for row in rows],
        keys=[live.keys[row] for row in rows],
        parents=[live.parents[row] for row in rows],
        slots=[live.slots[row] for row in rows],
        lengths=live.lengths[rows],
        classes=[live.classes[row] for row in rows],
    )


def move_inside(
    live: LiveBlocks,
    budget: Budget,
    data: DataFile,
    report: RecoveryReport,
    progress: Callable[[str], None],
) -> LiveBlocks:
    """Copies blocks from beyond the end to free slots before it, the hottest first."""
    geometry = geometry_for(live, budget.num_slabs, budget.slab_bytes)
    pool = SlotPool(geometry)
    end = budget.num_slabs * geometry.slots_per_slab
    rows = range(len(live.slots))
    inside = [slot < end for slot in live.slots]
    pool.adopt(list(compress(live.slots, inside)), list(compress(live.classes, inside)))
    records, slots = list(live.records), list(live.slots)
    outside = [row for row in rows if live.slots[row] >= end]
    lost: set[int] = set()
    for done, row in enumerate(reversed(outside)):
        if done % _PROGRESS_BLOCKS == 0:
            progress(f"moving blocks: {done} of {len(outside)}")
        size_class = live.classes[row]
        target = pool.allocate(size_class)
        if target is None:
            lost.add(row)
            report.drop(LEFT, 1)
            continue
        old = decode(live.records[row])
        block = memoryview(bytearray(old.length))
        try:
            data.read(geometry.offset(old.slot, size_class), block)
            good = cpu.xxh3_64(block) == old.payload_checksum
            if good:
                data.write(geometry.offset(target, size_class), block)
        except OSError:
            good = False
        if not good:
            lost.add(row)
            pool.release(target)
            report.drop("could not be moved", 1)
            continue
        records[row] = encode_put(old.key, old.parent, target, old.length, old.payload_checksum)
        slots[row] = target
    moved = replace(live, records=records, slots=slots)
    return select(moved, [row for row in rows if row not in lost])
