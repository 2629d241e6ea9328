"""What a process holds of the system: threads, descriptors, mappings, memory, shared files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_OUR_THREADS = "tiered-kv"
_SHARED_FILES = (Path("/dev/shm"), Path("/tmp"))
_CONTAINERS = (dict, list, tuple, set, frozenset)


@dataclass(frozen=True)
class Footprint:
    thread_names: tuple[str, ...]  # of all of them, those of native libraries included
    ours: tuple[str, ...]  # names of the threads we started
    open_files: tuple[str, ...]  # what the descriptors are of, without numbers
    memfd_maps: int  # mapped memory of daemons
    shared_files: frozenset[str]  # under /dev/shm and /tmp, of this project
    rss_bytes: int

    @classmethod
    def now(cls, pid: int | None = None) -> Footprint:
        """Of a process, or of this one."""
        own = pid is None
        if own:
            gc.collect()
            _trim()
        root = Path("/proc", "self" if own else str(pid))
        names = [t.name for t in threading.enumerate()] if own else []
        return cls(
            thread_names=_thread_names(root / "task"),
            ours=tuple(sorted(name for name in names if name.startswith(_OUR_THREADS))),
            open_files=_open_files(root / "fd"),
            memfd_maps=sum("/memfd:" in line for line in (root / "maps").open()),
            shared_files=shared_files(),
            rss_bytes=int((root / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )

    @property
    def threads(self) -> int:
        return len(self.thread_names)

    @property
    def descriptors(self) -> int:
        return len(self.open_files)

    def news(self, other: Footprint) -> dict[str, int]:
        """Threads, by the names the system knows, and files that there are more of."""
        threads = Counter(self.thread_names) - Counter(other.thread_names)
        files = Counter(self.open_files) - Counter(other.open_files)
        return dict(sorted((threads + files).items()))

    def beyond(
        self, other: Footprint, rss_slack: int, accounted: Mapping[str, int] | None = None
    ) -> list[str]:
        """In words, what there is more of than in the other, memory aside what is allowed.

        `accounted`: how many more threads or descriptors there are for a known reason.
        """
        more = []
        allowed = accounted or {}
        for name in ("threads", "descriptors", "memfd_maps"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine > theirs + allowed.get(name, 0):
                more.append(f"{mine} {name} instead of {theirs}")
        if more:
            more += [f"{count} new {name}" for name, count in self.news(other).items()]
        threads = Counter(self.ours) - Counter(other.ours)
        more += [f"thread {name}" for name in threads.elements()]
        more += [f"file {name}" for name in sorted(self.shared_files - other.shared_files)]
        grown = self.rss_bytes - other.rss_bytes
        if grown > rss_slack:
            more.append(f"{grown / 2**20:.1f} MiB of memory, {rss_slack / 2**20:.0f} are allowed")
        return more


def _thread_names(tasks: Path) -> tuple[str, ...]:
    names = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            names.append((task / "comm").read_text().strip())
    return tuple(sorted(names))


def _open_files(descriptors: Path) -> tuple[str, ...]:
    names = []
    for link in descriptors.iterdir():
        with contextlib.suppress(OSError):  # the one this folder is read by
            names.append(re.sub(r"\d+", "N", os.readlink(link)))
    return tuple(sorted(names))


def shared_files() -> frozenset[str]:
    return frozenset(
        str(path)
        for folder in _SHARED_FILES
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name.startswith(("tiered", "vllm_tiered", "vllm-tiered"))
    )


def settled(
    baseline: Footprint,
    rss_slack: int,
    seconds: float = 30.0,
    pid: int | None = None,
    accounted: Mapping[str, int] | None = None,
) -> list[str]:
    """What a process holds beyond the baseline once it had time to give it back."""
    end = time.monotonic() + seconds
    while more := Footprint.now(pid).beyond(baseline, rss_slack, accounted):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return more


def held_items(roots: Iterable[object], belongs: Callable[[type], bool]) -> int:
    """How many entries all containers have that can be reached from here through objects of these
    types: what is forgotten in a dictionary shows long before memory grows."""
    seen: set[int] = set()
    todo = list(roots)
    items = 0
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        kind = type(found)
        if isinstance(found, _CONTAINERS) or kind.__name__ == "deque":
            items += len(found)  # type: ignore[arg-type]
        elif not belongs(kind):
            continue
        todo += gc.get_referents(found)
    return items


def of_this_package(kind: type) -> bool:
    return kind.__module__.startswith("vllm_tiered_kv")


def _trim() -> None:
    """Freed memory goes back to the system, so that what remains is in use."""
    ctypes.CDLL(None).malloc_trim(0)
