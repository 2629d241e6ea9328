"""docs/stores.md is enough to read blocks of a daemon: this reader uses nothing of the package."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.daemon.conftest import StartDaemon
from tests.daemon.test_by_hand import BLOCKS, HELLO, KEYS, Hand
from tests.stores.mooncake_servers import mooncake_servers
from tests.stores.redis_servers import redis_server
from tests.stores.s3_servers import s3_server, use_credentials

Fetch = Callable[[bytes], bytes | None]
FREE = bytes(range(32))
OF_ENGINE = FREE[:16] + hashlib.sha256(FREE[:16]).digest()[:16]


def file_reader(folder: Path) -> Fetch:
    def fetch(key: bytes) -> bytes | None:
        root = folder / "tiered-kv-shared-v1"
        assert (root / "FORMAT").read_text() == "tiered-kv shared directory, format 1\n"
        shard = f"{xxhash.xxh3_64_intdigest(key) & 0xFF:02x}"
        file = root / "blocks" / key[:16].hex() / shard / f"{key.hex()}.blk"
        return file.read_bytes() if file.exists() else None

    return fetch


@pytest.fixture(params=["file", "redis", "mooncake", "s3"])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[str], Fetch]]:
    """The options of a daemon with this store, and how to fetch a value from there."""
    if request.param == "file":
        folder = tmp_path / "shared"
        folder.mkdir()
        yield ["--backing", f"file://{folder}", "--backing-ttl", "1h"], file_reader(folder)
    elif request.param == "redis":
        with redis_server() as redis, redis.client() as client:
            yield ["--backing", redis.url], lambda key: client.get(f"tiered-kv:1:{{{key.hex()}}}")
    elif request.param == "mooncake":
        with mooncake_servers() as mooncake:
            from mooncake.store import MooncakeDistributedStore

            library = MooncakeDistributedStore()
            master = f"127.0.0.1:{mooncake.master.port}"
            assert library.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
            yield (
                ["--backing", mooncake.url],
                lambda key: library.get(f"tiered-kv:1:{key.hex()}") or None,
            )
            library.close()
    else:
        use_credentials(monkeypatch)
        with s3_server() as service:
            bucket = service.bucket()

            def fetch(key: bytes) -> bytes | None:
                try:
                    return bytes(bucket.get(f"mine/1/{key.hex()}").bytes())
                except FileNotFoundError:
                    return None

            yield ["--backing", service.url("mine")], fetch


def payload_of(value: Any, key: bytes, parent: bytes) -> bytes:
    """What is left of a value when its header is verified and taken away."""
    header, payload = value[:256], value[256:]
    assert header[:16] == b"TKVBLOCK" + struct.pack("<HHBBH", 1, 256, len(key), len(parent), 0)
    assert header[16:32] == struct.pack("<QQ", len(payload), xxhash.xxh3_64_intdigest(payload))
    assert (header[32:96], header[96:160]) == (key.ljust(64, b"\0"), parent.ljust(64, b"\0"))
    assert header[160:248] == bytes(88)
    assert header[248:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:248]))
    return bytes(payload)


def test_blocks_of_a_daemon_are_read_as_the_page_says(
    shared: tuple[list[str], Fetch], start: StartDaemon
) -> None:
    options, fetch = shared
    daemon = start("--memory", "16MiB", *options)
    hand = Hand(daemon.endpoint)
    for namespace, prefix in ((FREE, hashlib.sha256(FREE).digest()[:16]), (OF_ENGINE, FREE[:16])):
        assert hand.ask("hello", **{**HELLO, "namespace": namespace})["ok"]
        assert hand.put()["ok"]
        assert hand.ask("flush")["ok"]
        parent = b""
        for short, block in zip(KEYS, BLOCKS, strict=True):
            assert payload_of(fetch(prefix + short), prefix + short, parent) == block
            parent = prefix + short
        assert fetch(prefix + b"another.") is None
