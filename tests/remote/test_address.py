"""Parsing of addresses, engine identities and key files."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates

from tests.remote.engine import IDENTITY, RANK, block_keys, identity
from vllm_tiered_kv.core.store import StoreKey, store_key
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.address import ServerAddress, engine_name, without_process
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.store import RemoteStore


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:9527", "tcp://127.0.0.1:9527"),
        (" tcp://Cache-1.Example:09527 ", "tcp://cache-1.example:9527"),
        ("tcp://[::1]:1", "tcp://[::1]:1"),
        ("ipc:///run/kv.sock", "ipc:///run/kv.sock"),
    ],
)
def test_parse_valid_address_returns_canonical_form(text: str, endpoint: str) -> None:
    assert str(ServerAddress.parse(text)) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:9527",
        "http://a:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:65536",
        "tcp://*:9527",
        "tcp://a b:1",
        "tcp://a:1/path",
        "tcp://a:1;tcp://b:1",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc:///",
        "ipc:///run/",
        "ipc:///" + "x" * 200,
        "inproc://x",
        None,
        9527,
        ["tcp://a:1"],
    ],
)
def test_parse_invalid_address_raises_error_naming_the_option(text: object) -> None:
    with pytest.raises(ConfigError) as error:
        ServerAddress.parse(text)
    assert error.value.key == "remote"
    with pytest.raises(ConfigError):
        RemoteStore(text, IDENTITY)  # type: ignore[arg-type]


def test_arena_path_exists_for_ipc_only() -> None:
    assert ServerAddress.parse("ipc:///run/kv.sock").arena_path == "/run/kv.sock.arena"
    assert ServerAddress.parse("tcp://127.0.0.1:1").arena_path is None
    store = RemoteStore("tcp://127.0.0.1:1", IDENTITY)
    assert store.attach() is None
    store.close()


def test_wire_key_drops_the_namespace() -> None:
    key = store_key(IDENTITY.namespace, block_keys("a", 1)[0], RANK)
    assert IDENTITY.wire_key(key) == key[16:]
    assert len(key[16:]) == IDENTITY.key_bytes == 25
    assert IDENTITY.wire_key(StoreKey(key[:-1])) is None
    assert identity(name="another").wire_key(key) is None


def test_hello_lists_each_block_length_once() -> None:
    assert identity(4096, 512, 4096).hello().block_bytes == [512, 4096]


def test_name_without_process_is_the_same_after_a_restart() -> None:
    assert without_process(engine_name("Qwen/Qwen3-8B")) == "Qwen/Qwen3-8B"
    assert without_process("token cache 'chats of process 1' of process 17") == (
        "token cache 'chats of process 1'"
    )
    assert without_process("a program") == "a program"


def test_curve_keys_load_from_certificate_files(tmp_path: Path) -> None:
    server_public, server_secret = create_certificates(tmp_path, "server")
    client_public, client_secret = create_certificates(tmp_path, "client")
    loaded = CurveKeys.load(client_secret, server_public)
    assert len({loaded.server_key, loaded.public_key, loaded.secret_key}) == 3
    assert zmq.curve_public(loaded.secret_key) == loaded.public_key
    assert CurveKeys.load(client_secret, server_secret) == loaded
    assert loaded.secret_key.decode() not in repr(loaded)
    (tmp_path / "other.key").write_text("not a key\n")
    (tmp_path / "short.key").write_text('curve\n    public-key = "abc"\n')
    for client, server in (
        (client_public, server_public),
        (tmp_path / "nowhere", server_public),
        (client_secret, tmp_path / "other.key"),
        (client_secret, tmp_path / "short.key"),
        (client_secret, tmp_path),
    ):
        with pytest.raises(ConfigError):
            CurveKeys.load(client, server)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        CurveKeys.load(tmp_path / "nowhere", server_public)
