"""Requests about a running daemon: `Inquiry`, and the commands that use it."""

from __future__ import annotations

import concurrent.futures
import io
import json
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import (
    KEY_BYTES,
    NAMESPACE,
    RawClient,
    attach,
    block,
    blocks,
    key,
    wire,
)
from tests.remote.faulty_daemon import FaultyDaemon
from vllm_tiered_kv.api import doctor
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.daemon_commands import namespaces_named
from vllm_tiered_kv.api.doctor import Level
from vllm_tiered_kv.core.store import Durability, PutResult, key_prefix
from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.remote.address import ServerAddress, engine_name
from vllm_tiered_kv.remote.curve import CurveKeys
from vllm_tiered_kv.remote.inquiry import Inquiry, NoAnswerError


def test_doctor_says_what_a_daemon_holds_and_that_a_stopped_one_is_gone(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    addresses = [daemon.endpoint, daemon.ipc]
    words = [word for address in addresses for word in ("--remote", address)]
    assert main(["doctor", *words]) == 0
    printed = capsys.readouterr().out
    for address in addresses:
        assert f"{address} answers: tiered-kv-server" in printed
    assert "memory 16 MiB" in printed

    daemon.terminate()
    assert main(["doctor", "--timeout", "0.5", *words]) == 1
    assert printed.count("FAIL") == 0
    assert capsys.readouterr().out.count("-> start it") == len(addresses)


def test_daemon_that_does_not_answer_is_reported_in_time(daemon: DaemonProcess) -> None:
    address = ServerAddress.parse(daemon.endpoint)
    with Inquiry(address, 0.3) as inquiry:
        assert inquiry.info()["pid"] == daemon.pid
        daemon.freeze()
        with pytest.raises(NoAnswerError, match="do the keys match"):
            inquiry.stats()
        daemon.thaw()
        assert "sessions" in inquiry.stats()  # connects anew


def test_daemon_that_requires_keys_needs_them(folder: Path) -> None:
    from vllm_tiered_kv.server.net.curve import write_key_pair

    server, server_secret = write_key_pair(folder / "server", "server", read_only=False)
    _, secret = write_key_pair(folder / "clients", "tool", read_only=True)
    keys = ("--secret-key", str(server_secret), "--clients", str(folder / "clients"))
    with DaemonProcess(folder, "--memory", "16MiB", *keys) as daemon:
        address = ServerAddress.parse(daemon.endpoint)
        questions = doctor.Questions(
            remotes=[address], remote_key=str(secret), remote_server_key=str(server)
        )
        assert [f.level for f in doctor.check_daemons(questions)] == [Level.OK, Level.OK]
        without = doctor.check_daemon(address, None, 5.0)
        assert (without.level, "it requires keys" in without.advice) == (Level.ERROR, True)
        unknown, its_secret = write_key_pair(folder, "unknown", read_only=False)
        refused = doctor.check_daemon(address, CurveKeys.load(its_secret, server), 5.0)
        assert (refused.level, "clients" in refused.advice) == (Level.ERROR, True)
        wrong = doctor.check_daemon(address, CurveKeys.load(secret, unknown), 5.0)
        assert (wrong.level, "--remote-server-key" in wrong.advice) == (Level.ERROR, True)


def stored(daemon: DaemonProcess, model: str) -> None:
    """As an engine of this model stores."""
    with RawClient(daemon.endpoint) as client:
        client.hello(client=engine_name(model))
        client.put({key(n): block(n) for n in range(3)})


def test_ls_lists_namespaces_with_the_model_of_their_engine(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", daemon.endpoint]) == 0
    assert "nothing was stored" in capsys.readouterr().out
    stored(daemon, "Qwen/Qwen3-8B")
    assert main(["ls", daemon.ipc]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Qwen" in line)
    assert line.split() == [key_prefix(NAMESPACE).hex(), "12.0", "KiB", "3", "Qwen/Qwen3-8B"]
    assert main(["ls", daemon.endpoint, daemon.ipc, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["address"] == daemon.endpoint
    assert first["namespaces"] == second["namespaces"]
    assert first["namespaces"][0]["model"] == "Qwen/Qwen3-8B"
    assert first["namespaces"][0]["memory_blocks"] == 3


def test_ls_shows_other_daemons_if_one_does_not_answer(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(daemon, "m")
    assert main(["ls", "tcp://127.0.0.1:1", daemon.endpoint]) == 1
    captured = capsys.readouterr()
    assert key_prefix(NAMESPACE).hex() in captured.out
    assert "no answer from tcp://127.0.0.1:1" in captured.err


def test_top_shows_what_happened_between_two_looks(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(daemon, "m")
    assert main(["top", daemon.endpoint, "--interval", "0.05", "--count", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("memory   [") == 2
    assert "requests info" in printed or "requests stats" in printed
    assert "\033[" not in printed
    assert main(["top", daemon.endpoint, "--interval", "0.05", "--count", "1", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    assert look["stats"]["put_blocks"] == {"stored": 3}


def test_top_waits_for_a_daemon_that_restarts_and_ends_with_an_interrupt(
    daemon: DaemonProcess,
) -> None:
    command = [sys.executable, "-m", "vllm_tiered_kv.api.cli", "top", daemon.endpoint]
    top = subprocess.Popen(
        [*command, "--json", "--interval", "0.05", "--timeout", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The tests themselves may run in the background, where interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert top.stdout is not None
        assert top.stderr is not None
        assert json.loads(top.stdout.readline())["info"]["pid"] == daemon.pid
        daemon.kill()
        assert "asking again" in top.stderr.readline()
        threading.Thread(target=top.stderr.read, daemon=True).start()  # it keeps asking
        daemon.restart()
        while json.loads(top.stdout.readline())["info"]["pid"] != daemon.pid:
            pass
        top.send_signal(signal.SIGINT)
        threading.Thread(target=top.stdout.read, daemon=True).start()
        assert top.wait(60) == 0
    finally:
        top.kill()
        top.wait()


def test_flush_returns_when_blocks_are_on_disk(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "16MiB")
    with DaemonProcess(folder, "--memory", "16MiB", *ssd) as daemon:
        stored(daemon, "m")
        assert main(["flush", daemon.endpoint]) == 0
        assert "everything is written" in capsys.readouterr().out
        assert main(["flush", daemon.ipc, "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)
        assert (told["address"], told["error"]) == (daemon.ipc, "")
        daemon.kill()
        daemon.restart()
        with RawClient(daemon.endpoint) as client:
            client.hello()
            assert len(client.get([key(n) for n in range(3)])) == 3
        daemon.freeze()
        assert main(["flush", daemon.endpoint, "--timeout", "0.3"]) == 1
        assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "ls", "rm", "top", "flush"])
def test_commands_say_what_is_wrong_with_an_address_or_with_keys(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "model"] if command == "rm" else [command]
    with pytest.raises(SystemExit) as ended:
        main([*words, "http://x"])
    assert ended.value.code == 2
    assert "tcp://" in capsys.readouterr().err
    for timeout in ("-1", "0", "nan", "inf", "soon"):
        with pytest.raises(SystemExit):
            main([*words, "tcp://127.0.0.1:1", f"--timeout={timeout}"])
        assert "--timeout: expected" in capsys.readouterr().err
    absent = f"ipc://{folder}/none.sock"
    assert main([*words, absent]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main([*words, absent, "--remote-key", "x"]) == 2
    assert "--remote-server-key" in capsys.readouterr().err


def test_status_shows_what_daemons_did_since_their_start_and_names_those_that_are_gone(
    daemon: DaemonProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(daemon, "Qwen/Qwen3-8B")
    assert main(["status", daemon.endpoint, daemon.ipc]) == 0
    printed = capsys.readouterr().out
    assert printed.count("puts     stored 3\n") == 2
    assert printed.count("Qwen/Qwen3-8B") == 2
    assert "/s" not in printed.replace("blocks", "").replace("/sock", "")
    assert main(["status", f"ipc://{folder}/none.sock", daemon.ipc, "--json"]) == 1
    captured = capsys.readouterr()
    assert "No such file" in captured.err
    (look,) = json.loads(captured.out)
    assert (look["address"], look["stats"]["put_blocks"]) == (daemon.ipc, {"stored": 3})


# ---- rm -----------------------------------------------------------------------------------------

OTHER = bytes([9]) * 32
COUNT = 400  # more than the memory below holds


def fill(daemon: DaemonProcess, namespace: bytes, model: str) -> None:
    with RawClient(daemon.endpoint) as client:
        client.hello(client=model, namespace=namespace)
        for start in range(0, COUNT, 50):
            client.put(blocks(50, start=start), Durability.DISK)


def left(daemon: DaemonProcess, namespace: bytes) -> int:
    """How many blocks of the namespace can be read."""
    with RawClient(daemon.endpoint) as client:
        client.hello(namespace=namespace, block_bytes=())
        return sum(tier != wire.TierCode.MISS for tier in client.tiers(list(blocks(COUNT))))


def test_rm_removes_one_namespace_from_memory_and_ssd_for_good(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "128MiB")
    with DaemonProcess(folder, "--memory", "1MiB", *ssd) as daemon:
        fill(daemon, NAMESPACE, "Qwen/Qwen3-8B")
        fill(daemon, OTHER, "another model")
        assert (left(daemon, NAMESPACE), left(daemon, OTHER)) == (COUNT, COUNT)
        name = key_prefix(NAMESPACE).hex()
        assert main(["rm", name[:8].upper(), daemon.endpoint, "--yes", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {
            "removed_blocks": COUNT,
            "namespaces": [name],
            "notes": [],
            "errors": [],
        }
        assert (left(daemon, NAMESPACE), left(daemon, OTHER)) == (0, COUNT)
        daemon.kill()
        daemon.restart()
        assert (left(daemon, NAMESPACE), left(daemon, OTHER)) == (0, COUNT)
        with RawClient(daemon.endpoint) as client:
            client.hello(namespace=OTHER)
            wanted = blocks(COUNT)
            assert client.get(list(wanted), stream=True) == wanted
        assert main(["rm", key_prefix(OTHER).hex(), daemon.endpoint, "--yes"]) == 0
        printed = capsys.readouterr().out
        assert f"{key_prefix(OTHER).hex()}, {COUNT} blocks removed" in printed
        assert f"{COUNT} blocks of 1 namespaces are removed" in printed
        with RawClient(daemon.endpoint) as client:
            client.hello()
            assert set(client.stats()["blocks"].values()) == {0}
        daemon.terminate()
    assert main(["verify", str(folder / "ssd")]) == 0


def test_rm_beside_clients_that_store_and_read_leaves_only_what_came_later(folder: Path) -> None:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "128MiB")
    with DaemonProcess(folder, "--memory", "1MiB", *ssd) as daemon:
        fill(daemon, NAMESPACE, "m")
        is_over = threading.Event()

        def use() -> None:
            with RawClient(daemon.endpoint) as client:
                client.hello(client="m")
                while not is_over.is_set():
                    for start in range(0, COUNT, 50):
                        client.put(blocks(50, start=start))
                        found = client.get([key(n) for n in range(start, start + 50)], stream=True)
                        assert found.items() <= blocks(50, start=start).items()

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            users = [pool.submit(use) for _ in range(2)]
            for _ in range(5):
                assert main(["rm", "m", daemon.endpoint, "--yes"]) == 0
            is_over.set()
            for user in users:
                user.result()
        assert main(["rm", "m", daemon.endpoint, "--yes"]) == 0
        assert left(daemon, NAMESPACE) == 0
        with RawClient(daemon.endpoint) as client:
            client.hello()
            stats = client.stats()
        assert (stats["used_bytes"]["memory"], stats["blocks"]["ssd"]) == (0, 0)
        assert not stats.get("errors")
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.logs


def test_rm_asks_first(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(daemon, "m/1")
    for answer in ("", "\n", "no\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["rm", "m/1", daemon.endpoint]) == 1
        captured = capsys.readouterr()
        assert key_prefix(NAMESPACE).hex() in captured.out
        assert "nothing was removed" in captured.err
        assert left(daemon, NAMESPACE) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["rm", "m/1", daemon.endpoint]) == 0
    assert left(daemon, NAMESPACE) == 0
    assert main(["rm", "m/1", daemon.endpoint, "--json"]) == 2
    assert "give --yes too" in capsys.readouterr().err
    assert main(["rm", "m/2", daemon.endpoint, "--yes"]) == 1
    assert "`tiered-kv ls` lists them" in capsys.readouterr().err


def test_rm_ends_pins_and_leaves_leased_blocks_to_their_readers(daemon: DaemonProcess) -> None:
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    wanted = blocks(8)
    with RawClient(daemon.ipc) as client:
        client.hello(client="m", arena=attached.token)
        client.put(wanted)
        assert client.ask(wire.Pin(KEY_BYTES, list(wanted), 3_600_000)).count == 8
        lent = client.borrow(list(wanted))
        reserved = client.reserve({key(100): 4096})
        assert main(["rm", "m", daemon.ipc, "--yes"]) == 0
        assert client.tiers(list(wanted)) == [0] * 8
        stats = client.stats()
        assert (stats["pins"], stats["leases"]) == (0, 9)
        for start in range(1000, 6000, 500):  # more than the memory holds
            client.put(blocks(500, start=start))
        offsets = struct.unpack("<8Q", lent.offsets)
        assert [bytes(arena.view(n, 4096)) for n in offsets] == list(wanted.values())
        arena.view(reserved.offsets[0], 4096)[:] = block(100)
        assert client.seal(reserved.leases) == [PutResult.STORED]
        assert client.release([lent.lease]) == 1
        assert client.get([key(100)]) == {key(100): block(100)}
    arena.close()
    attached.connection.close()


def test_rm_does_not_ask_what_a_daemon_cannot_do() -> None:
    with FaultyDaemon() as older, Inquiry(ServerAddress.parse(older.address), 5.0) as inquiry:
        with pytest.raises(NoAnswerError, match="update the daemon"):
            inquiry.delete_namespace(bytes(16))


def test_names_for_rm_are_of_a_model_or_begin_a_namespace() -> None:
    rows = {"ab12" * 8: {"model": "m"}, "ab13" * 8: {"model": "m"}, "cd00" * 8: {"model": "ab1"}}
    assert len(namespaces_named("m", rows)) == 2
    assert list(namespaces_named("AB12", rows)) == ["ab12" * 8]
    assert list(namespaces_named("ab1", rows)) == ["cd00" * 8]
    assert namespaces_named("cd0", rows) == {}, "too short"
    rows["ab12" * 7 + "ffff"] = {"model": ""}
    with pytest.raises(ConfigError, match="begins 2 namespaces"):
        namespaces_named("ab12", rows)
