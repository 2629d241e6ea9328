"""CURVE keys: who may connect, and who may write."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate

from tests.daemon.conftest import StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import KEY_BYTES, RawClient, Refused, attach, block, key, wire
from tests.daemon.test_cli import run
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.server.net.curve import load_server_keys, write_key_pair


def public_key(path: Path) -> bytes:
    return load_certificate(path)[0]


class Keys:
    """A daemon's keys and those of its clients, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_key_pair(folder, "server", read_only=False)
        write_key_pair(folder / "clients", "writer", read_only=False)
        write_key_pair(folder / "clients", "reader", read_only=True)
        write_key_pair(folder / "strangers", "stranger", read_only=False)
        self.arguments = (
            "--memory",
            "64MiB",
            "--secret-key",
            str(folder / "server.key_secret"),
            "--clients",
            str(folder / "clients"),
        )

    def connect(
        self, endpoint: str, who: str, server: str = "server", identity: bytes | None = None
    ) -> RawClient:
        own = load_server_keys(str(next(self.folder.glob(f"*/{who}.key_secret"))))
        return RawClient(
            endpoint,
            identity,
            curve_serverkey=public_key(next(self.folder.glob(f"**/{server}.key"))),
            curve_publickey=own.public,
            curve_secretkey=own.secret,
        )


@pytest.fixture
def keys(folder: Path) -> Keys:
    return Keys(folder / "keys")


@pytest.fixture
def daemon(start: StartDaemon, keys: Keys) -> DaemonProcess:
    return start(*keys.arguments)


def test_known_client_reads_and_writes(daemon: DaemonProcess, keys: Keys) -> None:
    with keys.connect(daemon.endpoint, "writer") as writer:
        writer.hello()
        assert writer.put({key(1): block(1)}) == [PutResult.STORED]
        with keys.connect(daemon.endpoint, "reader") as reader:
            reader.hello()
            assert reader.get([key(1)]) == {key(1): block(1)}
            assert reader.match([key(1)], pin_ms=60_000).count == 1
            assert reader.stats()["pins"] == 0
            reader.ask(wire.Flush())


def test_read_only_client_cannot_write(daemon: DaemonProcess, keys: Keys) -> None:
    with keys.connect(daemon.endpoint, "reader") as reader:
        reader.hello()
        for request, payload in [
            (wire.Put(KEY_BYTES, [], [], [], [], Durability.MEMORY), []),
            (wire.Delete(KEY_BYTES, [key(1)]), []),
            (wire.DeleteNamespace(bytes(16)), []),
            (wire.Pin(KEY_BYTES, [key(1)], 1000), []),
            (wire.Claim(KEY_BYTES, [key(1)], bytes(16), 1000), []),
        ]:
            with pytest.raises(Refused) as refused:
                reader.ask(request, payload)
            assert refused.value.code is ErrorCode.READ_ONLY


def test_read_only_client_does_not_define_shape(daemon: DaemonProcess, keys: Keys) -> None:
    with keys.connect(daemon.endpoint, "reader") as reader:
        reader.hello(block_bytes=[4096], layout="a mistake")
        with keys.connect(daemon.endpoint, "writer") as writer:
            writer.hello(block_bytes=[8192], layout="right")
            assert writer.put({key(1): block(1, 8192)}) == [PutResult.STORED]
        with pytest.raises(Refused) as refused:
            reader.hello(block_bytes=[4096], layout="a mistake")
        assert refused.value.code is ErrorCode.MISMATCH


def test_read_only_client_cannot_write_shared_memory(daemon: DaemonProcess, keys: Keys) -> None:
    """Not even with a valid arena token."""
    attached = attach(daemon.ipc_path)
    with keys.connect(daemon.endpoint, "reader") as reader:
        reader.hello(arena=attached.token)
        for request in (wire.Reserve(KEY_BYTES, [key(1)], [None], [4096]), wire.Seal([1])):
            with pytest.raises(Refused) as refused:
                reader.ask(request)
            assert refused.value.code is ErrorCode.READ_ONLY
    attached.close()


@pytest.mark.parametrize("who", ["stranger", "no keys", "wrong server"])
def test_unknown_client_gets_no_answer(daemon: DaemonProcess, keys: Keys, who: str) -> None:
    if who == "no keys":
        client = RawClient(daemon.endpoint)
    elif who == "wrong server":
        client = keys.connect(daemon.endpoint, "writer", server="stranger")
    else:
        client = keys.connect(daemon.endpoint, who)
    with client:
        client.send(wire.Hello(1, "x", bytes(32), KEY_BYTES, [4096], "x", b""))
        with pytest.raises(TimeoutError):
            client.receive(timeout_s=1.0)
    with keys.connect(daemon.endpoint, "writer") as writer:
        writer.hello()
        assert writer.stats()["sessions"] == 1


def test_stolen_identity_gets_no_session(daemon: DaemonProcess, keys: Keys) -> None:
    """A reader that uses a writer's routing id does not get its session."""
    with keys.connect(daemon.endpoint, "writer", identity=b"shared") as writer:
        writer.hello()
    code = None
    for _ in range(30):
        with keys.connect(daemon.endpoint, "reader", identity=b"shared") as reader:
            reader.timeout_s = 1.0  # zmq ignores an id whose last owner is not quite gone
            with pytest.raises((Refused, TimeoutError)) as answer:
                reader.put({key(1): block(1)})
        if isinstance(answer.value, Refused):
            code = answer.value.code
            break
    assert code is ErrorCode.NO_HELLO


def test_local_client_needs_no_keys(daemon: DaemonProcess) -> None:
    with RawClient(daemon.ipc) as client:
        client.hello()
        assert client.put({key(1): block(1)}) == [PutResult.STORED]


def test_keys_allow_other_hosts(start: StartDaemon, keys: Keys) -> None:
    daemon = start(*keys.arguments, listen=["tcp://0.0.0.0:*"])
    port = daemon.endpoint.rpartition(":")[2]
    with keys.connect(f"tcp://127.0.0.1:{port}", "writer") as writer:
        writer.hello()
        assert writer.put({key(1): block(1)}) == [PutResult.STORED]


def test_clients_file_admits_listed_keys(start: StartDaemon, keys: Keys, folder: Path) -> None:
    lines = ["# who may connect", ""]
    for who, mark in (("writer", ""), ("reader", " read-only")):
        lines.append(public_key(keys.folder / "clients" / f"{who}.key").decode() + mark)
    allowed = folder / "allowed"
    allowed.write_text("\n".join(lines))
    daemon = start(*keys.arguments[:-1], str(allowed))
    with keys.connect(daemon.endpoint, "writer") as writer:
        writer.hello()
        writer.put({key(1): block(1)})
    with keys.connect(daemon.endpoint, "reader") as reader:
        reader.hello()
        with pytest.raises(Refused):
            reader.put({key(1): block(1)})


def test_wrong_key_file_is_named_in_error(keys: Keys, folder: Path) -> None:
    empty = folder / "empty"
    empty.mkdir()
    short = folder / "short"
    short.write_text("abc\n")
    marked = folder / "marked"
    marked.write_text(public_key(keys.folder / "server.key").decode() + " admin\n")
    open_to_all = folder / "server.key_secret"
    open_to_all.write_text((keys.folder / "server.key_secret").read_text())
    open_to_all.chmod(0o644)
    good = str(keys.folder / "server.key_secret")
    for secret, clients, sentence in [
        (str(keys.folder / "server.key"), str(keys.folder / "clients"), "is not a secret key"),
        (str(open_to_all), str(keys.folder / "clients"), "can be read by others"),
        (good, str(empty), "nobody could connect"),
        (good, str(short), "line 1: not a public key"),
        (good, str(marked), "only 'read-only' may follow"),
    ]:
        done = run("--http", "off", "--secret-key", secret, "--clients", clients)
        assert done.returncode == 2
        assert sentence in done.stderr


def test_commands_with_keys_connect_and_a_read_only_one_removes_nothing(
    daemon: DaemonProcess, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    with keys.connect(daemon.endpoint, "writer") as writer:
        writer.hello(client="a model")
        writer.put({key(1): block(1)})

        def command(who: str, *words: str) -> int:
            secret = str(keys.folder / "clients" / f"{who}.key_secret")
            server = str(keys.folder / "server.key")
            return main([*words, "--remote-key", secret, "--remote-server-key", server])

        for endpoint in (daemon.endpoint, daemon.ipc):
            assert command("reader", "status", endpoint) == 0
            assert "memory   [" in capsys.readouterr().out
        assert command("reader", "rm", "a model", daemon.endpoint, "--yes") == 1
        assert "read-only" in capsys.readouterr().err
        assert writer.tiers([key(1)]) == [1]
        assert command("writer", "rm", "a model", daemon.endpoint, "--yes") == 0
        assert writer.tiers([key(1)]) == [0]


def test_zmq_supports_curve() -> None:
    assert zmq.has("curve")
