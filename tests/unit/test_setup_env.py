"""What `make` tells while it installs, and what it keeps pip from installing."""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tools.setup_env import STAND_INS_ON_CPU, Environment, Step, bring_up_to_date, time_left


def step(megabytes: int, seconds: int = 0) -> Step:
    return Step("a step", "a note", (), megabytes, seconds)


def test_time_left_is_that_of_the_downloads_at_the_pace_so_far_and_of_other_work() -> None:
    steps = [step(200, 5), step(1000), step(0, 120), step(200)]
    assert time_left(steps, 1, 25.0) == "; about 4 min left"
    assert time_left(steps, 1, 25.0, within=100.0) == "; about 2 min left"
    assert time_left(steps, 1, 25.0, within=1e6) == "; about 2 min left"
    assert time_left(steps, 3, 245.0) == "; less than a minute left"
    assert time_left(steps, 1, 1.0) == "; about 2 min left", "the download was in pip's cache"
    assert time_left(steps, 4, 265.0) == ""


def test_time_left_is_told_before_the_first_download() -> None:
    assert time_left([step(6000), step(0, 60)], 0, 0.0) == "; about 11 min left"


def test_stand_ins_pass_for_installed_packages(tmp_path: Path) -> None:
    """Until they are uninstalled: nothing else of them is there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    Environment(tmp_path).pretend(STAND_INS_ON_CPU)
    found = list(metadata.distributions(path=[str(packages)]))
    assert {each.metadata["Name"] for each in found} == set(STAND_INS_ON_CPU)
    for each in found:
        assert each.version == "999"
        files = {packages / file for file in each.files or ()}
        assert files == set((packages / f"{each.metadata['Name']}-999.dist-info").iterdir())


def test_modules_are_compiled_when_they_are_imported_not_when_they_are_installed(
    tmp_path: Path,
) -> None:
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny.py", "")
        file.writestr(
            "tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"
        )
        file.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("tiny-1.dist-info/RECORD", "")
    environment = Environment(tmp_path / "environment")
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    environment.python.chmod(0o755)
    target = tmp_path / "installed"
    pip = ("install", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    environment.install(Step("tiny", "", pip))
    assert (target / "tiny.py").exists()
    assert not list(target.rglob("*.pyc"))


def test_servers_that_only_tests_start_are_added_to_the_environment_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a demo after the tests neither removes them nor starts over."""
    installed: list[str] = []

    def create(environment: Environment) -> None:
        environment.python.parent.mkdir(parents=True)
        environment.python.touch()
        (environment.folder / "pyvenv.cfg").touch()

    def install(environment: Environment, step: Step, left: object) -> None:
        installed.append(step.title)

    monkeypatch.setattr(Environment, "create", create)
    monkeypatch.setattr(Environment, "install", install)
    engine, servers = (Step(title, "", ()) for title in ("engine", "servers"))

    def ask(wanted: str, *more: Step) -> list[str]:
        installed.clear()
        bring_up_to_date(tmp_path / "env", "all", wanted, [engine], [], 0, servers=more)
        return list(installed)

    assert ask("1") == ["engine"], "the demo"
    assert ask("1", servers) == ["servers"], "the tests"
    assert ask("1") == []
    assert ask("1", servers) == []
    assert ask("2") == ["engine"]
    assert ask("2", servers) == ["servers"]
