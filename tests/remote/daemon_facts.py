"""Statistics of a daemon, queried over a separate connection."""

from __future__ import annotations

from typing import Any

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient
from tests.remote.engine import identity
from vllm_tiered_kv.wire.messages import Info


def leases_of(daemon: DaemonProcess) -> int:
    leases = _facts(daemon)["leases"]
    assert isinstance(leases, int)
    return leases


def pins_of(daemon: DaemonProcess) -> int:
    pins = _facts(daemon)["pins"]
    assert isinstance(pins, int)
    return pins


def requests_of(daemon: DaemonProcess) -> dict[str, int]:
    """Returns how many requests the daemon has served, by verb."""
    return dict(_facts(daemon)["requests"])


def namespaces_of(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """Returns client and usage of each namespace that holds blocks, by its name."""
    with RawClient(daemon.endpoint) as client:
        client.ask(identity(1, name="an observer").hello())
        rows = client.ask(Info()).facts["by_namespace"]
    return {name: row for name, row in rows.items() if row["memory_blocks"]}


def _facts(daemon: DaemonProcess) -> dict[str, Any]:
    with RawClient(daemon.endpoint) as client:
        client.ask(identity(1, name="an observer").hello())
        return client.stats()
