"""The URL of a Redis: `redis://[USER[:PASSWORD]@]HOST[:PORT][,HOST[:PORT]…][/DATABASE][?OPTIONS]`.

`rediss://` is the same with TLS. Several hosts are members of one cluster, from which the others
are found. `docs/stores.md` describes the options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import unquote

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import parse_duration
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.store_url import (
    DEFAULT_PREFIX,
    Address,
    checked_prefix,
    parse_address,
    parse_query,
    split_url,
)

USERNAME_VARIABLE = "TIERED_KV_REDIS_USERNAME"
PASSWORD_VARIABLE = "TIERED_KV_REDIS_PASSWORD"

_DEFAULT_PORT = 6379
_OPTIONS = ("ttl", "prefix")
_TLS_OPTIONS = ("cacert", "cert", "key")


@dataclass(frozen=True)
class RedisSettings:
    """Where a Redis is, who this client is there, and how its blocks are named."""

    addresses: tuple[Address, ...]
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    tls: bool = False
    cacert: str | None = None  # file; without it the system's authorities are trusted
    cert: str | None = None  # file with this client's certificate
    key: str | None = None  # file with its secret key
    prefix: str = DEFAULT_PREFIX
    ttl_s: int = 0  # blocks unused for longer expire; 0: they do not
    timeout_s: float = 2.0  # of a call, except that a put as a whole may take ten times as long


def parse_settings(options: BackingOptions) -> RedisSettings:
    """Raises ConfigError, whose text never contains the password."""
    if options.capacity_bytes:
        raise ConfigError(
            "backing_space", "is for file:// only; limit a Redis with its own option maxmemory"
        )
    if options.ttl_s:
        raise ConfigError("backing_ttl", "is for file:// only; write it as redis://…/?ttl=7d")
    url = split_url(options.url)
    if "@" in url.path + url.query + url.fragment:  # errors below would show a part of the password
        raise ConfigError(
            "backing", "write / ? # and @ of a password, or @ of an option, as %2F etc."
        )
    user_info, _, hosts = url.netloc.rpartition("@")
    username, has_password, password = user_info.partition(":")
    is_tls = url.scheme == "rediss"
    given = parse_query(
        url.query,
        (*_OPTIONS, *_TLS_OPTIONS) if is_tls else _OPTIONS,
        lambda name: "; use rediss:// for TLS" if name in _TLS_OPTIONS else "",
    )
    if bool(given.get("cert")) != bool(given.get("key")):
        raise ConfigError("backing", "cert and key belong together; set both or neither")
    return RedisSettings(
        tuple(parse_address(host, _DEFAULT_PORT) for host in hosts.split(",")),
        unquote(username) or os.environ.get(USERNAME_VARIABLE) or None,
        (unquote(password) if has_password else os.environ.get(PASSWORD_VARIABLE)) or None,
        _database(url.path),
        is_tls,
        given.get("cacert"),
        given.get("cert"),
        given.get("key"),
        checked_prefix(given.get("prefix", DEFAULT_PREFIX)),
        parse_duration("backing", given["ttl"], 1) if "ttl" in given else 0,
        # A little less than the daemon waits, so that calls end before it gives them up.
        0.9 * options.timeout_s,
    )


def _database(path: str) -> int:
    text = path.strip("/") or "0"
    if not (text.isascii() and text.isdigit()):
        raise ConfigError("backing", f"{path!r} is not the number of a database, like /0")
    return int(text)
