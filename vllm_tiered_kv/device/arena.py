"""The memory of the CPU tier: one mapping, which a background thread pins if there is a GPU.

Pinning proceeds from the lowest address to the highest. Slots are allocated in the same order, so
the tier is usable from the start; slots beyond `ready_bytes` are not used yet.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vllm_tiered_kv.device.pinning import PIN_CHUNK_BYTES, BackgroundPinner, Pin, Unpin
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.options import format_size


class Arena:
    """The memory that holds the blocks of one worker's CPU tier.

    The worker creates it at start and closes it at shutdown; copy threads only read its fields.
    `close` is idempotent, unpins and unmaps the memory.
    """

    def __init__(
        self,
        nbytes: int,
        pin: Pin | None = None,
        unpin: Unpin | None = None,
        chunk_bytes: int = PIN_CHUNK_BYTES,
        fd: int | None = None,
    ) -> None:
        """Maps private memory, or the memory of `fd` if given. The caller closes `fd`."""
        _require_memory(nbytes)
        if fd is None:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError, AttributeError):  # huge pages are faster to pin
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8)
        self.nbytes = nbytes
        self.region = HostRegion(self._view.ctypes.data, nbytes, chunk_bytes)
        self._pinner = BackgroundPinner(
            self.region,
            pin,
            unpin,
            "the rest stays unused. Lower cpu_memory, or raise the limit of locked memory "
            "(ulimit -l)",
            chunk_bytes,
        )

    @property
    def ready_bytes(self) -> int:
        return self._pinner.ready_bytes

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        """Returns a view of part of the arena."""
        assert self._view is not None, "the arena is closed"
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        self._pinner.close()
        if self._view is not None:
            self._view = None
            # A view that a caller still holds keeps the mapping alive until the view is released.
            with contextlib.suppress(BufferError):
                self._map.close()


def _require_memory(nbytes: int) -> None:
    limit = memory_limit()
    if nbytes > limit:
        raise ConfigError(
            "cpu_memory",
            f"{format_size(nbytes)} for this worker exceeds the memory of the machine or container "
            f"({limit / 2**30:.1f}GiB); choose a smaller size",
        )


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Returns the physical memory or the lowest cgroup memory limit, whichever is less.

    The limit may belong to the process's own cgroup (container, systemd slice, SLURM job) or to one
    of its ancestors.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in limit_files(root, membership):
        with contextlib.suppress(OSError, ValueError):  # the file is absent, or contains "max"
            limit = min(limit, int(file.read_text()))
    return limit


def limit_files(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """Yields the limit files of cgroup v2 and v1, from the process's cgroup up to the root."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
    # In a container the path may be that of the host, of which only the root is visible.
    for line in (*lines, "0::/", "1:memory:/"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tree, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for ancestor in (group, *group.parents):
            yield tree / ancestor / name
