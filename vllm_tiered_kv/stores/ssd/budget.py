"""Divides the capacity among data, journal, and metadata of the file system.

`capacity_bytes` bounds everything in the folder at all times. While the journal is compacted, the
old and the new file exist side by side, so a block may take three records: one in the new file and
two in the old one, which is compacted before it grows further. This limits the number of blocks;
with 1/128 of the capacity for the journal, the limit matters only for blocks that are smaller than
64 KiB on average.
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
_EXTENT_BYTES = 24  # metadata of the file system: a block may split an extent in two
_FIXED_BYTES = 8 * ALIGNMENT  # FORMAT and its successor, LOCK, the folder, ends of files
_SMALL_SLAB = 64 << 20


@dataclass(frozen=True)
class Budget:
    """The shares of the capacity of one store."""

    capacity_bytes: int
    slab_bytes: int
    num_slabs: int
    max_blocks: int

    @classmethod
    def divide(cls, capacity_bytes: int, slab_bytes: int | None) -> Budget:
        """Divides the capacity. `slab_bytes` is that of an existing folder, or None."""
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
        # The remainder that does not fill a slab goes to the journal.
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
    """Chooses a slab size that fits very large blocks, but gives even a small store several slabs.

    The size is then reduced a little, so that whole slabs fill the space.
    """
    wanted = max(default_slab(data_bytes, ALIGNMENT), min(data_bytes // 8, _SMALL_SLAB))
    slabs = -(-data_bytes // wanted)
    return data_bytes // slabs // ALIGNMENT * ALIGNMENT
