"""What `make` tells while it installs, and what it keeps pip from installing."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from tools.setup_env import STAND_INS_ON_CPU, Environment, Step, time_left


def step(megabytes: int) -> Step:
    return Step("a step", "a note", (), megabytes)


def test_time_left_is_that_of_the_downloads_at_the_pace_so_far() -> None:
    steps = [step(200), step(1000), step(0), step(200)]
    assert time_left(steps, 1, 20.0) == "about 2 min"
    assert time_left(steps, 3, 120.0) == "less than a minute"


def test_time_left_is_unknown_without_a_pace_and_nothing_at_the_end() -> None:
    steps = [step(0), step(100), step(0)]
    assert time_left(steps, 1, 20.0) == ""
    assert time_left(steps, 2, 20.0) == ""


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
