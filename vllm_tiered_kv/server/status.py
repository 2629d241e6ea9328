"""`tiered-kv-server status`: asks a daemon for its properties and statistics."""

from __future__ import annotations

import json
from typing import Any

from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.inquiry import Inquiry


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
    curve = CurveKeys.load(secret_key, server_key) if server_key and secret_key else None
    with Inquiry(address, timeout_s, curve) as daemon:
        info, stats = daemon.info(), daemon.stats()
    if as_json:
        print(json.dumps({"info": info, "stats": stats}, indent=1))
        return 0
    by_namespace = info.pop("by_namespace", {})  # absent from older daemons
    for facts in (info, stats):
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
