"""The parts that URLs of stores on a network have in common: addresses, options, key prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlsplit

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import redacted

DEFAULT_PREFIX = "tiered-kv"


class Address(NamedTuple):
    """Host and port of a server in the URL of a store."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text may show the password
        raise ConfigError(
            "backing",
            f"{redacted(url)!r} is not a URL; write [ and ] as %5B and %5D, except around the "
            "address of a host",
        ) from None


def parse_address(text: str, default_port: int) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "/" in text:
        raise ConfigError("backing", f"{text!r} is not an address like host:{default_port}")
    return Address(host, default_port if port is None else port)


def parse_query(
    query: str, known: Sequence[str], hint: Callable[[str], str] = lambda name: ""
) -> dict[str, str]:
    """The options of a URL; `hint` is what to say about an unknown one."""
    given: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            expected = ", ".join(known)
            raise ConfigError(
                "backing", f"unknown option {name!r}, expected one of {expected}{hint(name)}"
            )
        if name in given:
            raise ConfigError("backing", f"{name} is given more than once")
        given[name] = value
    return given


def checked_prefix(prefix: str) -> str:
    if not prefix.isascii() or not prefix.isprintable() or set(prefix) & set("{} "):
        raise ConfigError("backing", "prefix may have no spaces, braces or special characters")
    return prefix
