"""How the capacity is divided: data, journal, and what the file system needs to know about both.

`capacity_bytes` bounds everything in the folder at every instant. While the journal is compacted
the old and the new file exist side by side, so a block may cost three records: one in the new
file and two in the old, which is compacted before it grows beyond that. The number of blocks is
bounded accordingly; at the index's share of 1/128 it is reached only by blocks that are smaller
than 64 KiB on average.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.core.arena_geometry import default_slab
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.stores.ssd.record_format import ALIGNMENT, HEADER_COPIES, RECORD_BYTES

MIN_CAPACITY = 160 << 10
_INDEX_SHARE = 128
_SMALL_INDEX = 128 << 10
_EXTENT_BYTES = 24  # a block may split an extent in two: metadata of the file system
_FIXED_BYTES = 8 * ALIGNMENT  # FORMAT and its successor, LOCK, the folder, ends of files
_SMALL_SLAB = 64 << 20


@dataclass(frozen=True)
class Budget:
    """Exact shares of one capacity."""

    capacity_bytes: int
    slab_bytes: int
    num_slabs: int
    max_blocks: int

    @classmethod
    def divide(cls, capacity_bytes: int, slab_bytes: int | None) -> Budget:
        """`slab_bytes` of an existing folder, or None to choose."""
        if capacity_bytes < MIN_CAPACITY:
            raise ConfigError("ssd_space", f"must be at least {format_size(MIN_CAPACITY)}")
        index = max(capacity_bytes // _INDEX_SHARE, min(capacity_bytes // 4, _SMALL_INDEX))
        data = capacity_bytes - index
        slab = slab_bytes or choose_slab(data)
        if data < slab:
            raise ConfigError(
                "ssd_space",
                f"{format_size(capacity_bytes)} cannot hold one slab of {format_size(slab)}; the "
                "slab size was fixed when the folder was made: give more space or another folder",
            )
        # What does not fill a slab is the index's.
        index += data % slab
        blocks = (index - _FIXED_BYTES) // (3 * RECORD_BYTES + _EXTENT_BYTES)
        return cls(capacity_bytes, slab, data // slab, blocks)

    @property
    def data_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def max_journal_records(self) -> int:
        return HEADER_COPIES + 2 * self.max_blocks


def choose_slab(data_bytes: int) -> int:
    """Large enough for the largest block anybody has, yet several even in a small store.

    Slabs are made a little smaller than that, so that they fill the space.
    """
    wished = max(default_slab(data_bytes, ALIGNMENT), min(data_bytes // 8, _SMALL_SLAB))
    slabs = -(-data_bytes // wished)
    return data_bytes // slabs // ALIGNMENT * ALIGNMENT
