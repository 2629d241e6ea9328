"""What `make` tells while it installs."""

from __future__ import annotations

from tools.setup_env import Step, time_left


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
