"""The file of `tiered-kv up`: what it may say, what becomes of it, which mistakes are named."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.deployment import Deployment, Program
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.options import read_yaml


def write(folder: Path, content: Any) -> Path:
    path = folder / "deploy.yml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return path


def read(folder: Path, content: Any) -> Deployment:
    return Deployment.read(write(folder, content))


def value_of(program: Program, flag: str) -> str:
    return program.command[program.command.index(flag) + 1]


def cache_of(program: Program) -> dict[str, Any]:
    transfer = json.loads(value_of(program, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "TieredKVConnector"
    return transfer.get("kv_connector_extra_config", {})


def test_deployment_of_daemon_and_servers_starts_in_this_order(tmp_path: Path) -> None:
    deployment = read(
        tmp_path,
        {
            "servers": [
                {
                    "model": "org/Model-1",
                    "port": 8001,
                    "args": {
                        "max_model_len": 4096,
                        "enforce-eager": True,
                        "enable_prefix_caching": False,
                        "allowed_origins": ["a", "b"],
                        "override_generation_config": {"top_p": 0.5},
                    },
                    "cache": {"cpu_memory": "1GiB"},
                    "env": {"CUDA_VISIBLE_DEVICES": 1},
                },
                {"model": "org/Model-2", "name": "second", "port": 8002, "command": "vllm serve"},
            ],
            "daemon": {"memory": "64MiB", "listen": ["tcp://0.0.0.0:9531", "ipc:///run/x.sock"]}
            | {"secret_key": "/k", "clients": "/c", "http": "127.0.0.1:9601", "prefault": False},
            "stop_timeout": "2m",
        },
    )
    daemon, first, second = deployment.programs
    assert daemon.is_daemon
    assert daemon.health_url == "http://127.0.0.1:9601/healthz"
    assert value_of(daemon, "--memory") == "64MiB"
    assert value_of(daemon, "--prefault") == "off"
    assert daemon.command.count("--listen") == 2
    assert (first.name, second.name) == ("Model-1", "second")
    assert first.command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert second.command[:2] == ("vllm", "serve")
    assert value_of(first, "--model") == "org/Model-1"
    assert (value_of(first, "--host"), value_of(first, "--port")) == ("127.0.0.1", "8001")
    text = shlex.join(first.command)
    assert "--max-model-len 4096 --enforce-eager --no-enable-prefix-caching" in text
    assert "--allowed-origins a b --override-generation-config '{\"top_p\": 0.5}'" in text
    assert cache_of(first) == {"cpu_memory": "1GiB", "remote": "ipc:///run/x.sock"}
    assert first.env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert first.health_url == "http://127.0.0.1:8001/health"
    assert (deployment.start_timeout_s, deployment.stop_timeout_s) == (1800, 120)


def test_deployment_without_daemon_keeps_the_cache_as_given(tmp_path: Path) -> None:
    (server,) = read(tmp_path, {"servers": [{"model": "m", "host": "::"}]}).programs
    assert cache_of(server) == {}
    assert server.address == ("127.0.0.1", 8000)


def test_daemon_without_options_has_those_of_tiered_kv_server(tmp_path: Path) -> None:
    deployment = read(tmp_path, "daemon:\n")
    (daemon,) = deployment.programs
    assert str(deployment.daemon_address) == "tcp://127.0.0.1:9527"
    assert daemon.health_url == "http://127.0.0.1:9528/healthz"


def test_quotas_of_the_daemon_become_flags(tmp_path: Path) -> None:
    quota = {"default": "4GiB", "ab12": "1GiB"}
    (daemon,) = read(tmp_path, {"daemon": {"memory_quota": quota}}).programs
    assert shlex.join(daemon.command).endswith("--memory-quota 4GiB --memory-quota ab12=1GiB")


SERVER = {"model": "m"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"server": [SERVER]}, 'server: unknown option; did you mean "servers"?'),
        ({"servers": [SERVER, {"modle": "x"}]}, r'servers\[1\].modle: .* did you mean "model"?'),
        ({"daemon": {"memmory": "1GiB"}}, "daemon: --memmory: .* did you mean --memory?"),
        ({"daemon": {"memory": "much"}}, "daemon: --memory: 'much' is not a size"),
        ({"daemon": {"ssd_space": "1GiB"}}, "daemon: ssd_space: there is no SSD tier"),
        ({"daemon": {"http": False}}, "daemon.http: must not be off"),
        ({"daemon": {"http": "127.0.0.1:0"}}, "daemon.http: .* names no port"),
        ({"daemon": {"http": "0.0.0.0:9528"}}, "daemon: http: .* set http_token"),
        ({"daemon": {"listen": "tcp://0.0.0.0:9527"}}, "daemon: listen: .* needs keys"),
        ({"daemon": {"version": "x"}}, "daemon: "),
        ({"daemon": {"listen": "tcp://127.0.0.1:*"}}, "daemon.listen: "),
        ({"daemon": {"memory": None}}, "daemon.memory: has no value"),
        ({"daemon": {"memory_quota": {12345: "1GiB"}}}, "12345 is a number to YAML"),
        ({"daemon": ["memory"]}, "daemon: expected a map"),
        ({"servers": {"model": "m"}}, 'servers: expected a list, each entry after a "- "'),
        ({"servers": [{"port": 8000}]}, r"servers\[0\].model: is required"),
        ({"servers": [{**SERVER, "port": 80000}]}, r"servers\[0\].port: expected a number from 1"),
        (
            {"servers": [{**SERVER, "cache": {"cpu_memroy": "1GiB"}}]},
            r'servers\[0\].cache: cpu_memroy: unknown option; did you mean "cpu_memory"?',
        ),
        ({"servers": [{**SERVER, "args": {"port": 1}}]}, r"args.port: is set by the key port"),
        (
            {"servers": [{**SERVER, "args": {"kv_transfer_config": {}}}]},
            "kv_transfer_config: is set by the key cache",
        ),
        ({"servers": [{**SERVER, "args": {"seed": None}}]}, "args.seed: has no value"),
        ({"servers": [{**SERVER, "args": {"uds": "/s"}}]}, "uds: `tiered-kv up` waits for /health"),
        ({"servers": [{**SERVER, "env": {"A": True}}]}, r"env.A: is a switch to YAML; .* quotes"),
        ({"servers": [{**SERVER, "args": {"ssl_certfile": "x"}}]}, "for TLS use a proxy"),
        ({"servers": [{**SERVER, "command": "vllm 'serve"}]}, r"command: No closing quotation"),
        ({"servers": [SERVER, {**SERVER, "port": 1}]}, "two processes are named 'm'"),
        ({"servers": [SERVER, {"model": "n"}]}, "m and n have the same port 8000"),
        ({"servers": [{"model": "daemon"}], "daemon": {}}, "two processes are named 'daemon'"),
        ({"daemon": {}, "servers": [{**SERVER, "port": 9528}]}, "have the same port 9528"),
        ({"daemon": {"secret_key": "/k", "clients": "/c"}, "servers": [SERVER]}, "requires keys"),
        (
            {"daemon": {"backing": "redis://u:swordfish@h:1"}},
            r"daemon.backing: redis://u:\*\*\*@h:1",
        ),
        (
            {"servers": [{**SERVER, "cache": {"remote": "rediss://:swordfish@h"}}]},
            r"servers\[0\].cache.remote: .* leave it out and set TIERED_KV_REDIS_PASSWORD",
        ),
        ({"start_timeout": "soon"}, "start_timeout: 'soon' is not a duration"),
        ({}, "names neither a daemon nor servers"),
        ("servers:\n- model: a\n  model: b\n", "model: is given more than once"),
        ("servers: [", "line 1, is not YAML"),
        ("- a\n", "must map options to values"),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as error:
        read(tmp_path, content)
    assert "swordfish" not in str(error.value)


def test_keys_of_one_server_may_repeat_those_of_another(tmp_path: Path) -> None:
    path = write(tmp_path, "a: &x [{b: 1}, {b: 2}]\nc: *x\n")
    assert read_yaml(path) == {"a": [{"b": 1}, {"b": 2}], "c": [{"b": 1}, {"b": 2}]}


def test_check_prints_the_commands_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = tmp_path / "started"
    server = {"model": "m", "command": f"touch {started}", "env": {"HF_HOME": "/my models"}}
    path = write(tmp_path, {"daemon": {"memory": "64MiB"}, "servers": [server]})
    assert main(["up", str(path), "--check"]) == 0
    about_daemon, daemon, about_server, command = capsys.readouterr().out.splitlines()
    assert about_daemon == "# daemon, ready when http://127.0.0.1:9528/healthz answers"
    assert shlex.split(daemon)[1:] == ["-m", "vllm_tiered_kv.server.cli", "--memory", "64MiB"]
    assert about_server == "# m, ready when http://127.0.0.1:8000/health answers"
    assert shlex.split(command)[:4] == ["HF_HOME=/my models", "touch", str(started), "--model"]
    assert not started.exists()


def test_unusable_file_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", str(write(tmp_path, {"sevrers": []}))]) == 2
    assert 'sevrers: unknown option; did you mean "servers"?' in capsys.readouterr().err
    assert main(["up", str(tmp_path / "none.yml")]) == 2
    assert "none.yml cannot be read: No such file" in capsys.readouterr().err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    shown = capsys.readouterr().out
    for key in ("daemon MAP", "servers LIST", "servers[].model TEXT", "servers[].cache MAP"):
        assert f"  {key}" in shown
    example = shown.partition("an example:\n")[2].partition("exit status:")[0]
    (server,) = yaml.safe_load(example)["servers"]
    assert server["model"]
