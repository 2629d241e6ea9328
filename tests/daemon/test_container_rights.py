"""A daemon with the rights that deploy/kubernetes/ leaves it: without capabilities, and on a root
file system that cannot be written."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect
from tests.daemon.raw_client import attach, blocks, key
from tests.patience import eventually

# The folders that pods mount are writable, all else is not.
CONTAINER = """
set -e
mount --make-rprivate /
mount --bind "$0" "$0"
mount -o remount,ro,bind /
if touch "$0.written" 2> /dev/null; then exit 99; fi
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-o", "remount,ro,bind", "/"]
    has_tools = all(map(shutil.which, ("unshare", "setpriv")))
    return has_tools and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_daemon_without_capabilities_serves_maps_and_writes(folder: Path, connect: Connect) -> None:
    ipc = folder / "kv.sock"
    options = {"memory": "16MiB", "ssd": folder / "ssd", "ssd-space": "16MiB", "http": "off"}
    words = [f"--{name}={value}" for name, value in options.items()]
    program = [sys.executable, "-m", "vllm_tiered_kv.server.cli", f"--listen=ipc://{ipc}", *words]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", CONTAINER, str(folder), *program],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: process.poll() is not None or Path(f"{ipc}.arena").exists())
        assert process.poll() is None
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000\n" in status
        attached = attach(ipc)
        client = connect(f"ipc://{ipc}", arena=attached.token)
        client.put(blocks(3))
        assert client.lend([key(0)])
        attached.close()
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        print(log)
    assert process.returncode == 0
    assert "everything is written" in log
