"""The SSD tier beside fio (`benchmarks/ssd_tier.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import measured_on, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
Blocks written, read and replaced, in GB/s, and as a part of what fio reaches with the same block
size and direct I/O (goal P9: at least 0.95): with as many threads, each of which reuses one buffer
(psync), and with as many places in memory as ours (libaio), which has more transfers under way. On
a virtual disk, whose bytes are copied, one buffer stays in the processor's cache and many do not.
In brackets the smallest and the largest ratio of a round. fio checks nothing; every block here is
hashed. Recovery is of a tier of 100 GB (goal P14: 2 s).
"""
_INDEX_INTRO = """\
Its index as it grows (goal P12: at most 150 bytes a block): what the process holds after it has
opened a folder of so many blocks, and how long that took.
"""
_ACTIONS = ("write", "read", "replace")
_FIO = {"fio": "psync", "fio_with_as_many_places": "libaio"}


def section(results: Results) -> str:
    found = results.of("ssd_tier")
    if not found:
        return ""
    indexes = [_index(result) for result in results.of("ssd_index")]
    if indexes:
        indexes.insert(0, _INDEX_INTRO)
    return "\n".join(["## The SSD tier\n", _INTRO, *(_run(result) for result in found), *indexes])


def _index(result: Result) -> str:
    rows = [
        [
            f"{case['blocks']:,}",
            number(case["bytes_per_block"], 0),
            number(case["seconds_to_serving"], 1),
            number(case["cpu_seconds_to_serving"], 1),
        ]
        for case in result.data["index"]
    ]
    header = ["blocks", "bytes a block", "opened after, s", "processor time of it, s"]
    return measured_on(result) + "\n" + table(header, rows)


def _run(result: Result) -> str:
    rows = [
        [
            name,
            f"{case['block_bytes'] / 1024:,.0f} KiB",
            *(number(case.get(f"{action}_gb_per_s"), 2) for action in _ACTIONS),
            *(_ratio(case, f"{action}_of_{kind}") for kind in _FIO for action in _ACTIONS),
        ]
        for name, case in result.data["speed"].items()
    ]
    of_fio = [f"{action} of {name}" for name in _FIO.values() for action in _ACTIONS]
    header = ["shape", "block", *_ACTIONS, *of_fio]
    text = measured_on(result) + "\n" + table(header, rows)
    recovery = result.data.get("recovery")
    if recovery:
        text += (
            f"\nServing {recovery['blocks']:,} blocks {recovery['seconds_to_serving']:.1f} s after "
            f"the start, {recovery['seconds_to_serving_cold_journal']:.1f} s with a cold journal.\n"
        )
    return text


def _ratio(case: dict[str, Any], name: str) -> str:
    """Earlier results have no spread."""
    spread = case.get(f"{name}_spread")
    text = number(case.get(name), 2)
    return f"{text} ({number(spread[0], 2)} … {number(spread[1], 2)})" if spread else text
