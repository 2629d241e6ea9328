"""`tiered-kv-server status`: asks a daemon for its properties and statistics."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from vllm_tiered_kv.errors import ConfigError, RemoteError, TieredKVError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.server.net.curve import load_server_keys, read_public_key
from vllm_tiered_kv.wire.limits import PROTOCOL_VERSION
from vllm_tiered_kv.wire.messages import Hello, Info, InfoReply, Stats, StatsReply


class StatusError(TieredKVError, RuntimeError):
    """The daemon did not answer, or refused to."""


def show_status(
    endpoint: str,
    server_key: str | None,
    secret_key: str | None,
    timeout_s: float,
    as_json: bool = False,
) -> int:
    if bool(server_key) != bool(secret_key):
        raise ConfigError("status", "--server-key and --secret-key belong together")
    address = ServerAddress.parse(endpoint, "status")
    curve = None
    if server_key and secret_key:
        own = load_server_keys(secret_key)
        curve = CurveKeys(read_public_key(server_key), own.public, own.secret)
    if (absent := address.why_absent()) is not None:
        raise StatusError(f"{endpoint}: {absent}")
    # A client that names no block lengths does not register a namespace.
    hello = Hello(PROTOCOL_VERSION, "status", secrets.token_bytes(32), 1, [], "", b"")
    connection = Connection(Settings(address, timeout_s, curve), hello)
    deadline = time.monotonic() + timeout_s
    try:
        info = connection.call(Info(), InfoReply, deadline=deadline)
        stats = connection.call(Stats(), StatsReply, deadline=deadline)
    except RemoteError as error:
        raise StatusError(
            f"no answer from {endpoint}: {error}; is it running, and do the keys match?"
        ) from error
    finally:
        connection.close()
    if as_json:
        print(json.dumps({"info": info.facts, "stats": stats.facts}, indent=1))
        return 0
    by_namespace = info.facts.pop("by_namespace", {})  # absent from older daemons
    for facts in (info.facts, stats.facts):
        print("\n".join(_lines(facts)))
    print("\n".join(_table(by_namespace)))
    return 0


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            shown = ", ".join(f"{label} {_show(name, inner)}" for label, inner in value.items())
        elif isinstance(value, list):
            shown = ", ".join(map(str, value))
        else:
            shown = _show(name, value)
        lines.append(f"{name:22} {shown}")
    return lines


def _table(by_namespace: dict[str, dict[str, Any]]) -> list[str]:
    """A line per namespace: its blocks in each tier, and the client that last used it."""
    lines = [""] if by_namespace else []
    for namespace, row in by_namespace.items():
        held = [
            f"{name.removesuffix('_blocks')} {row[name]} blocks, "
            f"{_rounded(row[name.replace('_blocks', '_bytes')])}"
            for name in row
            if name.endswith("_blocks")
        ]
        # Escaped as in the daemon's log: a client's name may contain line breaks.
        who = repr(row.get("client", "")) if row.get("client") else "not seen lately"
        lines.append(f"namespace {namespace}  {'; '.join(held)}  {who}")
    return lines


def _rounded(nbytes: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f}{unit}"
    return f"{nbytes}B"


def _show(name: str, value: Any) -> str:
    is_size = name in ("tiers", "largest_block") or name.endswith("_bytes")
    return f"{value} ({format_size(value)})" if is_size and value >= 1 << 20 else str(value)
