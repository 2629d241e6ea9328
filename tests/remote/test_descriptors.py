"""The client recovers after the process was out of file descriptors or threads for a while."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.remote.engine import IDENTITY, within
from tests.remote.test_lookup_leases import ask, fill, open_store
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.errors import ArenaError, ConnectionLost
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.shared_memory import attach


@pytest.mark.parametrize("what", ["return", "attach"])
def test_threads_survive_a_lack_of_descriptors(daemon: DaemonProcess, what: str) -> None:
    store = open_store(daemon)
    fill(store)
    store.close()
    done = subprocess.run(
        [sys.executable, "-m", "tests.remote.without_descriptors", what, daemon.ipc],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "well", done.stderr
    eventually(lambda: leases_of(daemon) == 0)


def fails_once(call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    errors = [error]

    def failing(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*args, **options)

    return failing


@pytest.mark.parametrize("what", ["Context", "Context.socket"])
def test_connection_without_descriptors_raises_connection_lost(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name = f"vllm_tiered_kv.remote.connection.zmq.{what}"
    call = zmq.Context if what == "Context" else zmq.Context.socket
    monkeypatch.setattr(name, fails_once(call, zmq.ZMQError(errno.EMFILE)))
    store = open_store(daemon)
    connection = Connection(Settings(store.address), IDENTITY.hello())
    with pytest.raises(ConnectionLost, match="cannot open a socket"):
        connection.open(within(20))
    connection.open(within(20))
    connection.close()
    store.close()


def test_attach_without_descriptors_raises_arena_error(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(daemon)
    assert store.address.arena_path is not None
    name = "vllm_tiered_kv.remote.shared_memory.socket.socket"
    monkeypatch.setattr(
        name, fails_once(lambda: None, OSError(errno.EMFILE, "Too many open files"))
    )
    with pytest.raises(ArenaError, match="Too many open files"):
        attach(store.address.arena_path, "test", 20)
    store.close()


def test_release_thread_survives_any_exception(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(daemon)
    fill(store)
    local = LocalDaemon(store)
    match = ask(local)
    memory = local.current
    assert memory is not None
    assert match.lease is not None
    memory.settle = fails_once(memory.settle, ValueError("nobody expected this"))  # type: ignore[method-assign]
    match.lease.release()
    eventually(lambda: leases_of(daemon) == 0)
    assert "nobody expected this" in caplog.text
    local.close()
    store.close()


def test_leases_are_released_once_a_thread_can_start(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's own thread may be the first to release: it must not fail."""
    store = open_store(daemon)
    fill(store)
    local = LocalDaemon(store)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        leases = [ask(local).lease, ask(local).lease]
        assert leases[0] is not None
        leases[0].release()
    assert leases_of(daemon) > 0
    assert leases[1] is not None
    leases[1].release()
    eventually(lambda: leases_of(daemon) == 0)
    local.close()
    store.close()


def test_attach_thread_survives_any_exception(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(daemon)
    failing = fails_once(store.attach, ValueError("nobody expected this"))
    store.attach = failing  # type: ignore[method-assign]
    regions = SharedRegions({daemon.ipc: store}, None, None)
    eventually(lambda: regions.of(daemon.ipc) is not None)
    assert "nobody expected this" in caplog.text
    regions.close()
    store.close()
