"""Finds out whether a host is ready for the cache, and says what to change: `tiered-kv doctor`.

Each check looks at one thing and returns findings; none changes anything. Checks of a model, a
disk or a daemon run only if the user names one.
"""

from __future__ import annotations

import enum
import os
import platform
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tiered_kv import __version__
from vllm_tiered_kv.api import host_facts
from vllm_tiered_kv.api.disk_probe import DiskSpeed, measure
from vllm_tiered_kv.api.model_check import ModelCheck, kib
from vllm_tiered_kv.api.model_shape import read_config, read_shape
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.core.vllm_releases import NEWEST_TESTED_VLLM, OLDEST_VLLM, parse_version
from vllm_tiered_kv.device.arena import memory_limit
from vllm_tiered_kv.errors import (
    ConfigError,
    CudaError,
    ErrorCode,
    HandshakeFailed,
    ModelConfigError,
    NoDeviceError,
    RemoteRefusal,
)
from vllm_tiered_kv.native import cuda
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.inquiry import Inquiry, NoAnswerError

GIB = 1 << 30
_RESERVE = 0.1  # of the memory, for everything but the cache
_SLOW_DISK = 1e9  # bytes per second; an NVMe disk reads several times as much
_LITTLE_DESCRIPTORS = 4096
_POPULATE_KERNEL = (5, 14)
_PIN_PROBE_BYTES = 64 << 20
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.sshfs", "9p")


class Level(str, enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing to do
    WARNING = "warning"  # works, but slower or with less than is there
    ERROR = "error"  # does not work


@dataclass(frozen=True)
class Finding:
    """A line of `tiered-kv doctor`. Checks return some each."""

    check: str
    level: Level
    text: str
    advice: str = ""  # what to change; every warning and error has it
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Makes the findings of one check."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)

    def ok(self, text: str) -> Finding:
        return Finding(self.name, Level.OK, text, "", self.facts)

    def note(self, text: str) -> Finding:
        return Finding(self.name, Level.NOTE, text, "", self.facts)

    def warning(self, text: str, advice: str) -> Finding:
        return Finding(self.name, Level.WARNING, text, advice, self.facts)

    def error(self, text: str, advice: str) -> Finding:
        return Finding(self.name, Level.ERROR, text, advice, self.facts)


@dataclass(frozen=True)
class Questions:
    """What the user wants to know beyond the state of the host."""

    model: Path | None = None
    memory: int | None = None
    tensor_parallel: int = 1
    ssd: Path | None = None
    remotes: Sequence[ServerAddress] = ()
    remote_key: str = ""
    remote_server_key: str = ""
    timeout_s: float = 5.0


def examine(questions: Questions) -> Iterator[Finding]:
    """All findings, in the order of a report."""
    gpus = host_facts.gpus()
    yield from check_package()
    yield from check_vllm(host_facts.vllm_version())
    yield from check_options()
    yield from check_gpus(gpus)
    yield from check_memory(
        questions.memory, host_facts.memory_info(), memory_limit(), host_facts.cgroup_room()
    )
    yield from check_locked_memory(host_facts.locked_memory_limit())
    yield from check_huge_pages(host_facts.memory_info())
    yield from check_numa(host_facts.numa_nodes(), gpus or [])
    yield from check_kernel(host_facts.kernel_version(), host_facts.descriptor_limit())
    if questions.model is not None:
        yield from check_model(questions.model, questions.memory, questions.tensor_parallel)
    if questions.ssd is not None:
        yield from check_disk(questions.ssd)
    yield from check_daemons(questions)


# ---- the installation ---------------------------------------------------------------------------


def check_package() -> Iterator[Finding]:
    name = "package"
    facts = {"version": __version__, "python": platform.python_version()}
    try:
        from vllm_tiered_kv.native import _cpu  # noqa: F401
    except ImportError as error:
        yield Check(name, facts).error(
            f"the native module does not load: {error}",
            "install a wheel for this Python and this system, or build it here: pip install "
            "--force-reinstall --no-binary vllm-tiered-kv vllm-tiered-kv, with a C++ compiler",
        )
        return
    yield Check(name, facts).ok(f"vllm-tiered-kv {__version__}, Python {facts['python']}")


def check_vllm(installed: tuple[str, str] | None) -> Iterator[Finding]:
    if installed is None:
        yield Check("vllm").note(
            "vLLM is not installed in this environment; a daemon does not need it, an engine does"
        )
        return
    distribution, version = installed
    facts = {"distribution": distribution, "version": version}
    number = parse_version(version)
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST_VLLM, NEWEST_TESTED_VLLM))
    if number is not None and (0, 1) < number < OLDEST_VLLM:
        yield Check("vllm", facts).error(
            f"{distribution} {version} is too old", f"install vLLM {oldest} to {newest}"
        )
    elif number is not None and number > NEWEST_TESTED_VLLM:
        yield Check("vllm", facts).warning(
            f"{distribution} {version} is newer than what the connector was tested with",
            f"use vLLM {newest}, or compare answers with tiered-kv replay",
        )
    else:
        yield Check("vllm", facts).ok(f"{distribution} {version}")


def check_options() -> Iterator[Finding]:
    """The environment wins over an engine's JSON, also where nobody remembers it."""
    try:
        config = TieredKVConfig.load()
    except ConfigError as error:
        yield Check("environment").error(
            f"a variable would stop an engine: {error}", "unset the variable or correct it"
        )
        return
    if config != TieredKVConfig():
        yield Check("environment").note(f"variables set options of engines: {config.describe()}")


def check_gpus(gpus: list[host_facts.Gpu] | None) -> Iterator[Finding]:
    runtime: int | None = None
    reason = ""
    try:
        runtime = cuda.RUNTIME_VERSION
    except NoDeviceError as error:
        reason = str(error)
    if not gpus:
        built = f"built for CUDA {_dotted(runtime)}, loads" if runtime is not None else reason
        what = "nvidia-smi does not run here" if gpus is None else "nvidia-smi lists no GPU"
        yield Check("gpu", {"gpus": []}).note(f"no NVIDIA GPU: {what}")
        yield Check("cuda module", {"runtime": runtime}).note(built)
        return
    for name in sorted({gpu.name for gpu in gpus}):
        alike = [gpu for gpu in gpus if gpu.name == name]
        gib = alike[0].memory_mib / 1024
        text = f"{len(alike)} of {name}, {gib:.0f} GiB, driver {gpus[0].driver}"
        facts = {"name": name, "count": len(alike), "driver": gpus[0].driver}
        yield Check("gpu", facts).ok(text)
    if runtime is None:
        yield Check("cuda module", {"runtime": None}).error(
            f"{reason}; an engine on this GPU refuses to start",
            "install a wheel that has it, or build with nvcc: TIERED_KV_CUDA=1 pip install .",
        )
        return
    unusable = cuda.why_unavailable()
    if unusable is not None:
        yield Check("cuda module", {"runtime": runtime}).error(
            f"built for CUDA {_dotted(runtime)}, but {unusable}",
            f"update the NVIDIA driver to one for CUDA {_dotted(runtime)} or newer, and look at "
            "CUDA_VISIBLE_DEVICES",
        )
        return
    yield Check("cuda module", {"runtime": runtime}).ok(f"built for CUDA {_dotted(runtime)}")
    yield from check_pinning()


def check_pinning() -> Iterator[Finding]:
    """Pins memory on the first GPU for a moment, as an engine does for its arena."""
    import time

    import numpy as np

    memory = np.zeros(_PIN_PROBE_BYTES, np.uint8)
    try:
        stream = cuda.Stream(0)  # creates the context, which is not to be timed
        try:
            started = time.monotonic()
            cuda.host_register(memory.ctypes.data, memory.nbytes, 0)
            took = time.monotonic() - started
            cuda.host_unregister(memory.ctypes.data, 0)
        finally:
            stream.close()
    except CudaError as error:
        yield Check("pinning").error(
            f"{_PIN_PROBE_BYTES >> 20} MiB of memory cannot be pinned: {error}",
            "raise the limits of the container (memory, ulimit -l), free memory of GPU 0, or on "
            "WSL and in virtual machines see the driver's limit for pinned memory",
        )
        return
    speed = memory.nbytes / took
    yield Check("pinning", {"bytes_per_s": round(speed)}).ok(
        f"memory can be pinned, {speed / 1e9:.1f} GB/s"
    )


# ---- the host -----------------------------------------------------------------------------------


def check_memory(
    wanted: int | None, info: dict[str, int], limit: int, room_of_groups: int | None
) -> Iterator[Finding]:
    total = info.get("MemTotal", limit)
    available = min(info.get("MemAvailable", limit), limit)
    if room_of_groups is not None:
        available = min(available, room_of_groups)
    facts = {"total": total, "limit": limit, "available": available}
    where = "of memory"
    if limit < total:
        where = f"allowed by this control group, of {_gib(total)} on the host"
    text = f"{_gib(limit)} {where}; {_gib(available)} available now"
    room = int(limit * (1 - _RESERVE))
    if wanted is not None and wanted > room:
        yield Check("memory", facts).error(
            f"{text}; a cache of {_gib(wanted)} does not fit beside everything else",
            f"use at most {_gib(room)}, or raise the memory limit: pinned and shared memory count "
            "towards it in full",
        )
    elif wanted is not None and wanted > available:
        yield Check("memory", facts).warning(
            f"{text}, less than the {_gib(wanted)} of the cache",
            "stop what uses the memory, or take less: the cache takes all of it at start",
        )
    else:
        yield Check("memory", facts).ok(text)


def check_locked_memory(limit: int | None) -> Iterator[Finding]:
    facts = {"limit": limit}
    if limit is None:
        yield Check("locked memory", facts).ok("ulimit -l is unlimited")
        return
    yield Check("locked memory", facts).note(
        f"ulimit -l is {limit >> 10} KiB; NVIDIA's driver pins without it, RDMA does not: stores "
        "that use RDMA need ulimit -l unlimited (Docker: --ulimit memlock=-1)"
    )


def check_huge_pages(info: dict[str, int]) -> Iterator[Finding]:
    pages, free = info.get("HugePages_Total", 0), info.get("HugePages_Free", 0)
    nbytes = info.get("Hugepagesize", 0)
    facts = {"reserved": pages, "free": free, "page_bytes": nbytes}
    if pages:
        yield Check("huge pages", facts).ok(
            f"{free} of {pages} reserved huge pages are free, {_gib(free * nbytes)}: the most that "
            "a daemon with huge_pages can take"
        )
    else:
        yield Check("huge pages", facts).note(
            "no huge pages are reserved (vm.nr_hugepages); the daemon's huge_pages would need them"
        )


def check_numa(nodes: int, gpus: Sequence[host_facts.Gpu]) -> Iterator[Finding]:
    near = [gpu.numa_node for gpu in gpus]
    facts = {"nodes": nodes, "gpus": near}
    if nodes == 1:
        yield Check("numa", facts).ok("one memory node")
        return
    text = f"{nodes} memory nodes"
    for node in sorted({node for node in near if node is not None}):
        which = ", ".join(str(number) for number, one in enumerate(near) if one == node)
        text += f"; GPU {which} is at node {node}"
    text += ": memory of another node is slower to copy (numactl --cpunodebind=N --membind=N)"
    yield Check("numa", facts).note(text)


def check_kernel(version: tuple[int, int] | None, descriptors: int | None) -> Iterator[Finding]:
    facts = {"kernel": version and ".".join(map(str, version)), "descriptors": descriptors}
    if version is not None and version < _POPULATE_KERNEL:
        yield Check("kernel", facts).warning(
            f"Linux {facts['kernel']} cannot provide memory ahead of its use",
            "use Linux 5.14 or newer; until then memory is provided while an engine pins it, and "
            "blocks other calls to the GPU meanwhile",
        )
    elif version is not None:
        yield Check("kernel", facts).ok(f"Linux {facts['kernel']}")
    if descriptors is not None and descriptors < _LITTLE_DESCRIPTORS:
        yield Check("descriptors", facts).warning(
            f"a process may open {descriptors} files and sockets: a daemon refuses clients beyond",
            "raise ulimit -Hn (systemd: LimitNOFILE=65536)",
        )
    elif descriptors is not None:
        yield Check("descriptors", facts).ok(f"a process may open {descriptors} files and sockets")


# ---- what the user asks for ---------------------------------------------------------------------


def check_model(path: Path, memory: int | None, ranks: int) -> Iterator[Finding]:
    try:
        shape = read_shape(read_config(path), "auto", "auto", ranks)
    except ModelConfigError as error:
        yield Check("model").error(str(error), "name the folder of the model, or its config.json")
        return
    wanted = memory or _memory_of_an_engine()
    model = ModelCheck(shape, 16, ranks, wanted)
    facts = model.as_json()
    name = shape.architecture or shape.model_type
    if not model.is_cached:
        yield Check("model", facts).warning(
            f"{name} is not cached: {'; '.join(model.reasons)}",
            "it runs as without the cache; tiered-kv model --help says more",
        )
        return
    text = f"{name} is cached, {kib(model.token_bytes)} KiB a token"
    if model.tokens is not None:
        text += f"; {_gib(wanted)} hold {model.tokens:,} tokens"
    if shape.guesses:
        text += f"; a guess: {'; '.join(shape.guesses)}"
    check = Check("model", facts)
    yield check.note(text) if shape.guesses else check.ok(text)


def _memory_of_an_engine() -> int:
    try:
        return TieredKVConfig.load().cpu_memory
    except ConfigError:  # reported by check_options
        return TieredKVConfig().cpu_memory


def check_disk(folder: Path) -> Iterator[Finding]:
    name = "ssd"
    try:
        if not folder.is_dir():
            advice = "create it on a local disk, for the user that runs the daemon"
            yield Check(name).error(f"{folder} is not a folder", advice)
            return
        usage = os.statvfs(folder)
        free = usage.f_bavail * usage.f_frsize
        kind = host_facts.file_system(folder)
        speed = measure(folder)
    except OSError as error:
        advice = (
            "run as the user that runs the daemon, and give this user the folder and room in it"
        )
        yield Check(name).error(f"{folder}: {error.strerror}", advice)
        return
    facts = {"folder": str(folder), "file_system": kind, "free": free}
    text = f"{folder}: {kind or 'unknown file system'}, {_gib(free)} free"
    yield _disk_finding(text, kind, speed, facts)


def _disk_finding(
    text: str, kind: str | None, speed: DiskSpeed | None, facts: dict[str, Any]
) -> Finding:
    if speed is None:
        return Check("ssd", facts).warning(
            f"{text}, without direct I/O, so its speed is not known",
            "use ext4 or xfs on a local disk: tmpfs is memory, and copies through the page cache "
            "take memory twice",
        )
    facts = {
        **facts,
        "write_bytes_per_s": round(speed.write_bytes_per_s),
        "read_bytes_per_s": round(speed.read_bytes_per_s),
    }
    read, write = speed.read_bytes_per_s / 1e9, speed.write_bytes_per_s / 1e9
    text = f"{text}, reads {read:.2f} GB/s, writes {write:.2f} GB/s (a short probe)"
    if kind in _NETWORK_FILE_SYSTEMS:
        advice = "the SSD tier is for one daemon and a local disk; use --backing file:// for this"
        return Check("ssd", facts).warning(text, advice)
    if speed.read_bytes_per_s < _SLOW_DISK:
        advice = (
            "a faster disk (NVMe): engines compute what they expect to load more slowly, so that "
            "little of this tier would be used"
        )
        return Check("ssd", facts).warning(text, advice)
    return Check("ssd", facts).ok(text)


def check_daemons(questions: Questions) -> Iterator[Finding]:
    curve = None
    if questions.remote_key or questions.remote_server_key:
        try:
            if not (questions.remote_key and questions.remote_server_key):
                raise ConfigError("--remote-key", "needs --remote-server-key, and the reverse")
            curve = CurveKeys.load(questions.remote_key, questions.remote_server_key)
        except ConfigError as error:
            yield Check("keys").error(
                str(error),
                "tiered-kv-server keygen makes pairs of files; the client needs its own "
                ".key_secret and the daemon's .key",
            )
            return
        yield from _check_key_file(Path(questions.remote_key))
    for address in questions.remotes:
        yield check_daemon(address, curve, questions.timeout_s)


def _check_key_file(path: Path) -> Iterator[Finding]:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        yield Check("keys").warning(
            f"{path} can be read by other users (mode {mode:o})", f"chmod 600 {path}"
        )
    else:
        yield Check("keys").ok("both key files can be read, and the secret is private")


def check_daemon(address: ServerAddress, curve: CurveKeys | None, timeout_s: float) -> Finding:
    name = "daemon"
    try:
        with Inquiry(address, timeout_s, curve) as daemon:
            info = daemon.info()
    except NoAnswerError as error:
        advice = _advice_of(error, address, has_keys=curve is not None)
        return Check(name, {"address": str(address)}).error(str(error), advice)
    tiers = info.get("tiers")
    shown = ""
    if isinstance(tiers, dict):
        sizes = [(tier, nbytes) for tier, nbytes in tiers.items() if isinstance(nbytes, int)]
        shown = ", ".join(
            f"{tier} {_gib(nbytes)}" if nbytes else str(tier) for tier, nbytes in sizes
        )
    text = f"{address} answers: {info.get('server', 'a daemon')}; {shown}"
    return Check(name, {"address": str(address), "info": info}).ok(text)


def _advice_of(error: NoAnswerError, address: ServerAddress, has_keys: bool) -> str:
    cause = error.__cause__
    if isinstance(cause, RemoteRefusal) and cause.code is ErrorCode.UNAUTHORIZED:
        return "put the .key file of this client into the daemon's clients, and restart the daemon"
    if isinstance(cause, HandshakeFailed) and has_keys:
        return (
            "--remote-server-key must be the .key file of this daemon's secret_key; a daemon "
            "without secret_key wants no keys"
        )
    if isinstance(cause, HandshakeFailed):
        return "it requires keys: --remote-key NAME.key_secret --remote-server-key server.key"
    advice = f"start it: tiered-kv-server --listen {address}"
    if address.socket_path is not None:
        return f"{advice}; the folder of its socket must be visible here, and the user the same"
    return f"{advice}; on another host it needs keys, and an open port"


def _dotted(runtime: int | None) -> str:
    return "none" if runtime is None else f"{runtime // 1000}.{runtime % 1000 // 10}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"
