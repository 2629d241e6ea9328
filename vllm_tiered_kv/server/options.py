"""The one definition of every option of the daemon: type, default and meaning.

Values come from a YAML file (`--config`) and from command-line flags, which win. Environment
variables are not read. The table in `docs/server.md` is generated from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_tiered_kv.config import Eviction, require_known
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.option_values import (
    format_size,
    parse_bool,
    parse_choice,
    parse_int,
    parse_size,
)
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy

EVERYONE = ""
"""The prefix of a quota that holds for namespaces no other entry names."""

Quotas = Mapping[str, int]
"""Hex prefix of a namespace -> bytes."""

_MOST_SECONDS = 3650 * 86400  # ten times that is still a time that one can wait for
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class LogLevel(str, enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _option(default: Any, kind: str, help: str, **more: Any) -> Any:
    metadata = {"kind": kind, "help": help, **more}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ServerOptions:
    """All options of the daemon, validated one by one. Build it with `load`."""

    memory: int = _option(
        4 << 30,
        "size",
        "Shared memory of the memory tier. An exact limit. The largest block it takes is a 32nd "
        "of it, at most 256MiB.",
    )
    eviction: Eviction = _option(
        Eviction.LRU,
        "choice",
        "Order of eviction from memory. `s3fifo` resists scans.",
    )
    huge_pages: bool = _option(
        False,
        "bool",
        "Take the memory from the system's reserve of huge pages (`vm.nr_hugepages`); the daemon "
        "does not start if there are too few.",
    )
    prefault: bool = _option(
        True,
        "bool",
        "Take all of the memory from the system at the start, in the background. Otherwise it is "
        "taken as blocks come, which makes the first ones slower.",
    )
    ssd: str = _option(
        "",
        "path",
        "Folder of the SSD tier, on a local file system. One daemon at a time uses it. Without "
        "it nothing outlives the daemon.",
    )
    ssd_space: int = _option(
        100 << 30, "size", "Disk space of the SSD tier, allocated at once. An exact limit."
    )
    ssd_eviction: Eviction = _option(Eviction.LRU, "choice", "Order of eviction from the SSD.")
    ssd_fsync: FsyncPolicy = _option(
        FsyncPolicy.GROUP,
        "choice",
        "What a block acknowledged as on disk survives: with `group` a power failure (writes at "
        "the same time share their syncs), with `never` the death of the daemon.",
    )
    backing: str = _option(
        "",
        "text",
        "A slower tier behind the others, shared by many daemons: `file:///mnt/kv` is a folder "
        "on a shared file system. Needs `backing_space`, `backing_ttl` or both.",
    )
    backing_space: int = _option(
        0, "size", "What collections bring the backing folder down to. 0: no limit.", low=0
    )
    backing_ttl: int = _option(
        0,
        "duration",
        "Blocks of the backing folder unused for so long, 20min or more, are removed. 0: never.",
    )
    backing_timeout: int = _option(
        2,
        "duration",
        "The longest the backing folder is waited for: for an answer, or for a block whose turn "
        "has come. What was not found by then counts as not there, and a delete fails. A flush or "
        "the end of the daemon gives up a folder that takes nothing for ten times as long.",
        low=1,
    )
    listen: list[str] = _option(
        ["tcp://127.0.0.1:9527"],
        "list",
        "Where clients connect: `tcp://ADDRESS:PORT`, or `ipc:///PATH` for processes of the same "
        "user on this host, which can then share the memory directly. An address other than "
        "loopback needs keys.",
    )
    http: str = _option(
        "127.0.0.1:9528",
        "text",
        "Where `/metrics` and `/healthz` are served, on loopback only. `off` disables it.",
    )
    secret_key: str = _option(
        "",
        "path",
        "File with the daemon's secret CURVE key, as `keygen` writes it. With it every tcp "
        "connection is encrypted, and only the clients below may connect.",
    )
    clients: str = _option(
        "",
        "path",
        "Public keys of the clients that may connect: a folder of `.key` files, or a file with "
        "a key on each line, followed by `read-only` if it may only read.",
    )
    memory_quota: Quotas = _option(
        {},
        "quotas",
        "The most memory one namespace may take: a size for all, `PREFIX=SIZE` for those whose "
        "name in hex starts with it. Kept in whole slabs, a 32nd of the memory each.",
    )
    ssd_quota: Quotas = _option({}, "quotas", "The same for the SSD tier.")
    write_queue: int = _option(
        0,
        "size",
        "Blocks waiting to be written to a slower tier, which stay in memory meanwhile; what "
        "exceeds it is offered again before it is evicted, and written by a flush. 0: a quarter "
        "of the memory, divided among the slower tiers.",
        low=0,
    )
    workers: int = _option(
        16,
        "int",
        "Threads that check, read and look up blocks; those that were received are copied by "
        "others.",
        low=1,
        high=1024,
    )
    # libzmq gives a connection to the thread with the fewest sockets, those it listens on included.
    # With four threads and two addresses two of a client's four connections would share one.
    io_threads: int = _option(
        8, "int", "Threads that move bytes between sockets and memory.", low=1, high=64
    )
    max_sessions: int = _option(
        4096,
        "int",
        "Sessions at a time. When there are more, the one idle for longest has to say hello again.",
        low=1,
        high=1 << 20,
    )
    network_memory: int = _option(
        2 << 30,
        "size",
        "The most that messages of all clients take up beside `memory`: those that are being "
        "received, requests that wait for their answer, and replies that are not taken. When it is "
        "used up, clients that take up the most are refused or disconnected.",
    )
    stall_timeout: int = _option(
        30,
        "duration",
        "A client that takes none of its replies for so long is disconnected, and so is one over "
        "tcp that sends nothing more of a message it has begun.",
        low=1,
    )
    log_level: LogLevel = _option(LogLevel.INFO, "choice", "How much is logged, to stderr.")

    @classmethod
    def load(
        cls, file: Mapping[str, Any] | None = None, flags: Mapping[str, Any] | None = None
    ) -> ServerOptions:
        """Validated options from the content of a YAML file and from flags, which win."""
        options = {option.name: option for option in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, raw in (file or {}).items():
            require_known(str(key), str(key), options)
            values[key] = _parse(options[key], key, raw)
        for key, raw in (flags or {}).items():
            values[key] = _parse(options[key], flag_of(key), raw)
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
        text = option.metadata["help"].replace("`", "").replace("%", "%%")
        default = _show(_default(option), kind)
        more: dict[str, Any] = {"action": "append"} if kind in ("list", "quotas") else {}
        if kind == "bool":
            more = {"nargs": "?", "const": True}
        parser.add_argument(
            flag_of(option.name),
            dest=option.name,
            default=argparse.SUPPRESS,
            metavar=_METAVARS.get(kind) or "|".join(_choices(option)),
            help=f"{text} [{default}]" if default else text,
            **more,
        )


def options_table() -> str:
    """The Markdown table of `docs/server.md`."""
    lines = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for option in dataclasses.fields(ServerOptions):
        kind = option.metadata["kind"]
        shown = _TYPES.get(kind)
        if kind == "choice":
            shown = " \\| ".join(f"`{choice}`" for choice in _choices(option))
        elif kind == "int":
            shown = f"integer {option.metadata['low']} … {option.metadata['high']}"
        default = _show(_default(option), kind)
        lines.append(
            f"| `{option.name}` | {shown} | {f'`{default}`' if default else ''} "
            f"| {option.metadata['help']} |"
        )
    return "\n".join(lines) + "\n"


_METAVARS = {
    "size": "SIZE",
    "bool": "true|false",
    "path": "PATH",
    "text": "TEXT",
    "list": "ENDPOINT",
    "quotas": "[PREFIX=]SIZE",
    "int": "N",
    "duration": "TIME",
}
_TYPES = {
    "size": "size, like `20GiB`",
    "bool": "boolean",
    "path": "path",
    "text": "text",
    "list": "list; the flag may be repeated",
    "quotas": "size, or map of prefix to size; the flag may be repeated",
    "duration": "duration, like `30s`, `12h` or `7d`",
}


def _parse(option: dataclasses.Field[Any], source: str, raw: Any) -> Any:
    kind = option.metadata["kind"]
    low = option.metadata.get("low")
    if kind == "size" and low == 0 and raw in (0, "0") and raw is not False:
        return 0
    if kind == "int":
        return parse_int(source, raw, low or 0, option.metadata["high"])
    if kind == "choice":
        return parse_choice(source, raw, type(option.default))
    if kind == "duration":
        return _parse_duration(source, raw, low or 0)
    return _PARSERS[kind](source, raw)


def _parse_text(key: str, value: Any) -> str:
    if value is False and key in ("http", "--http"):
        return "off"  # YAML reads a bare off as a boolean
    if not isinstance(value, str):
        raise ConfigError(key, f"expected text, got {value!r}")
    return value


def _parse_list(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_parse_text(key, one) for one in values]


def _parse_duration(key: str, value: Any, low: int) -> int:
    """Seconds of 30, "30s", "12h" or "7d"."""
    match = re.fullmatch(r"\s*([0-9]{1,30})\s*([a-z]*)\s*", str(value))
    unit = _SECONDS.get(match.group(2)) if match else None
    if match is None or unit is None:
        raise ConfigError(key, f'{value!r} is not a duration; write it like "30s", "12h" or "7d"')
    seconds = int(match.group(1)) * unit
    if seconds < low:
        raise ConfigError(key, f"must be at least {low} s, got {value!r}")
    if seconds > _MOST_SECONDS:
        raise ConfigError(key, f"must be at most {_MOST_SECONDS // 86400}d, got {value!r}")
    return seconds


def _parse_quotas(key: str, value: Any) -> Quotas:
    """From "4GiB", "ab12=4GiB", a list of these, or a map with "default" for everyone else."""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):  # YAML reads 012345 as 5349
                raise ConfigError(key, f"{name!r} is a number to YAML; write prefixes in quotes")
        entries = [("" if name == "default" else name, size) for name, size in value.items()]
    else:
        for one in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            prefix, separator, size = str(one).rpartition("=")
            entries.append((prefix, size if separator else one))
    quotas: dict[str, int] = {}
    for prefix, size in entries:
        if not re.fullmatch(r"[0-9a-fA-F]*", prefix):
            raise ConfigError(key, f"{prefix!r} is not the start of a namespace in hex")
        quotas[prefix.lower()] = parse_size(key, size)
    return quotas


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "size": parse_size,
    "bool": parse_bool,
    "path": lambda key, value: os.path.expanduser(_parse_text(key, value)),  # as shells do
    "text": _parse_text,
    "list": _parse_list,
    "quotas": _parse_quotas,
}


def _choices(option: dataclasses.Field[Any]) -> list[str]:
    choices: type[enum.Enum] = type(option.default)
    return [str(choice.value) for choice in choices]


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default is not dataclasses.MISSING:
        return option.default
    assert option.default_factory is not dataclasses.MISSING
    return option.default_factory()


def _show(value: Any, kind: str) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if kind == "size":
        return format_size(value) if value else "0"
    if kind == "duration":
        return f"{value}s" if value else "0"
    if kind == "bool":
        return str(value).lower()
    if kind == "list":
        return ", ".join(value)
    return str(value) if value else ""
