"""What a large arena costs at the start (`benchmarks/pinning.py`)."""

from __future__ import annotations

from benchmarks.markdown import measured_on, median, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
Host memory is pinned in the background. Engine starts with and without the arena took turns, after
one that filled vLLM's compile cache. The model has four layers: what loading many of them takes
differs from start to start by more than the arena could add. Goal P13: with 64 GiB an engine is
ready at most 1 s later.
"""
_LAUNCH_COLUMNS = ("median", "p99", "longest")


def section(results: Results) -> str:
    found = results.of("pinning")
    if not found:
        return ""
    return "\n".join(["## A large arena at the start\n", _INTRO, *(_run(r) for r in found)])


def _run(result: Result) -> str:
    data = result.data
    text = measured_on(result) + "\n"
    starts = data["derived"]
    if starts:
        text += table(
            ["arena, GiB", "start without, s", "start with, s", "later by, s"],
            [
                [
                    number(data["gib"], 0),
                    median(starts["without"], 2),
                    median(starts["with"], 2),
                    number(starts["later_by_s"], 2),
                ]
            ],
        )
    arena = data["arena"]
    if arena:
        text += (
            f"\nOpening the arena holds up its caller for {arena['start_held_up_s']:.3f} s; all of "
            f"it is pinned after {arena['pinned_s']:.1f} s.\n"
        )
        text += _launches(arena["launch_ms"])
    return text


def _launches(times: dict[str, dict[str, float]]) -> str:
    """What pinning does to others who use the device."""
    return "\nA small kernel, launched and waited for again and again, in ms:\n\n" + table(
        ["", "median", "99 of 100 within", "longest"],
        [
            [name.replace("_", " "), *(number(facts[key], 3) for key in _LAUNCH_COLUMNS)]
            for name, facts in times.items()
        ],
    )
