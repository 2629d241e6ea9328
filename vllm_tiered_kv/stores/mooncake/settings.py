"""The URL of a Mooncake Store: `mooncake://MASTER[:PORT][?OPTIONS]`.

`docs/stores.md` describes the options.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import parse_size
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.store_url import (
    DEFAULT_PREFIX,
    Address,
    checked_prefix,
    parse_address,
    parse_query,
    split_url,
)

_DEFAULT_PORT = 50051
_METRICS_PORT = 9003
_MAX_REPLICAS = 16
_PROTOCOLS = ("tcp", "rdma")
_OPTIONS = (
    "replicas", "protocol", "devices", "metadata", "host", "segment", "metrics_port", "prefix",
)  # fmt: skip


@dataclass(frozen=True)
class MooncakeSettings:
    """Where the master of a Mooncake Store is, and what kind of client this is."""

    master: Address
    replicas: int = 1
    protocol: str = "tcp"
    devices: str = ""  # network cards for rdma; empty: all
    metadata: str = "P2PHANDSHAKE"
    host: str = ""  # of this client, as store nodes reach it; empty: as the master sees it
    segment_bytes: int = 0  # memory that this client lends to the store
    metrics_port: int = _METRICS_PORT  # of the master
    prefix: str = DEFAULT_PREFIX
    timeout_s: float = 2.0


def parse_settings(options: BackingOptions) -> MooncakeSettings:
    if options.capacity_bytes or options.ttl_s:
        raise ConfigError(
            "backing_space" if options.capacity_bytes else "backing_ttl",
            "is for file:// only; the nodes of a Mooncake Store limit its memory, and its master "
            "evicts",
        )
    url = split_url(options.url)
    if url.path.strip("/") or url.fragment or "@" in url.netloc:
        raise ConfigError("backing", f"{options.url!r} is not like mooncake://host:{_DEFAULT_PORT}")
    given = parse_query(url.query, _OPTIONS)
    protocol = given.get("protocol", "tcp")
    if protocol not in _PROTOCOLS:
        raise ConfigError("backing", f"protocol={protocol} is not one of {', '.join(_PROTOCOLS)}")
    if given.get("devices") and protocol != "rdma":
        raise ConfigError("backing", "devices are for protocol=rdma")
    return MooncakeSettings(
        parse_address(url.netloc, _DEFAULT_PORT),
        _whole("replicas", given.get("replicas", "1"), 1, _MAX_REPLICAS),
        protocol,
        given.get("devices", ""),
        given.get("metadata") or MooncakeSettings.metadata,
        given.get("host", ""),
        0 if given.get("segment", "0") == "0" else parse_size("backing", given["segment"]),
        _whole("metrics_port", given.get("metrics_port", str(_METRICS_PORT)), 0, 65535),
        checked_prefix(given.get("prefix", DEFAULT_PREFIX)),
        # A little less than the daemon waits, so that a server is given up first.
        0.9 * options.timeout_s,
    )


def _whole(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ConfigError("backing", f"{name}={text} is not a number from {low} to {high}")
    return int(text)
