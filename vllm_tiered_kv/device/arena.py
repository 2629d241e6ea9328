"""The memory of the CPU tier: one mapping, pinned in the background when there is a GPU.

It is pinned front to back, which is also the order slots are handed out in; a slot beyond
`ready_bytes` is not used yet.
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
from vllm_tiered_kv.option_values import format_size


class Arena:
    """`nbytes` of memory at a fixed address. `close` is idempotent and gives everything back."""

    def __init__(
        self,
        nbytes: int,
        pin: Pin | None = None,
        unpin: Unpin | None = None,
        chunk_bytes: int = PIN_CHUNK_BYTES,
        fd: int | None = None,
    ) -> None:
        """Of this process alone, or of a descriptor's memory, which stays the caller's to close."""
        _require_memory(nbytes)
        if fd is None:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages: faster pinning
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8)
        self.nbytes = nbytes
        self.pin_chunk_bytes = chunk_bytes
        self.region = HostRegion(self._view.ctypes.data, nbytes, chunk_bytes)
        self._pinner = BackgroundPinner(
            self.region,
            pin,
            unpin,
            "the rest stays unused. Lower cpu_memory or raise the limit of locked memory "
            "(ulimit -l)",
            chunk_bytes,
        )

    @property
    def ready_bytes(self) -> int:
        return self._pinner.ready_bytes

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray:
        """A view of part of the arena."""
        assert self._view is not None, "the arena is closed"
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        self._pinner.close()
        if self._view is not None:
            self._view = None
            # A caller still holding a view keeps the mapping alive; it goes with that view.
            with contextlib.suppress(BufferError):
                self._map.close()


def _require_memory(nbytes: int) -> None:
    limit = memory_limit()
    if nbytes > limit:
        raise ConfigError(
            "cpu_memory",
            f"{format_size(nbytes)} for this worker is more than the machine or container has "
            f"({limit / 2**30:.1f}GiB); choose less",
        )


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Physical memory, or the lowest limit of a control group that this process is in: of its own
    (a container, a systemd slice, a job of SLURM) or of one around it."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _limit_files(root, membership):
        with contextlib.suppress(OSError, ValueError):  # absent, or the word "max"
            limit = min(limit, int(file.read_text()))
    return limit


def _limit_files(root: Path, membership: Path) -> Iterator[Path]:
    """Those of version 2 and of version 1, from the process's own group up to the root's."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
    # Inside a container the path may be the host's, and only the root is there.
    for line in (*lines, "0::/", "1:memory:/"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tree, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            yield tree / each / name
