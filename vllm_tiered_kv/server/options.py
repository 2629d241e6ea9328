"""The one definition of every option of the daemon: type, default and meaning.

Values come from a YAML file (`--config`) and from command-line flags, which win. Environment
variables are not read. The table in `docs/server.md` is generated from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.config import Eviction
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.option_values import (
    boolean,
    choice,
    duration,
    integer,
    parse_options,
    path,
    quotas,
    show_default,
    size,
    switchable_text,
    text,
    texts,
)
from vllm_tiered_kv.stores.shared_dir.settings import SharedDirSettings
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy

EVERYONE = ""
"""The prefix of a quota that holds for namespaces no other entry names."""

Quotas = Mapping[str, int]
"""Hex prefix of a namespace -> bytes."""


class LogLevel(str, enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class ServerOptions:
    """All options of the daemon, validated one by one. Build it with `load`."""

    memory: int = size(
        4 << 30,
        "Shared memory of the memory tier. An exact limit. The largest block it takes is a 32nd "
        "of it, at most 256MiB.",
    )
    eviction: Eviction = choice(
        Eviction.LRU,
        "Order of eviction from memory. `s3fifo` resists scans.",
    )
    huge_pages: bool = boolean(
        False,
        "Take the memory from the system's reserve of huge pages (`vm.nr_hugepages`); the daemon "
        "does not start if there are too few.",
    )
    prefault: bool = boolean(
        True,
        "Take all of the memory from the system at the start, in the background. Otherwise it is "
        "taken as blocks come, which makes the first ones slower.",
    )
    ssd: str = path(
        "",
        "Folder of the SSD tier, on a local file system. One daemon at a time uses it. Without "
        "it nothing outlives the daemon.",
    )
    ssd_space: int = size(
        100 << 30, "Disk space of the SSD tier, allocated at once. An exact limit."
    )
    ssd_eviction: Eviction = choice(Eviction.LRU, "Order of eviction from the SSD.")
    ssd_fsync: FsyncPolicy = choice(
        FsyncPolicy.GROUP,
        "What a block acknowledged as on disk survives: with `group` a power failure (writes at "
        "the same time share their syncs), with `never` the death of the daemon.",
    )
    backing: str = text(
        "",
        "A slower tier behind the others, shared by many daemons: `file:///mnt/kv` is a folder "
        "on a shared file system. Needs `backing_space`, `backing_ttl` or both.",
    )
    backing_space: int = size(
        0, "What collections bring the backing folder down to. 0: no limit.", zero=True
    )
    backing_ttl: int = duration(
        0,
        "Blocks of the backing folder unused for so long, 20min or more, are removed. 0: never.",
    )
    backing_timeout: int = duration(
        2,
        "The longest the backing folder is waited for: for an answer, or for a block whose turn "
        "has come. What was not found by then counts as not there, and a delete fails. A flush or "
        "the end of the daemon gives up a folder that takes nothing for ten times as long.",
        low=1,
    )
    listen: list[str] = texts(
        ["tcp://127.0.0.1:9527"],
        "Where clients connect: `tcp://ADDRESS:PORT`, or `ipc:///PATH` for processes of the same "
        "user on this host, which can then share the memory directly. An address other than "
        "loopback needs keys.",
        "ENDPOINT",
    )
    http: str = switchable_text(
        "127.0.0.1:9528",
        "Where `/metrics` and `/healthz` are served, on loopback only. `off` disables it.",
    )
    secret_key: str = path(
        "",
        "File with the daemon's secret CURVE key, as `keygen` writes it. With it every tcp "
        "connection is encrypted, and only the clients below may connect.",
    )
    clients: str = path(
        "",
        "Public keys of the clients that may connect: a folder of `.key` files, or a file with "
        "a key on each line, followed by `read-only` if it may only read.",
    )
    memory_quota: Quotas = quotas(
        {},
        "The most memory one namespace may take: a size for all, `PREFIX=SIZE` for those whose "
        "name in hex starts with it. Kept in whole slabs, a 32nd of the memory each.",
    )
    ssd_quota: Quotas = quotas({}, "The same for the SSD tier.")
    write_queue: int = size(
        0,
        "Blocks waiting to be written to a slower tier, which stay in memory meanwhile; what "
        "exceeds it is offered again before it is evicted, and written by a flush. 0: a quarter "
        "of the memory, divided among the slower tiers.",
        zero=True,
    )
    workers: int = integer(
        16,
        "Threads that check, read and look up blocks; those that were received are copied by "
        "others.",
        low=1,
        high=1024,
    )
    # libzmq gives a connection to the thread with the fewest sockets, those it listens on included.
    # With four threads and two addresses two of a client's four connections would share one.
    io_threads: int = integer(
        8, "Threads that move bytes between sockets and memory.", low=1, high=64
    )
    max_sessions: int = integer(
        4096,
        "Sessions at a time. When there are more, the one idle for longest has to say hello again.",
        low=1,
        high=1 << 20,
    )
    network_memory: int = size(
        2 << 30,
        "The most that messages of all clients take up beside `memory`: those that are being "
        "received, requests that wait for their answer, and replies that are not taken. When it is "
        "used up, clients that take up the most are refused or disconnected.",
    )
    stall_timeout: int = duration(
        30,
        "A client that takes none of its replies for so long is disconnected, and so is one over "
        "tcp that sends nothing more of a message it has begun.",
        low=1,
    )
    log_level: LogLevel = choice(LogLevel.INFO, "How much is logged, to stderr.")

    @classmethod
    def load(
        cls, file: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None
    ) -> ServerOptions:
        """Validated options from the content of a YAML file and from flags, which win."""
        of_file = [(str(key), str(key), raw) for key, raw in (file or {}).items()]
        of_flags = [(key, flag_of(key), raw) for key, raw in (flags or {}).items()]
        values = parse_options(cls, [*of_file, *of_flags])
        loaded = cls(**values)
        loaded._check_together()
        loaded._check_use(values)
        return loaded

    def _check_together(self) -> None:
        if self.memory < 1 << 20:
            raise ConfigError("memory", f"{self.memory} bytes are too few; give it at least 1MiB")
        if not self.listen:
            raise ConfigError("listen", "name at least one endpoint")
        for endpoint in self.listen:
            if self.listen.count(endpoint) > 1:
                raise ConfigError("listen", f"{endpoint} is named more than once")
        if bool(self.secret_key) != bool(self.clients):
            raise ConfigError(
                "secret_key" if self.clients else "clients",
                "secret_key and clients belong together; set both or neither",
            )
        if self.backing and not self.backing.startswith("file:///"):
            raise ConfigError("backing", f'{self.backing!r} is not like "file:///mnt/kv"')
        if self.backing and not (self.backing_space or self.backing_ttl):
            raise ConfigError(
                "backing",
                "the folder would grow until its file system is full; say what it may hold with "
                "backing_space, or for how long with backing_ttl",
            )

        least = int(2 * SharedDirSettings.touch_interval_s)  # last uses are noted as often
        if self.backing and 0 < self.backing_ttl < least:
            raise ConfigError(
                "backing_ttl", f"must be at least {least // 60}min, got {self.backing_ttl}s"
            )

    def _check_use(self, given: Mapping[str, Any]) -> None:
        """Who gives a tier room, but no place, would believe that it is there."""
        for name in ("ssd_space", "ssd_quota"):
            if given.get(name) and not self.ssd:
                raise ConfigError(name, "there is no SSD tier; name its folder with ssd")
        for name in ("backing_space", "backing_ttl"):
            if given.get(name) and not self.backing:
                raise ConfigError(name, "there is no backing tier; name its folder with backing")

    @property
    def backing_folder(self) -> str | None:
        return self.backing.removeprefix("file://") if self.backing else None


def quota_of(quotas: Quotas, namespace: bytes) -> int | None:
    """The quota of this namespace, or of those that start so: that of the longest prefix that
    fits."""
    name = namespace.hex()
    fitting = [prefix for prefix in quotas if name.startswith(prefix[: len(name)])]
    return quotas[max(fitting, key=len)] if fitting else None


def may_have_quota(quotas: Quotas, start: bytes) -> bool:
    """Whether there is a quota for some namespace that starts so."""
    if not quotas:  # asked for every block
        return False
    name = start.hex()
    return any(name.startswith(prefix[: len(name)]) for prefix in quotas)


def read_yaml(path: str) -> Mapping[str, Any]:
    import yaml  # only who uses a file pays for it

    try:
        text = Path(path).read_text()
        content = yaml.safe_load(text)
        tree = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError("--config", f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark else ""
        what = getattr(error, "problem", None) or error
        raise ConfigError("--config", f"{path}{where} is not YAML: {what}") from error
    names = [key.value for key, _ in tree.value] if isinstance(tree, yaml.MappingNode) else []
    for name in names:
        if names.count(name) > 1:  # YAML would take the last one without a word
            raise ConfigError(str(name), f"is there more than once in {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path} must map options to values")
    return content


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each option; what is not given is not in the result."""
    for option in dataclasses.fields(ServerOptions):
        kind = option.metadata["kind"]
        help = option.metadata["help"].replace("`", "").replace("%", "%%")
        default = show_default(option)
        more: dict[str, Any] = {"action": "append"} if kind.is_list else {}
        if isinstance(option.default, bool):
            more = {"nargs": "?", "const": True}
        parser.add_argument(
            flag_of(option.name),
            dest=option.name,
            default=argparse.SUPPRESS,
            metavar=kind.metavar,
            help=f"{help} [{default}]" if default else help,
            **more,
        )
