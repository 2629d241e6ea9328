"""`tiered-kv up` with a real daemon and stand-ins for model servers: order, health, ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon.test_http_pages import fetch
from tests.daemon.up_process import Up
from tests.patience import eventually, mostly_slow
from tests.ports import free_port
from vllm_tiered_kv.api import supervisor
from vllm_tiered_kv.api.deployment import Deployment

STAND_IN = Path(__file__).with_name("stand_in_server.py")


@pytest.fixture
def up(folder: Path) -> Iterator[Any]:
    running: list[Up] = []

    def start(*models: str, daemon: bool = True, **options: Any) -> Up:
        content: dict[str, Any] = {"stop_timeout": 20, **options}
        http = f"127.0.0.1:{free_port()}"
        if daemon:
            content["daemon"] = {
                "memory": "16MiB",
                "http": http,
                "listen": f"ipc://{folder}/kv.sock",
                "ssd": str(folder / "ssd"),
                "ssd_space": "16MiB",
            }
        content["servers"] = [
            {
                "model": model,
                "port": free_port(),
                "command": [sys.executable, "-u", str(STAND_IN)],
                "env": {"DAEMON_HEALTH": f"http://{http}/healthz"} if daemon else {},
            }
            for model in models
        ]
        file = folder / "deploy.yml"
        file.write_text(yaml.safe_dump(content))
        running.append(Up(file))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        print(one.text)  # pytest shows it where the test failed


ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]


@pytest.mark.parametrize("number", mostly_slow(ENDING, quick=1))
def test_up_starts_in_order_and_stops_the_daemon_last(up: Any, number: int) -> None:
    run = up("first", "second")
    run.wait_for("all is ready")
    page = re.search(r"  daemon  (http://\S+)", run.text)
    assert page is not None
    assert fetch(page[1])[0] == 200
    run.signal(number)
    assert run.end() == 0
    for order in (  # what a server prints may be read later than that it is ready
        (
            "daemon | ",  # its log has its name
            "tiered-kv: daemon is ready",
            "first  | started with TieredKVConnector",
            "first  | daemon at start: True",
            "first  | loading",
            "first  | loaded",  # a line of its own, after \r
        ),
        (
            "tiered-kv: daemon is ready",
            "tiered-kv: first is ready",
            "second | started",
        ),
        (
            "tiered-kv: first is ready",
            "tiered-kv: second is ready",
            "tiered-kv: all is ready",
            "tiered-kv: stopping first",
            "tiered-kv: stopping second",
            "tiered-kv: stopping daemon",
            "tiered-kv: daemon ended with status 0",
        ),
    ):
        places = [run.wait_for(part) for part in order]
        assert places == sorted(places)
    for name in ("first ", "second"):
        assert f"{name} | daemon at stop: True" in run.lines
        assert run.wait_for(f"{name} | stopped by SIGTERM") < run.wait_for("stopping daemon")
    assert "everything is written" in run.text


def test_up_ends_when_a_server_fails_to_start(up: Any) -> None:
    run = up("failing", "second")
    assert run.end() == 1
    assert "failing | no weights here" in run.lines
    assert run.lines[-1] == "tiered-kv: failing ended with status 3; see its lines above"
    assert "starting second" not in run.text
    assert "daemon ended with status 0" in run.text


def test_up_ends_when_a_server_dies_later(up: Any) -> None:
    run = up("first", "dying")
    assert run.end() == 1
    assert run.wait_for("all is ready") < run.wait_for("stopping first")
    assert run.lines[-1] == "tiered-kv: dying ended with status 7; see its lines above"


def test_up_ends_when_a_server_is_ended_by_a_signal_without_a_name(up: Any) -> None:
    run = up("unusual")
    assert run.end() == 1
    assert re.fullmatch(r"tiered-kv: unusual was ended by signal \d+; see .*", run.lines[-1])
    assert "daemon ended with status 0" in run.text


def test_up_ends_when_the_daemon_dies(up: Any) -> None:
    run = up("first")
    run.wait_for("all is ready")
    os.kill(run.child_running("vllm_tiered_kv.server.cli"), signal.SIGKILL)
    assert run.end() == 1
    assert run.lines[-1] == "tiered-kv: daemon was ended by SIGKILL; see its lines above"


def test_up_ends_when_a_server_never_gets_healthy(up: Any) -> None:
    run = up("never", daemon=False, start_timeout=1)
    assert run.end() == 1
    assert "never did not answer at http://127.0.0.1:" in run.lines[-1]
    assert run.lines[-1].endswith("/health within 1 s; see its lines above, or raise start_timeout")
    assert "never | stopped by SIGTERM" in run.lines


def test_up_stopped_while_a_server_loads_stops_all(up: Any) -> None:
    run = up("never")
    run.wait_for("daemon at start")
    assert run.stop() == 0
    assert "never  | stopped by SIGTERM" in run.lines
    assert "daemon ended with status 0" in run.text


def child_of(run: Up) -> Path:
    line = run.lines[run.wait_for(" | child ") - 1]
    return Path("/proc", line.split()[-1])


def is_running(process: Path) -> bool:
    try:
        return "(zombie)" not in (process / "status").read_text()
    except OSError:
        return False


def test_server_that_does_not_stop_is_killed_with_its_children(up: Any) -> None:
    run = up("deaf", daemon=False, stop_timeout=1)
    run.wait_for("all is ready")
    child = child_of(run)
    assert is_running(child)
    assert run.stop() == 1
    assert "tiered-kv: deaf did not stop within 1 s, and is killed" in run.lines
    eventually(lambda: not is_running(child))


def deaf_deployment(folder: Path, stop_timeout: int) -> Deployment:
    http = f"127.0.0.1:{free_port()}"
    server = {"model": "deaf", "port": free_port(), "command": [sys.executable, str(STAND_IN)]}
    file = folder / "deploy.yml"
    daemon = {"memory": "16MiB", "http": http, "listen": f"ipc://{folder}/kv.sock"}
    content = {"daemon": daemon, "servers": [server], "stop_timeout": stop_timeout}
    file.write_text(yaml.safe_dump(content))
    return Deployment.read(file)


def test_daemon_is_stopped_although_the_kernel_keeps_a_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a driver that hangs: the server gets no SIGKILL."""
    kill = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: None)
    monkeypatch.setattr(supervisor, "_LEFTOVERS_S", 0.2)
    deployment = deaf_deployment(folder, 1)
    log = folder / "log"
    fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    running = supervisor.Supervisor(deployment, supervisor.Screen(fd, fd))

    def stop() -> None:
        eventually(lambda: "all is ready" in log.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        assert running.run() == 1
    finally:
        stopping.join()
        for one in running._running:
            with contextlib.suppress(ProcessLookupError):
                kill(one._process.pid, signal.SIGKILL)
        os.close(fd)
    text = log.read_text()
    assert "tiered-kv: deaf does not end although it was killed" in text
    assert "tiered-kv: daemon ended with status 0" in text


def test_second_signal_kills_servers_at_once(up: Any) -> None:
    run = up("deaf", stop_timeout=600)
    run.wait_for("all is ready")
    run.signal()
    run.wait_for("stopping deaf")
    assert run.stop() == 1
    assert "tiered-kv: deaf is killed" in run.lines
    assert "daemon ended with status 0" in run.text


def test_second_signal_right_after_the_first_has_taken_effect_counts(folder: Path) -> None:
    class Impatient(supervisor.Screen):
        def say(self, text: str) -> None:
            super().say(text)
            if text.startswith(("all is ready", "stopping deaf")):
                os.kill(os.getpid(), signal.SIGTERM)

    log = folder / "log"
    fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    assert supervisor.Supervisor(deaf_deployment(folder, 10), Impatient(fd, fd)).run() == 1
    os.close(fd)
    assert "tiered-kv: deaf is killed" in log.read_text()


def test_up_with_unread_output_stops(up: Any) -> None:
    run = up("talking")
    run.wait_for("all is ready")
    daemon = run.child_running("vllm_tiered_kv.server.cli")
    run.stop_reading()
    assert run.stop() == 0
    assert not is_running(Path("/proc", str(daemon)))


def test_screen_with_unread_log_drops_lines_once_it_stops() -> None:
    """A thread that waited for its reader would not empty the pipe of its daemon, which then could
    not log, and so not end."""
    unread, logs = os.pipe()
    os.set_blocking(logs, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(logs, bytes(1 << 16))
    screen = supervisor.Screen(logs, logs)
    logging = threading.Thread(target=screen.show_log, args=("a line",), daemon=True)
    logging.start()
    logging.join(2 * supervisor._READER_S)
    assert logging.is_alive(), "a slow reader loses no line"
    screen.begin_stop()
    logging.join(60)
    assert not logging.is_alive()
    os.close(unread)
    os.close(logs)


def test_port_in_use_is_an_error_before_anything_starts(up: Any, folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        file = folder / "other.yml"
        server = {"model": "m", "port": port, "command": [sys.executable, str(STAND_IN)]}
        file.write_text(yaml.safe_dump({"servers": [server]}))
        run = Up(file)
        assert run.end() == 1
    assert run.lines == [
        f"tiered-kv: m cannot listen on 127.0.0.1:{port}: Address already in use; stop what uses "
        "it, or choose another address"
    ]


def test_command_that_does_not_exist_is_an_error(folder: Path) -> None:
    file = folder / "deploy.yml"
    server = {"model": "m", "port": free_port(), "command": "no-such-command"}
    file.write_text(yaml.safe_dump({"servers": [server]}))
    run = Up(file)
    assert run.end() == 1
    assert run.lines[-1] == (
        "tiered-kv: m cannot be started: no-such-command: No such file or directory"
    )
