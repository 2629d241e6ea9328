"""A worker that is opened and closed leaves nothing behind: pinned memory, device memory, threads,
file descriptors, mappings.

Pages that stay pinned leave the process with its mapping and are missed by the machine alone, so
this file wants a machine on which little else happens: `make gpu-test` runs it by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.daemon.daemon_process import DaemonProcess  # noqa: E402
from tests.gpu.opened_and_closed import ARENA_BYTES  # noqa: E402

pytestmark = pytest.mark.gpu

ROUNDS = 8


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "2GiB") as process:
            yield process


def held_after_rounds(*arguments: str) -> list[dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.opened_and_closed", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    print(done.stdout)
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_is_left_after_many_rounds(daemon: DaemonProcess) -> None:
    held = held_after_rounds(daemon.ipc, str(ROUNDS))
    # Two by two: those that closed early are compared with their like.
    for early, late in ((held[2], held[-2]), (held[3], held[-1])):
        assert early["available_bytes"] - late["available_bytes"] < ARENA_BYTES
        assert early["device_free_bytes"] - late["device_free_bytes"] < 32 << 20
        assert late["file_descriptors"] <= early["file_descriptors"]
        assert late["threads"] <= early["threads"]
        assert late["mappings"] <= early["mappings"] + 8


def test_memory_that_is_kept_would_be_noticed(daemon: DaemonProcess) -> None:
    first, *_, last = held_after_rounds(daemon.ipc, "3", "--keep-arenas")
    assert first["available_bytes"] - last["available_bytes"] > ARENA_BYTES
