"""From a journal to the blocks it says are there, without reading the data.

The last record of a slot says what is in it. Where damage has eaten records, two blocks may claim
the same bytes, or one block two slots: the later claim wins. A claim that is wrong all the same is
found when the block is read: its checksum does not match.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import MAX_KEY_BYTES, NAMESPACE_BYTES
from vllm_tiered_kv.stores.namespaces import HasQuota, owner_of
from vllm_tiered_kv.stores.ssd.journal import JournalContents
from vllm_tiered_kv.stores.ssd.record_format import (
    ALIGNMENT,
    DEL,
    PUT,
    RecordArray,
    key_hashes,
    rows_of,
)


@dataclass
class RecoveryReport:
    """What opening a folder found, and what it gave up."""

    blocks: int = 0
    bytes: int = 0  # of those blocks
    records: int = 0  # valid ones in the journal
    damaged_records: int = 0
    torn_bytes: int = 0  # cut from the end of the journal
    dropped: dict[str, int] = field(default_factory=dict)  # blocks, by reason
    seconds: float = 0.0

    def drop(self, reason: str, blocks: int) -> None:
        if blocks:
            self.dropped[reason] = self.dropped.get(reason, 0) + blocks

    def __str__(self) -> str:
        text = f"recovered {self.blocks} blocks ({self.bytes} bytes) in {self.seconds:.2f} s"
        losses = [f"{count} blocks dropped: {why}" for why, count in self.dropped.items()]
        if self.damaged_records:
            losses.append(f"{self.damaged_records} damaged journal records skipped")
        if self.torn_bytes:
            losses.append(f"{self.torn_bytes} bytes of a torn journal tail cut")
        return "; ".join([text, *losses])


@dataclass(frozen=True)
class LiveBlocks:
    """In journal order: coldest first."""

    records: RecordArray
    classes: NDArray[np.int64]  # of each record; indices into `class_shapes`
    class_shapes: list[tuple[bytes, int]]  # (owner, slot bytes)

    def last_keys(self, count: int) -> list[bytes]:
        """Of the blocks that were written last."""
        return _keys(self.records[-count:], "key", "key_bytes")


def live_blocks(
    contents: JournalContents,
    slab_bytes: int,
    data_bytes: int,
    report: RecoveryReport,
    has_quota: HasQuota,
) -> LiveBlocks:
    """The blocks in a data file of this size, and in `report` what is not."""
    report.records = len(contents.records)
    report.damaged_records = contents.damaged
    report.torn_bytes = contents.torn_bytes
    rows = _last_of_each(contents.records["slot"])
    records = _chosen(contents.records, rows)
    records = _where(records, _is_sane(records))
    puts = _where(records, records["kind"] == PUT)
    puts = _within(puts, slab_bytes, data_bytes, report)
    classes, shapes = _classes(puts, has_quota)
    winners = _slab_winners(puts["slot"] // (slab_bytes // ALIGNMENT), classes)
    report.drop("two claims on one slab: damage, or a new quota", int(np.count_nonzero(~winners)))
    puts, classes = _where(puts, winners), classes[winners]
    latest = _last_of_each_key(puts)
    report.drop("damage left two claims on one key", len(puts) - len(latest))
    puts, classes = _chosen(puts, latest), classes[latest]
    report.blocks, report.bytes = len(puts), int(puts["length"].sum(dtype=np.int64))
    return LiveBlocks(puts, classes, shapes)


def _where(records: RecordArray, good: NDArray[np.bool_]) -> RecordArray:
    """Those that are good; mostly all are, and copying them takes time."""
    return records if good.all() else records[good]


def _chosen(records: RecordArray, rows: NDArray[np.int64]) -> RecordArray:
    """Of rows in order."""
    return records if len(rows) == len(records) else records[rows]


def _last_of_each_key(puts: RecordArray) -> NDArray[np.int64]:
    rows = np.arange(len(puts))
    if not len(puts):
        return rows
    hashes = key_hashes(puts)
    values, counts = np.unique(hashes, return_counts=True)
    if len(values) == len(hashes):
        return rows
    in_doubt = np.flatnonzero(np.isin(hashes, values[counts > 1]))
    keys = _keys(puts[in_doubt], "key", "key_bytes")
    last = dict(zip(keys, in_doubt.tolist(), strict=True))
    beaten = [row for key, row in zip(keys, in_doubt.tolist(), strict=True) if last[key] != row]
    return np.delete(rows, beaten)


def _last_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Rows of the last occurrence of every value, in row order."""
    _, from_end = np.unique(values[::-1], return_index=True)
    rows: NDArray[np.int64] = np.sort(len(values) - 1 - from_end)
    return rows


def _is_sane(records: RecordArray) -> NDArray[np.bool_]:
    """Checksums have passed; this only keeps a writer's mistake from becoming a reader's."""
    sane: NDArray[np.bool_] = (
        ((records["kind"] == DEL) | ((records["kind"] == PUT) & (records["length"] > 0)))
        & (records["key_bytes"] > 0)
        & (records["key_bytes"] <= MAX_KEY_BYTES)
        & (records["parent_bytes"] <= MAX_KEY_BYTES)
        & (records["slot"] < 1 << 62)
    )
    return sane


def _slot_bytes(puts: RecordArray) -> NDArray[np.int64]:
    pages = -(-puts["length"].astype(np.int64) // ALIGNMENT)
    return pages * ALIGNMENT


def slot_ends(puts: RecordArray, slab_bytes: int) -> NDArray[np.int64]:
    """Where in the data file each block's slot ends."""
    slabs, positions = np.divmod(puts["slot"].astype(np.int64), slab_bytes // ALIGNMENT)
    ends: NDArray[np.int64] = slabs * slab_bytes + (positions + 1) * _slot_bytes(puts)
    return ends


def _within(
    puts: RecordArray, slab_bytes: int, data_bytes: int, report: RecoveryReport
) -> RecordArray:
    in_slab = puts["slot"].astype(np.int64) % (slab_bytes // ALIGNMENT)
    possible = (in_slab + 1) * _slot_bytes(puts) <= slab_bytes
    present = slot_ends(puts, slab_bytes) <= data_bytes
    reason = "the data file ends before them" if data_bytes else "the data file is missing"
    report.drop(reason, int(np.count_nonzero(possible & ~present)))
    report.drop("impossible slots", int(np.count_nonzero(~possible)))
    return _where(puts, possible & present)


def _classes(
    puts: RecordArray, has_quota: HasQuota
) -> tuple[NDArray[np.int64], list[tuple[bytes, int]]]:
    """Numbers the (owner, slot bytes) that occur."""
    if not len(puts):
        return np.empty(0, np.int64), []
    heads = np.ascontiguousarray(rows_of(puts).keys[:, :NAMESPACE_BYTES])
    words = heads.view(np.uint64)
    number = np.zeros(len(puts), np.int64)
    for column in (words[:, 0], words[:, 1], _slot_bytes(puts)):
        if (column == column[0]).all():
            continue  # mostly: one model, blocks of one length
        values, inverse = np.unique(column, return_inverse=True)
        _, number = np.unique(number * len(values) + inverse, return_inverse=True)
    _, first = np.unique(number, return_index=True)
    sizes = _slot_bytes(puts[first])
    owners = [owner_of(key, has_quota) for key in _keys(puts[first], "key", "key_bytes")]
    named = list(zip(owners, sizes.tolist(), strict=True))
    shapes = list(dict.fromkeys(named))
    merged = {shape: n for n, shape in enumerate(shapes)}
    return np.array([merged[shape] for shape in named], np.int64)[number], shapes


def _slab_winners(slabs: NDArray[np.uint64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Blocks whose class is that of the last record in their slab."""
    _, inverse = np.unique(slabs, return_inverse=True)
    last_class = np.zeros(inverse.max(initial=-1) + 1, np.int64)
    last_class[inverse] = classes  # of repeated indices the last assignment stays
    winners: NDArray[np.bool_] = classes == last_class[inverse]
    return winners


def _keys(records: RecordArray, name: str, lengths: str) -> list[bytes]:
    blob = np.ascontiguousarray(records[name]).tobytes()
    starts = range(0, len(blob), MAX_KEY_BYTES)
    sizes = records[lengths].tolist()
    return [blob[start : start + size] for start, size in zip(starts, sizes, strict=True)]
