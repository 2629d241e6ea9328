"""Units, images and manifests in deploy/: they parse, and name options and places that exist.

No image is built here, and no cluster runs them.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tiered_kv.api import cli
from vllm_tiered_kv.api.deployment import Deployment
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.options import parse_size, read_yaml
from vllm_tiered_kv.server import cli as server_cli
from vllm_tiered_kv.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yml").read_text())
DAEMON_IMAGE, ENGINE_IMAGE = "tiered-kv-server", "vllm-tiered-kv"


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for one in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}/{one['kind']}", one


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, one in objects():
        if "template" in one.get("spec", {}):
            yield name, one["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def command_lines() -> Iterator[tuple[str, str, list[str]]]:
    """Where, which image, and what its entry point is given."""
    for name, service in COMPOSE["services"].items():
        if "command" in service and "entrypoint" not in service:
            yield f"compose/{name}", service["image"], service["command"]
    for name, pod in pods():
        for one in containers(pod):
            yield f"{name}/{one['name']}", one["image"], one["args"]


DAEMON_LINES = [(where, args) for where, image, args in command_lines() if image == DAEMON_IMAGE]
ENGINE_LINES = [(where, args) for where, image, args in command_lines() if image == ENGINE_IMAGE]


def checked(*arguments: str) -> dict[str, Any]:
    """All options of a daemon that is started with these."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert server_cli.main([*arguments, "--check"]) == 0
    options: dict[str, Any] = json.loads(out.getvalue())
    return options


def cache_options(args: list[str]) -> TieredKVConfig:
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("TieredKVConnector", "kv_both")
    return TieredKVConfig.load(transfer["kv_connector_extra_config"], {})


@pytest.mark.parametrize(("where", "args"), DAEMON_LINES, ids=[one for one, _ in DAEMON_LINES])
def test_options_of_a_daemon_are_valid(where: str, args: list[str]) -> None:
    options = checked(*args)
    assert options["listen"] == ["ipc:///run/kv/kv.sock"]
    assert options["ssd"] == "/ssd"


@pytest.mark.parametrize(("where", "args"), ENGINE_LINES, ids=[one for one, _ in ENGINE_LINES])
def test_options_of_an_engine_are_valid(where: str, args: list[str]) -> None:
    assert cache_options(args).remote == ("ipc:///run/kv/kv.sock",)


def test_compose_and_manifests_have_daemons_and_engines() -> None:
    assert len(DAEMON_LINES) == len(ENGINE_LINES) == 3


def test_systemd_files_are_valid_and_share_a_socket() -> None:
    options = ServerOptions.load(read_yaml(DEPLOY / "systemd" / "server.yaml"))
    (engine,) = Deployment.read(DEPLOY / "systemd" / "chat.yml").programs
    assert list(cache_options(list(engine.command)).remote) == options.listen
    unit = (DEPLOY / "systemd" / "tiered-kv-server.service").read_text()
    assert "RuntimeDirectory=kv\n" in unit
    assert options.listen[0].startswith("ipc:///run/kv/")
    assert "StateDirectory=kv\n" in unit
    assert options.ssd == "/var/lib/kv"


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_commands_that_exist(unit: Path) -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    lines = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert f"\n{Path(program).name} = " in scripts
        file = DEPLOY / "systemd" / Path(words[-1].replace("%i", "chat")).name
        arguments = [*words[:-1], str(file)]
        if program.endswith("tiered-kv-server"):
            checked(*arguments)
        else:
            assert cli.main([*arguments, "--check"]) == 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_do_not_restart_what_no_restart_mends(unit: Path) -> None:
    """The status counts of the main process only: systemd restarts after others fail, for ever."""
    text = unit.read_text()
    assert f"\nRestartPreventExitStatus={server_cli.EXIT_USAGE}\n" in text
    assert set(re.findall(r"^Exec\w+", text, re.MULTILINE)) == {"ExecStart"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = re.sub(r"/opt/vllm/bin/\S+", "/bin/true", unit.read_text())
        file = tmp_path / unit.name.replace("@", "@chat")
        file.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), unit.name


def test_images_are_built_from_targets_and_files_that_exist() -> None:
    targets = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    services = COMPOSE["services"].values()
    built = {one["image"]: one["build"] for one in services if "build" in one}
    assert {image: build["target"] for image, build in built.items()} == {
        DAEMON_IMAGE: "daemon",
        ENGINE_IMAGE: "engine",
    }
    for build in built.values():
        assert build["target"] in targets
        context = (DEPLOY / "docker" / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).samefile(DEPLOY / "docker" / "Dockerfile")
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert ignored == ["*", "!dist"]
    assert set(re.findall(r"^COPY (\S+)", DOCKERFILE, re.MULTILINE)) == {"dist/*.whl"}


def test_images_take_the_package_from_nowhere_but_dist() -> None:
    """An index may have another package of this name, with a higher version."""
    installs = re.findall(r"pip install (?:[^&]|&(?!&))*", DOCKERFILE.replace("\\\n", " "))
    for first, then in (installs[:2], installs[2:]):
        assert "--no-index --no-deps --find-links /wheels" in first
        assert "--upgrade" not in then  # what is installed satisfies it


def test_health_check_of_the_image_asks_where_the_daemon_answers() -> None:
    assert f"http://{ServerOptions().http}/healthz" in DOCKERFILE


def test_volumes_of_compose_exist() -> None:
    for service in COMPOSE["services"].values():
        for mount in service.get("volumes", ()):
            assert mount.split(":")[0] in COMPOSE["volumes"]


def test_services_of_compose_share_a_pid_namespace_that_outlives_each() -> None:
    """The end of a container's first process ends all processes of its namespace."""
    daemon, engine = (COMPOSE["services"][name] for name in ("daemon", "chat"))
    assert daemon["pid"] == engine["pid"] == "service:processes"
    assert "processes" in daemon["depends_on"]  # so it stops last
    assert "daemon" in engine["depends_on"]
    assert "pid" not in COMPOSE["services"]["processes"]


def test_daemon_of_compose_starts_only_with_options_that_are_valid() -> None:
    """It restarts whatever its status is, so wrong options would restart it for ever."""
    check, daemon = (COMPOSE["services"][name] for name in ("check", "daemon"))
    assert daemon["depends_on"]["check"] == {"condition": "service_completed_successfully"}
    assert (check["image"], check["command"]) == (daemon["image"], daemon["command"])
    assert "restart" not in check
    program, *first = check["entrypoint"]
    assert f'ENTRYPOINT ["{program}"]' in DOCKERFILE
    assert server_cli.main([*first, *check["command"]]) == 0
    assert server_cli.main([*first, *check["command"], "--ssd-space=much"]) == server_cli.EXIT_USAGE


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=[name for name, _ in pods()])
def test_pods_mount_volumes_that_exist_and_see_the_processes_of_peers(
    name: str, pod: dict[str, Any]
) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    for one in containers(pod):
        mounted = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        assert set(mounted) <= volumes
        assert mounted["sockets"] == "/run/kv"
        ports = {port["name"] for port in one["ports"]}
        probes = [probe for key, probe in one.items() if key.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        assert len(probes) >= 2
    assert pod.get("hostPID") or pod.get("shareProcessNamespace")


def test_daemons_of_pods_have_no_rights_that_they_do_not_need() -> None:
    """tests/daemon/test_container_rights.py runs a daemon so."""
    for _, pod in pods():
        assert pod["automountServiceAccountToken"] is False
        for one in containers(pod):
            context = one["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            if one["image"] == DAEMON_IMAGE:
                assert context["readOnlyRootFilesystem"] is True
                assert context["capabilities"] == {"drop": ["ALL"]}
                options = checked(*one["args"])
                mounted = [mount["mountPath"] for mount in one["volumeMounts"]]
                assert options["ssd"] in mounted
                (socket,) = options["listen"]
                assert str(Path(socket.removeprefix("ipc://")).parent) in mounted


def test_commands_of_the_page_put_units_and_options_in_place(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"^```\n(cp deploy/systemd.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)  # every host has it
    for line in block.replace(" /etc", f" {tmp_path}/etc").splitlines():
        if not line.startswith(("useradd", "systemctl")):
            subprocess.run(line, shell=True, check=True, cwd=ROOT)
    placed = {str(path.relative_to(tmp_path / "etc")) for path in tmp_path.rglob("*.*")}
    assert {"tiered-kv/server.yaml", "tiered-kv/chat.yml", "systemd/system/vllm@.service"} <= placed


def test_daemon_and_engines_of_a_node_share_the_folder_of_the_socket() -> None:
    def sockets(kind: str) -> Any:
        pod = dict(pods())[kind]
        return next(one["hostPath"] for one in pod["volumes"] if one["name"] == "sockets")

    assert sockets("daemonset.yaml/DaemonSet") == sockets("engine.yaml/Deployment")


def test_memory_limits_hold_what_the_options_ask_for() -> None:
    for name, pod in pods():
        for one in containers(pod):
            limit = parse_size(name, one["resources"]["limits"]["memory"] + "B")
            if one["image"] == DAEMON_IMAGE:
                options = checked(*one["args"])
                assert limit > 1.01 * options["memory"] + options["network_memory"]
            else:
                assert limit > 2 * cache_options(one["args"]).cpu_memory


def test_selectors_match_labels() -> None:
    for name, one in objects():
        if one["kind"] == "Service":
            wanted = one["spec"]["selector"]
            deployed = [other for at, other in objects() if at.startswith(name.split("/")[0])]
            assert any(wanted == other["metadata"].get("labels") for other in deployed)
        else:
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"] == labels
