"""A daemon takes all the descriptors it may have, and does without more."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import TIMEOUT_S, attach, blocks, key
from tests.patience import eventually

NOFILE = resource.RLIMIT_NOFILE


def open_descriptors(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_descriptor_limit_is_raised_to_hard_limit(start: StartDaemon) -> None:
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (min(soft, 512), hard))  # which the daemon inherits
    try:
        daemon = start()
    finally:
        resource.setrlimit(NOFILE, (soft, hard))
    assert resource.prlimit(daemon.pid, NOFILE) == (hard, hard)


def test_attach_without_descriptors_waits(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    client = connect(daemon.endpoint)
    client.put(blocks(1))
    _, hard = resource.prlimit(daemon.pid, NOFILE)
    resource.prlimit(daemon.pid, NOFILE, (open_descriptors(daemon), hard))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.settimeout(TIMEOUT_S)
        waiting.connect(f"{daemon.ipc_path}.arena")
        eventually(lambda: "attach" in daemon.logs)
        time.sleep(2.5)
        assert client.get([key(0)]) == blocks(1)
        assert daemon.logs.count("\n") < 20
        resource.prlimit(daemon.pid, NOFILE, (hard, hard))
        waiting.send(b"\x80")  # an empty map
        assert b"is not supported" in waiting.recv(4096)
    assert daemon.logs.count("processes cannot attach for now") == 1
    attach(daemon.ipc_path).close()
    assert daemon.terminate() == 0
    assert not Path(f"{daemon.ipc_path}.arena").exists()
