"""Questions about a running daemon: `Inquiry`, and the commands that use it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import NAMESPACE, RawClient, block, key
from vllm_tiered_kv.api import doctor
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.doctor import Level
from vllm_tiered_kv.core.store import key_prefix
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.inquiry import Inquiry, NoAnswerError


def test_the_doctor_says_what_a_daemon_holds_and_that_a_stopped_one_is_gone(
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


def test_a_daemon_that_does_not_answer_is_reported_in_time(daemon: DaemonProcess) -> None:
    address = ServerAddress.parse(daemon.endpoint)
    with Inquiry(address, 0.3) as inquiry:
        assert inquiry.info()["pid"] == daemon.pid
        daemon.freeze()
        with pytest.raises(NoAnswerError, match="do the keys match"):
            inquiry.stats()
        daemon.thaw()
        assert "sessions" in inquiry.stats()  # connects anew


def test_a_daemon_that_requires_keys_needs_them(folder: Path) -> None:
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
        without = doctor.check_daemon(address, None, 0.5)
        assert without.level is Level.ERROR


def stored(daemon: DaemonProcess, model: str) -> None:
    with RawClient(daemon.endpoint) as client:
        client.hello(client=model)
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
        daemon.kill()
        daemon.restart()
        with RawClient(daemon.endpoint) as client:
            client.hello()
            assert len(client.get([key(n) for n in range(3)])) == 3
        daemon.freeze()
        assert main(["flush", daemon.endpoint, "--timeout", "0.3"]) == 1
        assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "top", "flush"])
def test_commands_say_what_is_wrong_with_an_address_or_with_keys(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "http://x"])
    assert ended.value.code == 2
    assert "tcp://" in capsys.readouterr().err
    absent = f"ipc://{folder}/none.sock"
    assert main([command, absent]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main([command, absent, "--remote-key", "x"]) == 2
    assert "--remote-server-key" in capsys.readouterr().err
