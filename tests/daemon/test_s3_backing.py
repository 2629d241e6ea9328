"""Daemons that share a bucket as their backing tier."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import blocks, key, wire
from tests.patience import eventually
from tests.stores.s3_servers import USER, S3Server, s3_server, use_credentials
from vllm_tiered_kv.core.store import Durability, PutResult

SIZE = 64 << 10


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    use_credentials(monkeypatch)
    with s3_server() as started:
        yield started


def backed_by(server: S3Server, timeout: str = "30s") -> list[str]:
    return ["--memory", "16MiB", "--backing", server.url(), "--backing-timeout", timeout]


def test_blocks_in_a_bucket_outlive_their_daemon(
    server: S3Server, start: StartDaemon, connect: Connect
) -> None:
    one = start(*backed_by(server))
    wanted = blocks(20, SIZE)
    client = connect(one.endpoint, block_bytes=[SIZE])
    client.put(wanted)
    assert client.put(blocks(1, SIZE, start=50), Durability.DISK) == [PutResult.STORED]
    client.ask(wire.Flush())
    one.kill()
    other = start(*backed_by(server))
    reader = connect(other.endpoint, block_bytes=[SIZE])
    assert reader.match([*wanted, key(99)]).tiers == [0, 0, 20]
    assert reader.get([*wanted, key(99)], stream=True) == wanted
    assert reader.match(list(wanted)).tiers == [20, 0, 0]
    assert reader.stats()["backing_absent"] == 0
    assert other.terminate() == 0
    assert "Traceback" not in one.logs + other.logs


def test_daemon_without_its_service_serves_and_uses_it_once_it_is_back(
    server: S3Server, start: StartDaemon, connect: Connect
) -> None:
    server.kill()
    daemon = start(*backed_by(server, timeout="2s"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(4, SIZE)
    assert client.put(wanted) == [PutResult.STORED] * 4
    assert client.get([*wanted, key(99)]) == wanted, "the rest are misses, in time"
    assert client.stats()["backing_absent"] == 1
    server.start()
    eventually(lambda: client.match([key(99)]).count or client.stats()["backing_absent"] == 0)
    client.ask(wire.Flush())  # writes what could not be written before
    other = start(*backed_by(server))
    assert connect(other.endpoint, block_bytes=[SIZE]).match(list(wanted)).tiers == [0, 0, 4]
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.logs


def test_daemon_with_wrong_credentials_says_so_and_hides_them(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_credentials(monkeypatch, (USER[0], "hush"))
    said = subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", "--memory", "16MiB", "--http", "off",
         "--listen", "tcp://127.0.0.1:*", "--backing", server.url()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert said.returncode == 2
    assert "s3://blocks: SignatureDoesNotMatch" in said.stderr
    assert not [secret for secret in (USER[0], "hush") if secret in said.stderr]
    assert "Traceback" not in said.stderr
