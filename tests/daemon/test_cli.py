"""The command line: options, refusals, keys, signals, the pages for monitors."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import zmq

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient, Refused, attach, block, key, wire
from tests.patience import eventually
from vllm_tiered_kv.config import Eviction
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.server.cli import main
from vllm_tiered_kv.server.net.endpoints import bind
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.options import (
    ServerOptions,
    quota_of,
)

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


def test_options_flag_and_file_flag_wins() -> None:
    file = {"memory": "1GiB", "eviction": "s3fifo", "listen": "ipc:///tmp/x", "backing_ttl": "7d"}
    file["backing"] = "file:///mnt/kv"
    options = ServerOptions.load(file, {"memory": "2GiB", "huge_pages": True})
    assert options.memory == 2 << 30
    assert options.eviction is Eviction.S3FIFO
    assert options.listen == ["ipc:///tmp/x"]
    assert options.huge_pages
    assert options.backing_ttl == 7 * 86400


def test_check_prints_options_and_starts_nothing(folder: Path) -> None:
    file = folder / "server.yaml"
    file.write_text("eviction: s3fifo\nmemory_quota: {ab: 1MiB}\n")
    done = run("--check", "--config", str(file), "--memory", "1GiB")
    assert done.returncode == 0
    options = json.loads(done.stdout)
    assert (options["memory"], options["eviction"]) == (1 << 30, "s3fifo")
    assert options["memory_quota"] == {"ab": 1 << 20}
    assert options["listen"] == ServerOptions().listen
    wrong = [("--ssd-space", "1GiB"), ("--listen", "tcp://0.0.0.0:1"), ("--http", "0.0.0.0:1")]
    for words in wrong:
        done = run("--check", *words)
        assert (done.returncode, done.stdout) == (2, "")
    done = run("--check", "--listen", "ipc:///no/such/folder/yet")
    assert done.returncode == 0
    done = run("--check", "--backing", "redis://user:swordfish@host:1")  # a unit logs this
    assert done.returncode == 0
    assert "swordfish" not in done.stdout


def test_options_quotas_are_parsed() -> None:
    listed = ServerOptions.load(None, {"memory_quota": ["4GiB", "ab12=1GiB"]}).memory_quota
    mapped = ServerOptions.load({"memory_quota": {"default": "4GiB", "ab12": "1GiB"}}).memory_quota
    assert listed == mapped == {"": 4 << 30, "ab12": 1 << 30}
    assert quota_of(listed, bytes.fromhex("ab12ff")) == 1 << 30
    assert quota_of(listed, bytes.fromhex("ab13ff")) == 4 << 30
    assert quota_of({}, b"\0") is None


def test_quota_of_name_prefix_finds_quota() -> None:
    quotas = {"": 3, "ab12": 1, "cd" * 20: 2}
    starts = ("ab12ff", "cd" * 16, "cd" * 32, "ab13ff")
    assert [quota_of(quotas, bytes.fromhex(start)) for start in starts] == [1, 2, 2, 3]
    assert quota_of({"ab": 1}, bytes(16)) is None


def test_quota_of_namespace_without_quota_is_none() -> None:
    quotas = {"ab12": 1, "cd" * 20: 1}
    starts = ("ab12ff", "cd" * 16, "ab13ff")
    assert [quota_of(quotas, bytes.fromhex(start)) for start in starts] == [1, 1, None]
    assert quota_of({}, bytes(16)) is None
    assert quota_of({"": 1}, bytes(16)) == 1


def test_options_path_below_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands "~" in a file or after "="; the daemon used to create a folder "~"."""
    monkeypatch.setenv("HOME", "/home/kv")
    assert ServerOptions.load({"ssd": "~/ssd"}).ssd == "/home/kv/ssd"
    keys = {"secret_key": "~/x.key_secret", "clients": "/etc/~"}
    loaded = ServerOptions.load(None, keys)
    assert (loaded.secret_key, loaded.clients) == ("/home/kv/x.key_secret", "/etc/~")


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"memroy": "1GiB"}, 'memroy: unknown option; did you mean "memory"?'),
        ({"memory": "lots"}, "is not a size"),
        ({"memory": "1KiB"}, "too few"),
        ({"eviction": "fifo"}, "is not one of"),
        ({"workers": 0}, "expected a number from 1"),
        ({"huge_pages": "maybe"}, "expected true or false"),
        ({"stall_timeout": "soon"}, "is not a duration"),
        ({"backing_timeout": "1000000000d"}, "must be at most 3650d"),
        ({"listen": []}, "at least one"),
        ({"listen": [5]}, "expected text"),
        ({"memory_quota": {"xyz": "1GiB"}}, "not the start of a namespace"),
        ({"ssd_quota": "1GiB"}, "there is no SSD tier"),
        ({"secret_key": "/x"}, "belong together"),
        ({"backing": "file://mnt/kv"}, "is not like"),
        (
            {"backing": "memcached://x"},
            "must start with one of file://, mooncake:// (needs pip install",
        ),
        (
            {"backing": "/mnt/kv"},
            "must start with one of file://, mooncake:// (needs pip install",
        ),
        (
            {"backing": "file:///mnt/kv", "backing_ttl": "5min"},
            "backing_ttl: must be at least 20min",
        ),
        ({"backing": "file:///mnt/kv"}, "would grow until its file system is full"),
    ],
)
def test_options_wrong_value_is_named_in_error(file: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        ServerOptions.load(file)
    assert sentence in str(wrong.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--memory", "lots"], "--memory: 'lots' is not a size"),
        (["--memry", "1GiB"], "--memry: unknown argument; did you mean --memory?"),
        (["--ssdspace=1GiB"], "did you mean --ssd-space?"),
        (["kegyen", "keys"], "kegyen: unknown argument; did you mean keygen?"),
        (["stauts"], "stauts: unknown argument; did you mean tiered-kv status?"),
        (["verify", "/kv"], "verify: unknown argument; did you mean tiered-kv verify?"),
        (["--eviction", "lrru"], 'did you mean "lru"?'),
        (["frobnicate"], "frobnicate: unknown argument; --help lists the options"),
        (["--listen", "tcp://0.0.0.0:9527"], "can be reached from other hosts, which needs keys"),
        (["--listen", "tcp://*:9527"], "which needs keys"),
        (["--listen", "tcp://eth0:9527"], "which needs keys"),
        (["--listen", "tcp://[::]:9527"], "which needs keys"),
        (["--listen", "tcp://127.0.0.1"], "is not like"),
        (["--listen", "tcp://::1:9527"], "is not like"),
        (["--listen", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"], "is not like"),
        (["--listen", "ipc:///x", "--listen", "ipc:///x"], "ipc:///x is named more than once"),
        (["--http", "http://127.0.0.1:9528"], "is neither like"),
        (["--listen", "udp://127.0.0.1:1"], "begins with neither"),
        (["--listen", "ipc://relative"], "write the whole path"),
        (["--listen", "ipc://@abstract"], "write the whole path"),
        (["--listen", "ipc:///no/such/folder/x"], "is not a folder"),
        (["--listen", "ipc:///tmp/" + "x" * 120], "too long"),
        (["--http", "0.0.0.0:9528"], "can be reached from other hosts: set http_token"),
        (["--http", "nowhere"], "is neither like"),
        (["--config", "/no/such/file"], "cannot be read"),
        (["--secret-key", "/no/such/file", "--clients", "/x"], "cannot be read"),
    ],
)
def test_cli_wrong_argument_prints_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--http", "off", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_cli_wrong_yaml_prints_one_sentence(folder: Path) -> None:
    path = folder / "server.yaml"
    for text, sentence in (
        ("memroy: 1GiB", 'did you mean "memory"?'),
        ("- a\n- b", "must map options to values"),
        ("memory: 1GiB\na: [", "line 2, is not YAML"),
        ("!!python/object/apply:os.system ['false']", "is not YAML"),
        ("memory: 1GiB\nhttp: off\nmemory: 2GiB", "memory: is given more than once in"),
    ):
        path.write_text(text)
        done = run("--config", str(path))
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_daemon_with_config_file_uses_it(folder: Path, connect: Connect) -> None:
    path = folder / "server.yaml"
    path.write_text("memory: 32MiB\nhttp: off\nlog_level: debug\n")
    with DaemonProcess(folder, "--config", str(path), "--memory", "16MiB") as daemon:
        assert "memory: 16MiB" in daemon.logs
        connect(daemon.endpoint).put({key(1): block(1)})


def test_help_shows_examples_and_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert run("keygen", "--help").returncode == 0
    assert "tiered-kv-server keygen" in done.stdout


def test_keygen_writes_private_keys_and_never_overwrites(folder: Path) -> None:
    done = run("keygen", str(folder / "keys"), "engine")
    assert done.returncode == 0
    secret = folder / "keys" / "engine.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "secret-key" not in (folder / "keys" / "engine.key").read_text()
    assert str(secret) in done.stdout
    before = secret.read_text()
    again = run("keygen", str(folder / "keys"), "engine")
    assert again.returncode == 2
    assert "keys are never overwritten" in again.stderr
    assert secret.read_text() == before
    for name in ("../x", ".x", ""):
        assert run("keygen", str(folder / "other"), name).returncode == 2
    assert not (folder / "other").exists()


def test_names_of_clients_cannot_forge_lines_of_the_log(start: StartDaemon) -> None:
    daemon = start()
    attach(daemon.ipc_path, {"protocol": 1, "client": "me\nE forged"}).close()
    eventually(lambda: "has ended" in daemon.logs)
    assert "me\\nE forged" in daemon.logs
    assert "\nE forged" not in daemon.logs


def test_daemon_with_huge_stall_timeout_starts(start: StartDaemon) -> None:
    assert start("--memory", "16MiB", "--stall-timeout", "60d").terminate() == 0


def test_bind_failure_closes_socket() -> None:
    context = zmq.Context()
    with pytest.raises(ValueError, match="NaN") as failed:
        bind(context, "tcp://127.0.0.1:*", None, ClientLimits.of_memory(16 << 20), math.nan)
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert failed.tb  # which refers to the socket, as it does while a start is given up


def test_daemon_address_in_use_is_usage_error(start: StartDaemon, folder: Path) -> None:
    first = start()
    for endpoint, sentence in (
        (first.endpoint, "is in use by another process"),
        (first.ipc, "another daemon listens"),
    ):
        other = DaemonProcess(folder, "--memory", "16MiB", listen=[endpoint])
        other.launch()
        assert other.wait() == 2
        assert sentence in other.logs
        assert "Traceback" not in other.logs


def test_daemon_start_failing_late_releases_everything(start: StartDaemon, folder: Path) -> None:
    first = start("--memory", "16MiB", "--http", "127.0.0.1:0")
    taken = first.http.removeprefix("http://")
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "64MiB")
    other = DaemonProcess(folder, "--memory", "16MiB", "--http", taken, *ssd)
    other.launch()
    assert other.wait() == 2
    assert "cannot listen on" in other.logs
    assert "Traceback" not in other.logs
    assert not other.ipc_path.exists()
    with DaemonProcess(folder, "--memory", "16MiB", *ssd) as daemon:
        assert daemon.terminate() == 0


def test_daemon_replaces_sockets_of_dead_daemon(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    daemon.kill()
    assert daemon.ipc_path.exists()
    daemon.restart()
    connect(daemon.ipc).put({key(1): block(1)})
    assert daemon.terminate() == 0
    assert not daemon.ipc_path.exists()
    assert not Path(f"{daemon.ipc_path}.arena").exists()


def test_daemon_does_not_replace_other_files(folder: Path) -> None:
    (folder / "kv.sock").write_text("precious")
    daemon = DaemonProcess(folder, "--memory", "16MiB")
    daemon.launch()
    assert daemon.wait() == 2
    assert "is not a socket" in daemon.logs
    assert (folder / "kv.sock").read_text() == "precious"


def test_lock_file_that_is_symlink_is_refused(folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("precious")
    ssd = folder / "ssd"
    ssd.mkdir()
    for lock in (folder / "kv.sock.lock", ssd / "LOCK"):
        lock.symlink_to(precious)
        result = run("--listen", f"ipc://{folder / 'kv.sock'}", "--http", "off", "--ssd", str(ssd))
        assert result.returncode == 2, result.stderr
        assert "symbolic link" in result.stderr
        assert precious.read_text() == "precious"
        lock.unlink()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_daemon_signal_stops_in_order(start: StartDaemon, number: int) -> None:
    daemon = start()
    daemon.signal(number)
    if number == signal.SIGHUP:  # of the terminal and of its shell
        daemon.signal(number)
    assert daemon.wait() == 0
    assert "stopping" in daemon.logs
    assert "everything is written" in daemon.logs


def test_repeated_hangup_stops_only_in_order() -> None:
    program = (
        "import os, signal\n"
        "from vllm_tiered_kv.server.cli import _stop_on_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        "stops = []\n"
        "_stop_on_signals(lambda: stops.append(1))\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(len(stops))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "2\n")


def test_daemon_second_signal_stops_at_once(start: StartDaemon) -> None:
    daemon = start()
    daemon.freeze()
    daemon.signal(signal.SIGTERM)
    daemon.signal(signal.SIGINT)
    daemon.thaw()
    assert daemon.wait() in (0, 1)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_http_serves_metrics_and_health(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "64MiB", "--http", "127.0.0.1:0")
    client = connect(daemon.endpoint)
    client.put({key(n): block(n) for n in range(3)})
    client.get([key(0), key(9)])
    assert fetch(f"{daemon.http}/healthz") == (200, "ok\n")
    assert fetch(f"{daemon.http}/other")[0] == 404
    port = int(daemon.http.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as head:
        head.sendall(b"HEAD /healthz HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: head.recv(4096), b""))
    assert b" 200 " in answer
    assert b"Content-Length: 3\r\n" in answer
    assert answer.endswith(b"\r\n\r\n"), "an answer to HEAD has no body"
    status, text = fetch(f"{daemon.http}/metrics")
    assert status == 200
    lines = text.splitlines()
    for line in (
        'tiered_kv_server_put_blocks_total{result="stored"} 3',
        'tiered_kv_server_hit_blocks_total{tier="memory"} 1',
        "tiered_kv_server_missed_blocks_total 1",
        'tiered_kv_server_used_bytes{tier="memory"} 12288',
        'tiered_kv_server_capacity_bytes{tier="memory"} 67108864',
        "tiered_kv_server_sessions 1",
        'tiered_kv_server_requests_total{op="put"} 1',
        "# TYPE tiered_kv_server_sessions gauge",
    ):
        assert line in lines
    for zero in (
        'put_blocks_total{result="failed"}',
        'errors_total{code="mismatch"}',
        'evicted_blocks_total{tier="memory"}',
        'requests_total{op="borrow"}',
    ):
        assert f"tiered_kv_server_{zero} 0" in lines, "rate() needs the series from the start"
    assert 'tier="backing"' not in text
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_http_rude_clients_do_not_disturb_others(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "64MiB", "--http", "127.0.0.1:0")
    port = int(daemon.http.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for connection in silent[70:]:
        connection.sendall(os.urandom(100) + b"\r\n\r\n")
    silent[0].settimeout(3)  # earlier than the deadline for its request
    assert silent[0].recv(1) == b"", "the number of connections has no limit"
    for _ in range(20):
        assert fetch(f"{daemon.http}/healthz")[0] == 200
    connect(daemon.endpoint).put({key(1): block(1)})
    for connection in silent:
        connection.close()
    assert fetch(f"{daemon.http}/healthz")[0] == 200
    assert daemon.terminate() == 0


_DAEMON_WITH_SHORT_HTTP_DEADLINE = """
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.server.net import http

http._REQUEST_TIMEOUT_S = 2.0
raise SystemExit(cli.main())
"""


def test_http_slow_senders_do_not_delay_others_and_are_closed(start: StartDaemon) -> None:
    """Each sends a byte now and then, and none ever ends its request."""
    daemon = start(
        *("--memory", "16MiB", "--http", "127.0.0.1:0"),
        program=["-c", _DAEMON_WITH_SHORT_HTTP_DEADLINE],
    )
    port = int(daemon.http.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(64)]

    def have_all_been_closed() -> bool:
        for connection in slow.copy():
            try:
                connection.sendall(b"G")
            except ConnectionError:
                connection.close()
                slow.remove(connection)
        return not slow

    for _ in range(20):
        have_all_been_closed()
        assert fetch(f"{daemon.http}/healthz") == (200, "ok\n")
    eventually(have_all_been_closed)


def test_daemon_imports_neither_torch_nor_vllm() -> None:
    """Keeps the start quick."""
    program = (
        "import sys, vllm_tiered_kv.server.cli, vllm_tiered_kv.server.daemon\n"
        "heavy = {'torch', 'vllm', 'yaml', 'asyncio', 'multiprocessing.pool'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


_DAEMON_OF_A_FULL_DISK = """
import errno, os
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.stores.ssd.disk import OsDisk

write = OsDisk.write


def write_if_there_is_room(self, fd, data, offset):
    if data.nbytes == 64 << 10:  # a block
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(self, fd, data, offset)


OsDisk.write, OsDisk.native = write_if_there_is_room, False
raise SystemExit(cli.main())
"""


def test_daemon_with_unwritten_blocks_at_stop_fails(tmp_path: Path) -> None:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "16MiB")
    daemon = DaemonProcess(tmp_path, "--memory", "16MiB", *ssd)
    daemon.program = ["-c", _DAEMON_OF_A_FULL_DISK]
    with daemon, RawClient(daemon.endpoint) as client:
        client.hello(block_bytes=[64 << 10])
        client.put({key(n): block(n, 64 << 10) for n in range(5)})
        assert daemon.terminate() == 1
        assert "5 blocks could not be written to ssd" in daemon.logs
        assert "not everything could be written" in daemon.logs
        assert "everything is written" not in daemon.logs


_DAEMON_OF_A_SLOW_DISK = """
import os, sys, time
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.stores.ssd.disk import OsDisk

write, gate = OsDisk.write, os.environ["GATE"]


def write_when_allowed(self, fd, data, offset):
    while data.nbytes == 64 << 10 and not os.path.exists(gate):
        time.sleep(0.01)
    return write(self, fd, data, offset)


OsDisk.write, OsDisk.native = write_when_allowed, False
raise SystemExit(cli.main())
"""


def test_stopping_daemon_logs_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "16MiB", "--http", "127.0.0.1:0")
    daemon = DaemonProcess(tmp_path, "--memory", "16MiB", *ssd)
    daemon.program = ["-c", _DAEMON_OF_A_SLOW_DISK]
    with daemon, RawClient(daemon.endpoint) as client:
        client.hello(block_bytes=[64 << 10])
        client.put({key(n): block(n, 64 << 10) for n in range(5)})
        assert fetch(f"{daemon.http}/healthz") == (200, "ok\n")
        os.kill(daemon.pid, signal.SIGTERM)
        eventually(lambda: "blocks are left to write to ssd" in daemon.logs)
        assert fetch(f"{daemon.http}/healthz") == (503, "stopping\n")
        gate.touch()
        eventually(lambda: "everything is written" in daemon.logs)


_DAEMON_OF_A_SYNC_THAT_FAILS = """
import errno, os
from vllm_tiered_kv.server import cli
from vllm_tiered_kv.stores.ssd.data_file import DataFile

sync, fault = DataFile.sync, os.environ["FAULT"]


def sync_or_fail(self):
    if os.path.exists(fault):
        os.unlink(fault)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    sync(self)


DataFile.sync = sync_or_fail
raise SystemExit(cli.main())
"""


def test_blocks_lost_by_failed_sync_are_written_at_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory still has the blocks, so the last flush writes them."""
    fault = tmp_path / "fault"
    monkeypatch.setenv("FAULT", str(fault))
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "16MiB")
    program = ["-c", _DAEMON_OF_A_SYNC_THAT_FAILS]
    wanted = {key(n): block(n, 64 << 10) for n in range(5)}
    with DaemonProcess(tmp_path, "--memory", "16MiB", *ssd, program=program) as daemon:
        with RawClient(daemon.endpoint) as client:
            client.hello(block_bytes=[64 << 10])
            client.put(wanted)
            fault.touch()
            with pytest.raises(Refused, match="5 blocks could not be written to ssd"):
                client.ask(wire.Flush())
        assert daemon.terminate() == 0
        daemon.restart()
        with RawClient(daemon.endpoint) as client:
            client.hello(block_bytes=[64 << 10])
            assert client.get(list(wanted)) == wanted
