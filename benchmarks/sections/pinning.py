"""What a large arena costs at the start (`benchmarks/pinning.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import measured_on, median, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
Host memory is pinned in the background, after the kernel has provided its pages: the driver holds
up others while it pins. Eager engines of four layers start with and without the arena in turns,
after one start that is not counted. Goal P13: with 64 GiB an engine is ready at most 1 s later.
"""


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
            f"it is pinned after {arena['pinned_s']:.1f} s. A small kernel, launched and waited "
            "for again and again, in ms:\n\n"
        )
        text += table(
            ["", "median", "99 of 100 within", "longest"],
            [
                [name, *(number(facts[key], 3) for key in ("median", "p99", "longest"))]
                for name, facts in _launches(arena, data.get("arena_left_to_driver"))
            ],
        )
    return text


def _launches(
    arena: dict[str, Any], left_to_driver: dict[str, Any] | None
) -> Iterator[tuple[str, dict[str, float]]]:
    yield "alone", arena["launch_ms"]["alone"]
    if arena["launch_ms"]["while_pinning"]:
        yield f"while {arena['gib']:.0f} GiB are pinned", arena["launch_ms"]["while_pinning"]
    if left_to_driver and left_to_driver["launch_ms"]["while_pinning"]:
        name = f"while {left_to_driver['gib']:.0f} GiB are pinned whose pages the driver has to get"
        yield name, left_to_driver["launch_ms"]["while_pinning"]
