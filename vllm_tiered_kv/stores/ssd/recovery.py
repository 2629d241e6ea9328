"""Derives the live blocks from a journal, without reading the data.

The last record of a slot determines its content. If records were damaged, two blocks may claim the
same bytes, or one key two slots: the later record wins. If that is wrong, the checksum of the block
does not match when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.core.store import MAX_KEY_BYTES, NAMESPACE_BYTES
from vllm_tiered_kv.stores.namespaces import QuotaOf, owner_of
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
    """What recovery found in a folder, and what it dropped."""

    blocks: int = 0
    bytes: int = 0  # of those blocks
    records: int = 0  # valid records in the journal
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
    """The blocks of a folder in journal order: coldest first."""

    records: RecordArray
    classes: NDArray[np.int64]  # of each record; indices into `class_shapes`
    class_shapes: list[tuple[bytes, int]]  # (owner, slot bytes)

    def last_keys(self, count: int) -> list[bytes]:
        """Returns the keys of the last `count` blocks in the journal."""
        return _keys(self.records[-count:], "key", "key_bytes")


def live_blocks(
    contents: JournalContents,
    slab_bytes: int,
    data_bytes: int,
    report: RecoveryReport,
    quota_of: QuotaOf,
) -> LiveBlocks:
    """Returns the blocks in a data file of this size; `report` gets what was dropped."""
    report.records = len(contents.records)
    report.damaged_records = contents.damaged
    report.torn_bytes = contents.torn_bytes
    rows = _last_of_each(contents.records["slot"])
    records = _take(contents.records, rows)
    records = _filter(records, _is_plausible(records))
    puts = _filter(records, records["kind"] == PUT)
    puts = _within(puts, slab_bytes, data_bytes, report)
    classes, shapes = _classes(puts, quota_of)
    winners = _slab_winners(puts["slot"] // (slab_bytes // ALIGNMENT), classes)
    report.drop("two claims on one slab (damage, or a new quota)", int(np.count_nonzero(~winners)))
    puts, classes = _filter(puts, winners), classes[winners]
    latest = _last_of_each_key(puts)
    report.drop("two claims on one key (damage)", len(puts) - len(latest))
    puts, classes = _take(puts, latest), classes[latest]
    report.blocks, report.bytes = len(puts), int(puts["length"].sum(dtype=np.int64))
    return LiveBlocks(puts, classes, shapes)


def _filter(records: RecordArray, good: NDArray[np.bool_]) -> RecordArray:
    """Returns the good records; without a copy in the common case that all are."""
    return records if good.all() else records[good]


def _take(records: RecordArray, rows: NDArray[np.int64]) -> RecordArray:
    """Returns the records of these rows, which are in order; without a copy if these are all."""
    return records if len(rows) == len(records) else records[rows]


def _last_of_each_key(puts: RecordArray) -> NDArray[np.int64]:
    rows = np.arange(len(puts))
    if not len(puts):
        return rows
    hashes = key_hashes(puts)
    values, counts = np.unique(hashes, return_counts=True)
    if len(values) == len(hashes):
        return rows
    ambiguous = np.flatnonzero(np.isin(hashes, values[counts > 1]))
    keys = _keys(puts[ambiguous], "key", "key_bytes")
    last = dict(zip(keys, ambiguous.tolist(), strict=True))
    superseded = [
        row for key, row in zip(keys, ambiguous.tolist(), strict=True) if last[key] != row
    ]
    return np.delete(rows, superseded)


def _last_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the rows of the last occurrence of every value, in row order."""
    _, from_end = np.unique(values[::-1], return_index=True)
    rows: NDArray[np.int64] = np.sort(len(values) - 1 - from_end)
    return rows


def _is_plausible(records: RecordArray) -> NDArray[np.bool_]:
    """Guards against bugs of the writer; the checksums have been verified already."""
    plausible: NDArray[np.bool_] = (
        ((records["kind"] == DEL) | ((records["kind"] == PUT) & (records["length"] > 0)))
        & (records["key_bytes"] > 0)
        & (records["key_bytes"] <= MAX_KEY_BYTES)
        & (records["parent_bytes"] <= MAX_KEY_BYTES)
        & (records["slot"] < 1 << 62)
    )
    return plausible


def _slot_bytes(puts: RecordArray) -> NDArray[np.int64]:
    pages = -(-puts["length"].astype(np.int64) // ALIGNMENT)
    return pages * ALIGNMENT


def slot_ends(puts: RecordArray, slab_bytes: int) -> NDArray[np.int64]:
    """Returns the end of each block's slot in the data file."""
    slabs, positions = np.divmod(puts["slot"].astype(np.int64), slab_bytes // ALIGNMENT)
    ends: NDArray[np.int64] = slabs * slab_bytes + (positions + 1) * _slot_bytes(puts)
    return ends


def _within(
    puts: RecordArray, slab_bytes: int, data_bytes: int, report: RecoveryReport
) -> RecordArray:
    in_slab = puts["slot"].astype(np.int64) % (slab_bytes // ALIGNMENT)
    possible = (in_slab + 1) * _slot_bytes(puts) <= slab_bytes
    present = slot_ends(puts, slab_bytes) <= data_bytes
    reason = "beyond the end of the data file" if data_bytes else "the data file is missing"
    report.drop(reason, int(np.count_nonzero(possible & ~present)))
    report.drop("invalid slots", int(np.count_nonzero(~possible)))
    return _filter(puts, possible & present)


def _classes(
    puts: RecordArray, quota_of: QuotaOf
) -> tuple[NDArray[np.int64], list[tuple[bytes, int]]]:
    """Numbers the distinct pairs of owner and slot size; returns the number of each record."""
    if not len(puts):
        return np.empty(0, np.int64), []
    heads = np.ascontiguousarray(rows_of(puts).keys[:, :NAMESPACE_BYTES])
    words = heads.view(np.uint64)
    number = np.zeros(len(puts), np.int64)
    for column in (words[:, 0], words[:, 1], _slot_bytes(puts)):
        if (column == column[0]).all():
            continue  # the common case: one model, blocks of one length
        values, inverse = np.unique(column, return_inverse=True)
        _, number = np.unique(number * len(values) + inverse, return_inverse=True)
    _, first = np.unique(number, return_index=True)
    sizes = _slot_bytes(puts[first])
    owners = [owner_of(key, quota_of) for key in _keys(puts[first], "key", "key_bytes")]
    named = list(zip(owners, sizes.tolist(), strict=True))
    shapes = list(dict.fromkeys(named))
    merged = {shape: n for n, shape in enumerate(shapes)}
    return np.array([merged[shape] for shape in named], np.int64)[number], shapes


def _slab_winners(slabs: NDArray[np.uint64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which blocks have the same class as the last record in their slab."""
    _, inverse = np.unique(slabs, return_inverse=True)
    last_class = np.zeros(inverse.max(initial=-1) + 1, np.int64)
    last_class[inverse] = classes  # for repeated indices the last assignment wins
    winners: NDArray[np.bool_] = classes == last_class[inverse]
    return winners


def _keys(records: RecordArray, name: str, lengths: str) -> list[bytes]:
    blob = np.ascontiguousarray(records[name]).tobytes()
    starts = range(0, len(blob), MAX_KEY_BYTES)
    sizes = records[lengths].tolist()
    return [blob[start : start + size] for start, size in zip(starts, sizes, strict=True)]
