"""Mistakes at startup print one sentence and leave nothing behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import StartDaemon
from tests.patience import mostly_slow
from vllm_tiered_kv.device.arena import memory_limit
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import read_yaml
from vllm_tiered_kv.server.options import ServerOptions

ROOT = Path(__file__).parents[2]


def refusal(*arguments: str, status: int = 2) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == status, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("port", mostly_slow(["65536", "-1", "", "99999", "²"], 2))
def test_invalid_port_is_refused(port: str) -> None:
    assert "is not like" in refusal("--http", "off", "--listen", f"tcp://127.0.0.1:{port}")
    assert "is neither like" in refusal("--http", f"127.0.0.1:{port}")


@pytest.mark.parametrize("option", ["memory", "ssd_space", "write_queue", "memory_quota"])
@pytest.mark.parametrize("size", [1 << 70, "9000000000GiB", "1" * 400 + "GiB", "9" * 5000])
def test_absurd_size_is_refused(option: str, size: object) -> None:
    with pytest.raises(ConfigError, match=option):
        ServerOptions.load({option: size, "ssd": "/x"})


@pytest.mark.parametrize("option", ["workers", "stall_timeout"])
def test_number_with_thousands_of_digits_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ServerOptions.load({option: "9" * 5000})


def test_memory_beyond_machine_is_refused(folder: Path) -> None:
    listen = f"ipc://{folder}/kv.sock"
    said = refusal(
        "--http",
        "off",
        "--listen",
        listen,
        "--memory",
        str(2 * memory_limit()),
        "--prefault",
        "false",
    )
    assert "is more than the machine or container has" in said


def test_quota_prefix_of_digits_must_be_quoted(folder: Path) -> None:
    path = folder / "server.yaml"
    path.write_text("memory_quota:\n  012345: 1GiB\n")
    with pytest.raises(ConfigError, match="write prefixes in quotes"):
        ServerOptions.load(read_yaml(str(path)))
    path.write_text("memory_quota:\n  '012345': 1GiB\n")
    assert ServerOptions.load(read_yaml(str(path))).memory_quota == {"012345": 1 << 30}


@pytest.mark.parametrize(
    ("option", "value", "missing"),
    [
        ("ssd_space", "1GiB", "ssd"),
        ("backing_space", "1GiB", "backing"),
        ("backing_ttl", 7, "back"),
    ],
)
def test_size_of_unconfigured_tier_is_refused(option: str, value: object, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: there is no .* tier; name its .*{missing}"):
        ServerOptions.load({option: value})


def test_off_as_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        ServerOptions.load({"write_queue": False})


def test_file_in_place_of_folder_is_refused(folder: Path) -> None:
    file = folder / "file"
    file.touch()
    usual = ("--http", "off", "--memory", "4MiB", "--listen", f"ipc://{folder}/kv.sock")
    said = refusal(*usual, "--ssd", str(file), "--ssd-space", "8MiB")
    assert f"ssd: {file}: Not a directory" in said
    said = refusal(*usual, "--backing", f"file://{file}", "--backing-space", "8MiB")
    assert f"backing: {file} cannot be used: Not a directory" in said


def test_keygen_failing_midway_leaves_no_file(folder: Path) -> None:
    keygen = "import sys, vllm_tiered_kv.server.cli as cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", keygen, "keygen", str(folder / "keys"), "server"]
    limits = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limits += f"resource.setrlimit({resource.RLIMIT_FSIZE}, (10, 10));"
    full = [*command[:2], limits + keygen, *command[3:]]
    done = subprocess.run(full, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "server.key_secret cannot be written" in done.stderr
    assert os.listdir(folder / "keys") == []
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def test_recovery_is_logged_once(start: StartDaemon, folder: Path) -> None:
    daemon = start("--memory", "4MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "8MiB")
    assert daemon.logs.count("recovered 0 blocks") == 1
