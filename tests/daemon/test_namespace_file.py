"""The file with the shapes of namespaces: whole at any time, and written no more than is of use."""

from __future__ import annotations

import json
import stat
import threading
import time
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, NAMESPACE, wire
from tests.patience import eventually
from vllm_tiered_kv.server.tiers import namespace_file
from vllm_tiered_kv.server.tiers.namespace_file import FILE, NamespaceFile, Shape, read

MIB = 1 << 20
SOME = {bytes([n]) * 32: Shape(24, frozenset({n, 4096}), 'a "layout" \N{SNOWMAN}') for n in (1, 2)}


def test_namespace_file_roundtrip_is_equal(tmp_path: Path) -> None:
    for shapes in ({}, SOME):
        file = NamespaceFile(tmp_path / FILE, shapes.copy)
        file.change()
        file.close()
        assert read(tmp_path / FILE) == shapes
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_changes_during_write_cause_one_more_write(tmp_path: Path) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    snapshots = 0

    def snapshot() -> dict[bytes, Shape]:
        nonlocal snapshots
        snapshots += 1
        began.set()
        may_go_on.wait(60)
        return SOME

    file = NamespaceFile(tmp_path / FILE, snapshot)
    file.change()
    assert began.wait(60)
    for _ in range(1000):
        file.change()
    may_go_on.set()
    file.close()
    assert snapshots == 2


def test_close_without_change_writes_nothing(tmp_path: Path) -> None:
    NamespaceFile(tmp_path / FILE, SOME.copy).close()
    assert not (tmp_path / FILE).exists()


def test_failed_write_is_retried_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()  # in the way of it
    tries: list[float] = []

    def snapshot() -> dict[bytes, Shape]:
        tries.append(time.monotonic())
        return SOME

    file = NamespaceFile(tmp_path / FILE, snapshot)
    file.change()
    eventually(lambda: len(tries) == 2)
    for _ in range(1000):
        file.change()  # no reason to hurry
    eventually(lambda: len(tries) == 3)
    assert tries[1] - tries[0] > 1.9
    assert tries[2] - tries[1] > 3.9
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / FILE).rmdir()
    file.close()
    assert read(tmp_path / FILE) == SOME
    assert caplog.text.count("is written again") == 1
    assert caplog.text.count(str(tmp_path / FILE)) == 2


def test_close_after_failed_write_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).mkdir()
    file = NamespaceFile(tmp_path / FILE, SOME.copy)
    file.change()
    eventually(lambda: "cannot be written" in caplog.text)
    file.close()
    assert caplog.text.count("cannot be written") == 2, "and that was the last word"


@pytest.mark.parametrize("by_itself", [True, False])
def test_daemon_with_recovered_disk_writes_file(
    start: StartDaemon, connect: Connect, folder: Path, by_itself: bool
) -> None:
    ssd = folder / "ssd"
    daemon = start("--memory", "32MiB", "--ssd", str(ssd), "--ssd-space", "64MiB")
    (ssd / FILE).mkdir()  # in the way of it
    connect(daemon.endpoint)
    eventually(lambda: "cannot be written" in daemon.logs)
    (ssd / FILE).rmdir()
    if by_itself:
        eventually((ssd / FILE).exists)
    else:
        assert daemon.terminate() == 0
    assert list(read(ssd / FILE)) == [NAMESPACE]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 200_000,
        '{"version": 2}',
        '{"version": 1, "namespaces": []}',
        '{"version": 1, "namespaces": {"00": {"key_bytes": 1e999}}}',
        '{"version": 1, "namespaces": {"0": {}}}',
        "\N{SNOWMAN}",
    ],
)
def test_read_of_damaged_file_is_empty(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text(content, "utf-16")
    assert read(tmp_path / FILE) == {}
    (tmp_path / FILE).write_text(content, "utf-8")
    assert read(tmp_path / FILE) == {}
    assert caplog.text.count("is not used") == 2


def test_flood_of_namespaces_does_not_block_daemon(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    ssd = folder / "ssd"
    daemon = start("--memory", "32MiB", "--ssd", str(ssd), "--ssd-space", "64MiB")
    client = connect(daemon.endpoint, greet=False)
    before = daemon.peak_rss_bytes()
    end = time.monotonic() + 60  # a fraction of what it takes if each hello is written
    lengths = [4096 * (n + 1) for n in range(64)]
    for n in range(2000):
        client.send(wire.Hello(1, "x", n.to_bytes(32, "big"), KEY_BYTES, lengths, "l" * 256, b""))
        if n % 8 == 7:
            for _ in range(8):
                client.receive()
        assert time.monotonic() < end
    assert daemon.peak_rss_bytes() - before < 100 * MIB
    eventually((ssd / FILE).exists)
    json.loads((ssd / FILE).read_text())
    assert daemon.terminate() == 0
    known = json.loads((ssd / FILE).read_text())["namespaces"]
    assert len(known) == 2000
    assert known[bytes(32).hex()]["block_bytes"] == lengths


def test_namespace_file_is_private_and_no_symlink(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of somebody else")
    path = tmp_path / "namespaces.json"
    path.with_suffix(".tmp").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        namespace_file._write(path, {})
    assert precious.read_text() == "of somebody else"
    path.with_suffix(".tmp").unlink()
    path.with_suffix(".tmp").touch(0o644)  # left by a crash
    namespace_file._write(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
