"""Folders that do not answer when the daemon starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.backing_pipes import HUNG_BY_PIPES
from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import Refused, blocks, key, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import Durability, PutResult, StoreKey
from vllm_tiered_kv.errors import ConfigError, ErrorCode
from vllm_tiered_kv.server.tiers import backing as backing_module
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.shared_dir.backing import SharedDirBacking, open_store
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore
from vllm_tiered_kv.stores.shared_dir.tree import FOLDER, MARKER, MARKER_TEXT

PATIENCE_S = 60.0
TELLS_SOON = """
import os, sys
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.tiers import opening
from vllm_tiered_kv.stores.ssd import folder
opening._PROGRESS_INTERVAL_S = 0.2
folder.open_file = lambda path, flags: os.open(path, flags, 0o600)  # waits for a pipe's other end
sys.exit(cli.main())
"""


class HungFolder:
    """Opening it does not return: the file that says what it is is a pipe nobody writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        SharedDirStore(SharedDirSettings(str(folder))).close()
        self._marker = folder / FOLDER / MARKER
        self._marker.unlink()
        os.mkfifo(self._marker)

    def answer(self) -> None:
        with self._marker.open("wb") as file:  # when somebody reads it
            file.write(MARKER_TEXT)

    @property
    def arguments(self) -> list[str]:
        return [
            "--backing", f"file://{self.folder}", "--backing-space", "1GiB",
            "--backing-timeout", "1s",
        ]  # fmt: skip


@pytest.fixture
def hung(folder: Path) -> HungFolder:
    return HungFolder(folder / "shared")


@pytest.mark.slow
def test_daemon_with_hung_folder_uses_it_once_it_answers(
    hung: HungFolder, start: StartDaemon, connect: Connect
) -> None:
    daemon = start("--memory", "16MiB", *hung.arguments, program=HUNG_BY_PIPES)
    assert f"backing: file://{hung.folder} has not answered for 1 s" in daemon.logs
    client = connect(daemon.endpoint)
    assert client.put(blocks(4)) == [PutResult.STORED] * 4
    assert client.get([*blocks(4), key(99)]) == blocks(4), "a miss, in time"
    stats = client.stats()
    assert stats["backing_absent"] == 1
    assert stats["pending_write_blocks"]["backing"] == 4
    for request in (wire.Delete(24, [key(0)]), wire.Flush()):
        with pytest.raises(Refused) as refused:
            client.ask(request)
        assert refused.value.code is ErrorCode.NOT_WRITTEN
    assert client.put(blocks(1, start=5), Durability.DISK) == [PutResult.FAILED]
    hung.answer()
    eventually(lambda: not client.stats()["pending_write_blocks"]["backing"])
    assert client.stats()["backing_absent"] == 0
    assert "using it from now on" in daemon.logs
    client.ask(wire.Flush())
    assert client.put(blocks(1, start=6), Durability.DISK) == [PutResult.STORED]
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.logs
    kept = {path.stem[-48:] for path in (hung.folder / FOLDER / "blocks").rglob("*.blk")}
    assert {key(n).hex() for n in (1, 2, 3, 5, 6)} <= kept


@pytest.mark.slow
def test_daemon_with_hung_folder_stops(
    hung: HungFolder, start: StartDaemon, connect: Connect
) -> None:
    idle = start("--memory", "16MiB", *hung.arguments, program=HUNG_BY_PIPES)
    assert idle.terminate() == 0, "there is nothing that it should have"
    busy = start("--memory", "16MiB", *hung.arguments, program=HUNG_BY_PIPES)
    connect(busy.endpoint).put(blocks(3))
    assert busy.terminate() == 1
    assert "3 blocks could not be written to backing" in busy.logs
    assert "Traceback" not in idle.logs + busy.logs


def test_daemon_with_slow_ssd_waits_and_logs(folder: Path) -> None:
    ssd = folder / "ssd"
    ssd.mkdir()
    os.mkfifo(ssd / "FORMAT")
    daemon = DaemonProcess(folder, "--ssd", str(ssd), "--ssd-space", "64MiB")
    daemon.program = ["-c", TELLS_SOON]
    daemon.launch()
    try:
        told = f"ssd: {ssd} is not open yet after 1 s; the daemon waits for it to start"
        eventually(lambda: told in daemon.logs)
        with (ssd / "FORMAT").open("wb") as file:
            file.write(b"something else")
        assert daemon.wait() == 2
        assert "cannot be used" in daemon.logs
    finally:
        daemon.end()


# ---- the folder ---------------------------------------------------------------------------------


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_backing_open_failure_in_time_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backing = BackingTier(BackingOptions(f"file://{tmp_path / 'file'}"))
    with pytest.raises(ConfigError, match="Not a directory"):
        backing.open()
    assert not backing.is_open


def test_backing_open_failure_later_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backing_module, "_REOPEN_S", 0.05)
    (tmp_path / "folder").touch()
    backing = BackingTier(BackingOptions(f"file://{tmp_path / 'folder'}"))
    found: list[list[bool]] = []
    waiting = [
        in_a_thread(lambda: found.append(backing.contains([StoreKey(bytes(24))]))) for _ in range(2)
    ]
    eventually(lambda: caplog.text.count("retrying in") >= 2)
    assert found == []
    (tmp_path / "folder").unlink()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert found == [[False], [False]]
    backing.close()


def test_backing_opened_after_close_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SharedDirBacking] = []
    begun, gate = threading.Event(), threading.Event()

    def open_late(options: BackingOptions, on_unanswered: Callable[[], None]) -> SharedDirBacking:
        begun.set()
        assert gate.wait(PATIENCE_S)
        opened.append(open_store(options, on_unanswered))
        return opened[0]

    monkeypatch.setattr(backing_module, "open_store", open_late)
    backing = BackingTier(BackingOptions(f"file://{tmp_path}"))
    opening = in_a_thread(backing.open)
    assert begun.wait(PATIENCE_S)
    backing.close()
    gate.set()
    opening.join(PATIENCE_S)
    assert opened[0]._closed


def test_backing_closed_before_open_is_not_opened(tmp_path: Path) -> None:
    backing = BackingTier(BackingOptions(f"file://{tmp_path}"))
    backing.close()
    with pytest.raises(OSError, match="not opened before the daemon stopped"):
        backing.contains([StoreKey(bytes(24))])
    assert not list(tmp_path.iterdir())
