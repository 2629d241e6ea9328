"""Addresses of daemons, and what an engine tells a daemon about itself.

An address is `tcp://host:port` or `ipc:///path`. Placement hashes its text, so that engines that
share daemons must write addresses alike; parsing brings them to a canonical form.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tiered_kv.core.key import CONTENT_BYTES, RankTag
from vllm_tiered_kv.core.store import NAMESPACE_BYTES, StoreKey, announced_namespace
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.wire.limits import MAX_TEXT, PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import Hello

ARENA_SUFFIX = ".arena"
"""Suffix of the socket that hands out shared memory, in the folder of the `ipc://` socket."""

_MODEL = ", model "
_PROCESS = re.compile(r" of process \d+$")
_MAX_PATH = 107  # bytes in sockaddr_un, without the final zero
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_EXAMPLES = '"tcp://host:9527" or "ipc:///run/tiered-kv.sock"'


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A valid address of a daemon, in its canonical form. `parse` makes it."""

    endpoint: str

    @classmethod
    def parse(cls, text: object, key: str = "remote") -> ServerAddress:
        """Raises ConfigError for the option `key` if the value is not a valid address."""
        if not isinstance(text, str):
            raise ConfigError(key, f"expected an address such as {_EXAMPLES}, got {text!r}")
        text = text.strip()
        if text.startswith("tcp://"):
            match = _TCP.fullmatch(text)
            if match is None or not 0 < int(match.group(2)) < 65536:
                raise ConfigError(key, f'{text!r} is not like "tcp://host:9527"')
            return cls(f"tcp://{match.group(1).lower()}:{int(match.group(2))}")
        if text.startswith("ipc://"):
            path = text.removeprefix("ipc://")
            if not path.startswith("/") or path.endswith("/") or "\0" in path:
                raise ConfigError(key, f'{text!r} is not an absolute path like "ipc:///run/x.sock"')
            if len((path + ARENA_SUFFIX).encode()) > _MAX_PATH:
                longest = _MAX_PATH - len(ARENA_SUFFIX)
                raise ConfigError(key, f"the path of {text!r} is longer than {longest} bytes")
            return cls(text)
        raise ConfigError(key, f"{text!r} is not an address; write it like {_EXAMPLES}")

    @property
    def socket_path(self) -> str | None:
        """The path of an `ipc://` address; None for TCP."""
        if not self.endpoint.startswith("ipc://"):
            return None
        return self.endpoint.removeprefix("ipc://")

    @property
    def arena_path(self) -> str | None:
        """The socket that hands out shared memory; None for TCP."""
        return None if self.socket_path is None else self.socket_path + ARENA_SUFFIX

    def why_absent(self) -> str | None:
        """Returns why certainly no daemon runs at this address; None if one may run. Never waits:
        only the state of a local socket is certain."""
        if self.socket_path is None:
            return None
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self.socket_path)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                return error.strerror
            except OSError:
                return None
        return None

    def why_not_connected(self) -> str:
        """Returns the likely reason of a failed connection; zmq reports none."""
        if self.socket_path is not None:
            try:
                os.stat(self.socket_path)
                is_accessible = os.access(self.socket_path, os.W_OK)
            except OSError as error:
                is_accessible = not isinstance(error, PermissionError)
            if not is_accessible:
                return "its socket belongs to another user; run both as the same user"
        return "nothing listens there"

    def __str__(self) -> str:
        return self.endpoint


def engine_name(model: str) -> str:
    """What an engine calls itself at a daemon."""
    return f"vLLM, pid {os.getpid()}{_MODEL}{model}"[:MAX_TEXT]


def model_in(name: str) -> str:
    """The model in the name of an engine; empty for other clients."""
    return name.partition(_MODEL)[2]


def without_process(name: str) -> str:
    """What remains of a client's name when it restarts: an engine's model, or what another client
    calls itself."""
    return model_in(name) or _PROCESS.sub("", name)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine tells a daemon about itself in `hello`, and the form of its keys."""

    namespace: bytes  # 32 bytes: `core.key.Fingerprint.namespace`
    block_bytes: tuple[int, ...]  # every length that a block of one rank can have
    layout: str
    client: str  # name in the daemon's log
    key_bytes: int = CONTENT_BYTES + 1 + len(RankTag().encode())  # length without the namespace

    def hello(self, arena_token: bytes = b"") -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            self.client,
            announced_namespace(self.namespace),
            self.key_bytes,
            sorted(set(self.block_bytes)),
            self.layout,
            arena_token,
        )

    def wire_keys(self, keys: Sequence[StoreKey]) -> list[bytes] | None:
        """Returns all keys without their namespace; None if one has another namespace or length."""
        ours = [wire for key in keys if (wire := self.wire_key(key)) is not None]
        return ours if len(ours) == len(keys) else None

    def wire_key(self, key: StoreKey) -> bytes | None:
        """Returns the key without its namespace; None if it has another namespace or length."""
        is_ours = (
            len(key) == NAMESPACE_BYTES + self.key_bytes
            and key[:NAMESPACE_BYTES] == self.namespace[:NAMESPACE_BYTES]
        )
        return key[NAMESPACE_BYTES:] if is_ours else None
