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
from typing import Any

from vllm_tiered_kv.config import Eviction
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import (
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
from vllm_tiered_kv.stores.registry import BackingOptions, check
from vllm_tiered_kv.stores.ssd.settings import FsyncPolicy

Quotas = Mapping[str, int]
"""Hex prefix of a namespace -> bytes. The empty prefix applies if no longer one matches."""


class LogLevel(str, enum.Enum):
    """The least severe messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class ServerOptions:
    """All options of the daemon, validated one by one. Build it with `load`."""

    memory: int = size(
        4 << 30,
        "Shared memory of the memory tier. An exact limit. The largest block it accepts is "
        "1/32 of it, at most 256MiB.",
    )
    eviction: Eviction = choice(
        Eviction.LRU,
        "Eviction policy of the memory tier. `s3fifo` resists scans.",
    )
    huge_pages: bool = boolean(
        False,
        "Use the system's reserved huge pages (`vm.nr_hugepages`) for the memory tier; the "
        "daemon does not start if there are too few.",
    )
    prefault: bool = boolean(
        True,
        "Allocate all memory at start, in the background. Without it, memory is allocated as "
        "blocks arrive, which slows down the first ones.",
    )
    ssd: str = path(
        "",
        "Folder of the SSD tier, on a local file system. Only one daemon at a time may use "
        "it. Without this option and without `backing`, nothing outlives the daemon.",
    )
    ssd_space: int = size(
        100 << 30, "Disk space of the SSD tier, allocated at start. An exact limit."
    )
    ssd_eviction: Eviction = choice(Eviction.LRU, "Eviction policy of the SSD tier.")
    ssd_fsync: FsyncPolicy = choice(
        FsyncPolicy.GROUP,
        "What a block acknowledged as durable survives. `group`: a power failure; concurrent "
        "writes share their syncs. `never`: only a crash of the daemon.",
    )
    backing: str = text(
        "",
        "A slower tier behind the others, shared by many daemons: `file:///mnt/kv` is a "
        "folder on a shared file system and needs `backing_space`, `backing_ttl` or both; "
        "`redis://HOST:PORT` is a Redis server or cluster, `rediss://` the same with TLS; "
        "`mooncake://HOST:PORT` is the master of a Mooncake Store; `s3://BUCKET` is a bucket of an "
        "S3 service.",
    )
    backing_space: int = size(
        0, "Size to which garbage collection shrinks the backing folder. 0: no limit.", zero=True
    )
    backing_ttl: int = duration(
        0,
        "Garbage collection removes blocks from the backing folder that were not used for "
        "this long; at least 20min. 0: never.",
    )
    backing_timeout: int = duration(
        2,
        "How long the daemon waits for the backing tier: for an answer, or for blocks (up to "
        "eight or 8 MiB) once they are being read. After that a block counts as a miss and a "
        "delete fails. A flush or shutdown gives up on a backing tier that accepts no writes for "
        "ten times as long.",
        low=1,
    )
    listen: list[str] = texts(
        ["tcp://127.0.0.1:9527"],
        "Where clients connect: `tcp://ADDRESS:PORT`, or `ipc:///PATH` for processes of the "
        "same user on this host, which can map the memory tier. An address other than "
        "loopback requires keys.",
        "ENDPOINT",
    )
    http: str = switchable_text(
        "127.0.0.1:9528",
        "Address of the status page (`/`), `/metrics` and `/healthz`; `off` disables all. An "
        "address other than loopback, such as `0.0.0.0:9528`, needs `http_token` or `http_open`.",
    )
    http_token: str = path(
        "",
        "File with a token of 16 to 256 characters. `/metrics` is then only for requests with the "
        "header `Authorization: Bearer TOKEN`, also on loopback, unless `http_open` is set, and "
        "the status page asks for the token; `/healthz` is for all.",
    )
    http_open: bool = boolean(
        False,
        "Serve `/metrics` to everyone who reaches the `http` address, also without the token of "
        "`http_token`. Metrics name models and hold no content. The status page, which shows what "
        "the daemon logged, stays for this host or, with `http_token`, for those with the token.",
    )
    secret_key: str = path(
        "",
        "File with the daemon's secret CURVE key, written by `keygen`. With it every tcp "
        "connection is encrypted, and only the clients in `clients` may connect.",
    )
    clients: str = path(
        "",
        "Public keys of the clients that may connect: a folder of `.key` files, or a file "
        "with one key per line, followed by `read-only` for a client that may only read.",
    )
    memory_quota: Quotas = quotas(
        {},
        "Memory limit per namespace: a size for every namespace, or `PREFIX=SIZE` for "
        "namespaces whose hex name starts with PREFIX. Rounded down to whole slabs, but at "
        "least one; a slab is 1/32 of the memory, at most 256MiB.",
    )
    ssd_quota: Quotas = quotas({}, "The same for the SSD tier.")
    write_queue: int = size(
        0,
        "Write-behind limit: bytes of blocks that wait in memory to be written to a slower "
        "tier. Blocks beyond it are offered again before they are evicted, and are written by"
        " a flush. 0: a quarter of the memory, divided among the slower tiers.",
        zero=True,
    )
    workers: int = integer(
        16,
        "Threads that check, read and look up blocks. Other threads copy received blocks.",
        low=1,
        high=1024,
    )
    # libzmq assigns a connection to the thread with the fewest sockets, listening ones included.
    # With four threads and two endpoints, two of a client's four connections would share a thread.
    io_threads: int = integer(
        8, "Threads that move bytes between sockets and memory.", low=1, high=64
    )
    max_sessions: int = integer(
        4096,
        "Maximum number of sessions. Beyond it, the session idle for longest is closed and "
        "its client must send `hello` again.",
        low=1,
        high=1 << 20,
    )
    network_memory: int = size(
        2 << 30,
        "Limit for the messages of all clients, in addition to `memory`: messages being "
        "received, requests waiting for an answer, and replies that clients have not read. "
        "When it is exceeded, the clients that use the most are refused or disconnected.",
    )
    stall_timeout: int = duration(
        30,
        "The daemon disconnects a client that reads none of its replies for this long, a tcp "
        "client that stops sending in the middle of a message for this long, and an `ipc://` "
        "client that is idle for ten times as long, which loses nothing.",
        low=1,
    )
    log_level: LogLevel = choice(LogLevel.INFO, "Verbosity of the log, which goes to stderr.")

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
            raise ConfigError("memory", f"{self.memory} bytes are too few; use at least 1MiB")
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
        if (backing := self.backing_options) is not None:
            check(backing)

    def _check_use(self, given: Mapping[str, Any]) -> None:
        """Rejects options of a tier that is not configured: the user expects that tier to exist."""
        for name in ("ssd_space", "ssd_quota"):
            if given.get(name) and not self.ssd:
                raise ConfigError(name, "there is no SSD tier; name its folder with ssd")
        for name in ("backing_space", "backing_ttl"):
            if given.get(name) and not self.backing:
                raise ConfigError(name, "there is no backing tier; name its URL with backing")

    @property
    def backing_options(self) -> BackingOptions | None:
        if not self.backing:
            return None
        return BackingOptions(
            self.backing, self.backing_space, self.backing_ttl, float(self.backing_timeout)
        )


def quota_of(quotas: Quotas, namespace: bytes) -> int | None:
    """The quota of this namespace, or of those that start with these bytes: that of the longest
    matching prefix."""
    if not quotas:  # fast path: called for every block
        return None
    name = namespace.hex()
    fitting = [prefix for prefix in quotas if name.startswith(prefix[: len(name)])]
    return quotas[max(fitting, key=len)] if fitting else None


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each option; flags that are not given are absent from the result."""
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
