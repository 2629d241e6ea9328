"""Memory that a daemon and the engines of its host share.

It is one memfd: a table of generations, followed by the slots. The daemon creates it and passes the
descriptor to processes that attach. Its size is sealed, so no process can crash another by
shrinking it. It exists as long as a process maps it, so the end of a daemon does not crash engines.

A slot's generation is odd while the slot is being written and increases with every use. A process
that copies from a leased slot compares the generation before and after the copy, and discards bytes
that changed meanwhile.
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
from vllm_tiered_kv.options import format_size

PAGE = 4096
"""Slots start at multiples of this: direct I/O requires it, and the table has an entry per page."""

_HUGE_PAGE = 2 << 20
_LAST_GENERATION = (1 << 64) - 1  # wraps around: an attached process may have written any value


class SharedArena:
    """Shared slots: a daemon creates them, engines of its host attach to them.

    Engines read from any thread. In the daemon, the owner of the slots serializes changes of the
    generations. `close` is idempotent.
    """

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        """Takes ownership of the descriptor. Use `create` or `attach`."""
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        try:
            self._map = mmap.mmap(fd, _file_bytes(capacity_bytes), mmap.MAP_SHARED)
        except OSError as error:
            os.close(fd)
            raise ArenaError(
                f"cannot map {format_size(capacity_bytes)} of shared memory: {error.strerror}"
            ) from error
        with contextlib.suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self._generations: np.ndarray | None = whole[: capacity_bytes // PAGE * 8].view(np.uint64)
        # For single entries a memoryview is several times as fast as a numpy array.
        self._generation_at: memoryview | None = memoryview(self._generations.data)
        table = _table_bytes(capacity_bytes)
        self._slots: np.ndarray | None = whole[table : table + capacity_bytes]
        self.region = HostRegion(self._slots.ctypes.data, capacity_bytes, PIN_CHUNK_BYTES)
        self._view: memoryview | None = memoryview(self._slots.data)

    @classmethod
    def create(cls, capacity_bytes: int, huge_pages: bool = False) -> SharedArena:
        """Creates new memory. `huge_pages` takes it from the reserved huge pages, or fails."""
        capacity_bytes = capacity_bytes // PAGE * PAGE
        flags = os.MFD_HUGETLB if huge_pages else 0
        try:
            fd = create_sealed("tiered-kv-arena", _file_bytes(capacity_bytes), flags)
        except OSError as error:
            raise ArenaError(
                f"cannot create {format_size(capacity_bytes)} of shared memory: {error.strerror}"
            ) from error
        try:
            return cls(fd, capacity_bytes)
        except ArenaError as error:
            if not huge_pages:
                raise
            raise ArenaError(
                f"{error}; check HugePages_Free in /proc/meminfo. Reserve enough huge pages with "
                "vm.nr_hugepages, or turn huge_pages off"
            ) from error

    @classmethod
    def attach(cls, fd: int, capacity_bytes: int) -> SharedArena:
        """Maps an arena of another process. Takes ownership of the descriptor."""
        wrong = None
        try:
            if capacity_bytes <= 0 or capacity_bytes % PAGE:
                wrong = f"{capacity_bytes} bytes are not a valid size of an arena"
            elif os.fstat(fd).st_size != _file_bytes(capacity_bytes):
                wrong = f"the memory has the wrong size for {capacity_bytes} bytes of slots"
            elif fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                wrong = "the size of the memory is not sealed"
        except OSError as error:
            wrong = f"the descriptor is not shared memory: {error.strerror}"
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
        """Like `view`, for equally long views at several offsets."""
        whole = self._view
        assert whole is not None, "the arena is closed"
        if offsets and not 0 <= min(offsets) <= max(offsets) + nbytes <= self.capacity_bytes:
            raise ArenaError(f"{nbytes} bytes at {max(offsets)} lie outside the arena")
        return [whole[offset : offset + nbytes] for offset in offsets]

    def generation(self, offset: int) -> int:
        assert self._generation_at is not None, "the arena is closed"
        return int(self._generation_at[offset // PAGE])

    def have_generations(self, offsets: Int64Array, generations: npt.NDArray[np.uint64]) -> bool:
        """Returns whether all slots at these offsets still have these generations."""
        assert self._generations is not None, "the arena is closed"
        return bool(np.array_equal(self._generations[offsets // PAGE], generations))

    def next_generation(self, offset: int) -> int:
        """Increments a slot's generation and returns it. Only the daemon calls this."""
        return self.next_generations([offset])[0]

    def next_generations(self, offsets: Iterable[int]) -> list[int]:
        """Like `next_generation`, for several slots."""
        table = self._generation_at
        assert table is not None, "the arena is closed"
        generations = []
        for offset in offsets:
            page = offset // PAGE
            table[page] = generation = (table[page] + 1) & _LAST_GENERATION
            generations.append(generation)
        return generations

    def begin_writing(self, offsets: Iterable[int]) -> list[int]:
        """Sets and returns odd generations for slots that are about to be written.

        The generation is odd even if an earlier write of the slot was abandoned. Only the daemon
        calls this.
        """
        table = self._generation_at
        assert table is not None, "the arena is closed"
        generations = []
        for offset in offsets:
            page = offset // PAGE
            before = table[page]
            table[page] = generation = (before + 1 + before % 2) & _LAST_GENERATION
            generations.append(generation)
        return generations

    def renew(self, offset: int, nbytes: int) -> None:
        """Invalidates all leases of slots in this range. Only the daemon calls this."""
        assert self._generations is not None, "the arena is closed"
        self._generations[offset // PAGE : (offset + nbytes) // PAGE] += np.uint64(2)

    def close(self) -> None:
        if self._slots is None:
            return
        self._slots = self._generations = self._generation_at = self._view = None
        os.close(self.fd)
        # A view that a caller still holds keeps the mapping alive until the view is released.
        with contextlib.suppress(BufferError):
            self._map.close()


def _table_bytes(capacity_bytes: int) -> int:
    return aligned(capacity_bytes // PAGE * 8, _HUGE_PAGE)


def _file_bytes(capacity_bytes: int) -> int:
    return _table_bytes(capacity_bytes) + aligned(capacity_bytes, _HUGE_PAGE)
