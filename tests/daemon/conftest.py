"""Daemons for the tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient

StartDaemon = Callable[..., DaemonProcess]
Connect = Callable[..., RawClient]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, unlike tmp_path: socket paths are limited to 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(folder: Path) -> Iterator[StartDaemon]:
    """Starts daemons that end with the test: `start("--memory", "64MiB", …)`."""
    started: list[DaemonProcess] = []

    def start_one(*arguments: str, **more: object) -> DaemonProcess:
        own = folder / str(len(started))
        own.mkdir()
        daemon = DaemonProcess(own, *(arguments or ("--memory", "64MiB")), **more)  # type: ignore[arg-type]
        started.append(daemon)
        return daemon.start()

    yield start_one
    for daemon in started:
        daemon.end()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients that are closed with the test: `connect(daemon.endpoint)`; each has sent `hello`
    unless `greet=False`."""
    clients: list[RawClient] = []

    def connect_one(endpoint: str, greet: bool = True, **hello: object) -> RawClient:
        client = RawClient(endpoint)
        clients.append(client)
        if greet:
            client.hello(**hello)  # type: ignore[arg-type]
        return client

    yield connect_one
    for client in clients:
        client.close()
