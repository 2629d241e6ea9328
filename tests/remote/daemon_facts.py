"""What a daemon says of itself, asked by somebody who has no part in what is tested."""

from __future__ import annotations

from typing import Any

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient
from tests.remote.engine import identity


def leases_of(daemon: DaemonProcess) -> int:
    leases = _facts(daemon)["leases"]
    assert isinstance(leases, int)
    return leases


def requests_of(daemon: DaemonProcess) -> dict[str, int]:
    """How many it has served, by verb."""
    return dict(_facts(daemon)["requests"])


def _facts(daemon: DaemonProcess) -> dict[str, Any]:
    with RawClient(daemon.endpoint) as client:
        client.ask(identity(1, name="a looker-on").hello())
        return client.stats()
