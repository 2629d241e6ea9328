"""Connections to a daemon on this host over its `ipc://` socket."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.remote.engine import IDENTITY, items, keys
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.server.cli import main


def test_ipc_connection_ignores_curve_keys(tmp_path: Path) -> None:
    """A list of daemons has one key pair; file permissions protect local sockets."""
    assert main(["keygen", str(tmp_path), "server"]) == 0
    assert main(["keygen", str(tmp_path / "clients"), "engine"]) == 0
    secret = tmp_path / "server.key_secret"
    arguments = ("--secret-key", str(secret), "--clients", str(tmp_path / "clients"))
    engine = CurveKeys.load(tmp_path / "clients" / "engine.key_secret", tmp_path / "server.key")
    with DaemonProcess(tmp_path, "--memory", "64MiB", *arguments) as daemon:
        for n, address in enumerate((daemon.ipc, daemon.endpoint)):
            store = RemoteStore(
                address, IDENTITY, timeout_s=20.0, connect_timeout_s=5.0, curve=engine
            )
            assert store.put(items(keys(f"local {n}", 1))) == [PutResult.STORED]
            store.close()


def why_not(path: Path) -> str:
    connection = Connection(
        Settings(ServerAddress.parse(f"ipc://{path}"), connect_timeout_s=600.0), IDENTITY.hello()
    )
    with pytest.raises(ConnectionLost) as lost:
        connection.open(time.monotonic() + 60)
    connection.close()
    return str(lost.value)


def test_why_not_connected_names_another_users_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nothing listens there" in why_not(tmp_path / "kv.sock")
    with socket.socket(socket.AF_UNIX) as bound:  # like the socket of a dead daemon
        bound.bind(str(tmp_path / "kv.sock"))
    assert "nothing listens there" in why_not(tmp_path / "kv.sock")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    assert "its socket belongs to another user" in why_not(tmp_path / "kv.sock")
