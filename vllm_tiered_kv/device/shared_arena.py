"""Memory that a daemon and the engines of its host map at once.

One memfd: a table of generations, then the slots. The daemon creates it and passes the descriptor
to processes that attach. Its size is sealed, so nobody can shrink it under another's feet; it lives
as long as anybody maps it, so a daemon that dies takes no engine with it.

A slot's generation is odd while it is written and grows with every use. Whoever copies out of a
slot it has leased compares the generation before and after: bytes that changed meanwhile are not
used.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.core.arena_geometry import aligned
from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.pinning import PIN_CHUNK_BYTES
from vllm_tiered_kv.device.sealed_memory import SEALS, create_sealed
from vllm_tiered_kv.errors import ArenaError
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.option_values import format_size

PAGE = 4096
"""Slots begin at multiples of this: what direct I/O asks for, and the grain of the table."""

_HUGE_PAGE = 2 << 20
_LAST_GENERATION = (1 << 64) - 1  # one follows that, too: who has mapped the table may write to it


class SharedArena:
    """`capacity_bytes` of slots at a fixed address. `close` is idempotent."""

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        """Takes the descriptor over. Use `create` or `attach`."""
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        try:
            self._map = mmap.mmap(fd, _file_bytes(capacity_bytes), mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"{format_size(capacity_bytes)} of shared memory cannot be mapped: {error.strerror}"
            ) from error
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._generations: np.ndarray | None = whole[: capacity_bytes // PAGE * 8].view(np.uint64)
        # For one at a time: as an array it takes several times as long.
        self._generation_at: memoryview | None = memoryview(self._generations.data)
        table = _table_bytes(capacity_bytes)
        self._slots: np.ndarray | None = whole[table : table + capacity_bytes]
        self.region = HostRegion(self._slots.ctypes.data, capacity_bytes, PIN_CHUNK_BYTES)
        self._view: memoryview | None = memoryview(self._slots.data)

    @classmethod
    def create(cls, capacity_bytes: int, huge_pages: bool = False) -> SharedArena:
        """Fresh memory. `huge_pages` takes them from the system's reserve, or fails."""
        capacity_bytes = capacity_bytes // PAGE * PAGE
        flags = os.MFD_HUGETLB if huge_pages else 0
        try:
            fd = create_sealed("tiered-kv-arena", _file_bytes(capacity_bytes), flags)
        except OSError as error:
            raise ArenaError(
                f"{format_size(capacity_bytes)} of shared memory cannot be had: {error.strerror}"
            ) from error
        try:
            return cls(fd, capacity_bytes)
        except ArenaError as error:
            if not huge_pages:
                raise
            raise ArenaError(
                f"{error}; are so many huge pages free (HugePages_Free in /proc/meminfo)? "
                "Reserve them with vm.nr_hugepages, or do without huge_pages"
            ) from error

    @classmethod
    def attach(cls, fd: int, capacity_bytes: int) -> SharedArena:
        """Maps an arena of another process. Takes the descriptor over."""
        wrong = None
        try:
            if capacity_bytes <= 0 or capacity_bytes % PAGE:
                wrong = f"an arena cannot have {capacity_bytes} bytes"
            elif os.fstat(fd).st_size != _file_bytes(capacity_bytes):
                wrong = f"the arena's size does not fit {capacity_bytes} bytes of slots"
            elif fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                wrong = "the arena could shrink while it is mapped"
        except OSError as error:
            wrong = f"the descriptor is not one of memory: {error.strerror}"
        if wrong is not None:
            os.close(fd)
            raise ArenaError(wrong)
        return cls(fd, capacity_bytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert self._view is not None, "the arena is closed"
        if not 0 <= offset <= offset + nbytes <= self.capacity_bytes:
            raise ArenaError(f"{nbytes} bytes at {offset} lie outside the arena")
        return self._view[offset : offset + nbytes]

    def views(self, offsets: Sequence[int], nbytes: int) -> list[memoryview]:
        """As `view`, of so many bytes at each."""
        whole = self._view
        assert whole is not None, "the arena is closed"
        if offsets and not 0 <= min(offsets) <= max(offsets) + nbytes <= self.capacity_bytes:
            raise ArenaError(f"{nbytes} bytes at {max(offsets)} lie outside the arena")
        return [whole[offset : offset + nbytes] for offset in offsets]

    def generation(self, offset: int) -> int:
        assert self._generation_at is not None, "the arena is closed"
        return int(self._generation_at[offset // PAGE])

    def have_generations(self, offsets: Int64Array, generations: npt.NDArray[np.uint64]) -> bool:
        """Whether the slots at these offsets are all still at these generations."""
        assert self._generations is not None, "the arena is closed"
        return bool(np.array_equal(self._generations[offsets // PAGE], generations))

    def next_generation(self, offset: int) -> int:
        """Only the daemon calls this."""
        return self.next_generations([offset])[0]

    def next_generations(self, offsets: Iterable[int]) -> list[int]:
        """As `next_generation`, of each."""
        table = self._generation_at
        assert table is not None, "the arena is closed"
        generations = []
        for offset in offsets:
            place = offset // PAGE
            table[place] = generation = (table[place] + 1) & _LAST_GENERATION
            generations.append(generation)
        return generations

    def begin_writing(self, offsets: Iterable[int]) -> list[int]:
        """The next generations of slots that are about to be written: odd ones, also where a slot
        was given up half-written before. Only the daemon calls this."""
        table = self._generation_at
        assert table is not None, "the arena is closed"
        generations = []
        for offset in offsets:
            place = offset // PAGE
            before = table[place]
            table[place] = generation = (before + 1 + before % 2) & _LAST_GENERATION
            generations.append(generation)
        return generations

    def renew(self, offset: int, nbytes: int) -> None:
        """Nothing that was leased there is valid any more. Only the daemon calls this."""
        assert self._generations is not None, "the arena is closed"
        self._generations[offset // PAGE : (offset + nbytes) // PAGE] += np.uint64(2)

    def close(self) -> None:
        if self._slots is None:
            return
        self._slots = self._generations = self._generation_at = self._view = None
        os.close(self.fd)
        # A caller still holding a view keeps the mapping alive; it goes with that view.
        with contextlib.suppress(BufferError):
            self._map.close()


def _table_bytes(capacity_bytes: int) -> int:
    return aligned(capacity_bytes // PAGE * 8, _HUGE_PAGE)


def _file_bytes(capacity_bytes: int) -> int:
    return _table_bytes(capacity_bytes) + aligned(capacity_bytes, _HUGE_PAGE)
