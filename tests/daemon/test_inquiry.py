"""Questions about a running daemon: `Inquiry`, and the commands that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.api import doctor
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.doctor import Level
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
