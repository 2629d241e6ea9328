"""Fitting a folder into less space than it was filled with: the coldest leave, the rest move.

Blocks beyond the new end of the data file are copied into slots before it. The order survives a
crash at any point: first a journal without the blocks that leave is made durable, only then are
their slots written; a second journal tells of the moves when the copies are durable; only then is
the file cut. A crash in between leaves a folder that is shrunk again when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vllm_tiered_kv.cache.durable_index import DurableIndex
from vllm_tiered_kv.cache.slots import SlotPool
from vllm_tiered_kv.core.arena_geometry import SlabGeometry
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.stores.ssd.budget import Budget
from vllm_tiered_kv.stores.ssd.data_file import DataFile
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, decode, rows_of
from vllm_tiered_kv.stores.ssd.recovery import LiveBlocks, RecoveryReport

LEFT = "the space was made smaller"
_PROGRESS_BLOCKS = 1000


def fits(live: LiveBlocks, budget: Budget) -> bool:
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    last = int(live.records["slot"].max(initial=0))
    return last < budget.num_slabs * slots_per_slab and len(live.records) <= budget.max_blocks


def geometry_for(live: LiveBlocks, num_slabs: int, slab_bytes: int) -> SlabGeometry:
    geometry = SlabGeometry(num_slabs * slab_bytes, slab_bytes, ALIGNMENT)
    for _, slot_bytes in live.class_shapes:
        geometry.add_class(slot_bytes)
    return geometry


def choose_survivors(live: LiveBlocks, budget: Budget, report: RecoveryReport) -> LiveBlocks:
    """What can stay: the coldest leaves of all chains go first."""
    slots_per_slab = budget.slab_bytes // ALIGNMENT
    old_slabs = int(live.records["slot"].max(initial=0)) // slots_per_slab + 1
    gone: set[int] = set()
    geometry = geometry_for(live, old_slabs, budget.slab_bytes)
    index = DurableIndex(geometry, "lru", on_leave=gone.add)
    index.restore_rows(rows_of(live.records), live.classes)
    slots = live.records["slot"].tolist()
    class_of = dict(zip(slots, live.classes.tolist(), strict=True))
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
    return select(live, [slot in class_of for slot in slots])


def _slabs(counts: list[int], per_slab: list[int]) -> int:
    return sum(-(-count // per) for count, per in zip(counts, per_slab, strict=True))


def select(live: LiveBlocks, stays: list[bool]) -> LiveBlocks:
    chosen = np.array(stays, np.bool_)
    return replace(live, records=live.records[chosen], classes=live.classes[chosen])


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
    records = live.records.copy()
    inside = records["slot"] < end
    pool.adopt(records["slot"][inside].tolist(), live.classes[inside].tolist())
    outside = np.flatnonzero(~inside).tolist()
    stays = [True] * len(records)
    for done, row in enumerate(reversed(outside)):
        if done % _PROGRESS_BLOCKS == 0:
            progress(f"moving blocks: {done} of {len(outside)}")
        size_class = int(live.classes[row])
        target = pool.allocate(size_class)
        if target is None:
            stays[row] = False
            report.drop(LEFT, 1)
            continue
        old = decode(records[row].tobytes())
        block = memoryview(bytearray(old.length))
        try:
            data.read(geometry.offset(old.slot, size_class), block)
            good = cpu.xxh3_64(block) == old.payload_checksum
            if good:
                data.write(geometry.offset(target, size_class), block)
        except OSError:
            good = False
        if not good:
            stays[row] = False
            pool.release(target)
            report.drop("could not be moved", 1)
            continue
        records[row]["slot"] = target
    return select(replace(live, records=records), stays)
