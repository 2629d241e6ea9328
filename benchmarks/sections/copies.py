"""Copies of blocks between device and host (`block_copy.py`, `token_copy.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import measured_on, median, number, table

_TOKEN_INTRO = """\
A sampled token has to get to the host past the blocks that are being stored. A few bytes on a
stream of their own, 2 ms after 587 MB in blocks of 0.875 MiB were sent on their way, in
milliseconds. Behind the copies of one stream they wait for all of them; between those of several
streams, as stores are made here, they hardly wait.
"""


def token_section(results: Results) -> str:
    found = [_token(result) for result in results.of("token_copy")]
    return "\n".join(["## A sampled token behind stores\n", _TOKEN_INTRO, *found]) if found else ""


def _token(result: Result) -> str:
    rows = [
        [name, median(found["token_ms"], 2), median(found["blocks_ms"], 2)]
        for name, found in result.data["ways"].items()
    ]
    return measured_on(result) + "\n" + table(["blocks on their way", "token", "all blocks"], rows)


_INTRO = """\
Random blocks of each shape to and from random pinned slots, in GB/s. *memcpy* is one large copy,
the limit; *pages* one DMA descriptor for every page of every layer, in one batch. *layers* is the
layer-outermost layout of vLLM, *blocks* the block-outermost one. The last columns compare the best
way of each layout with both (goals: at least 0.97 of memcpy, at least 1.3 times pages).
"""
_INTERFERENCE = """\
Matrix products that run without a pause, in windows. Every other window has copies beside it all
the while; its time is compared with the mean of the windows before and after it, which have none
(goal: at most 1.01). *nothing* is a window without copies as well: what it shows is the error of
the method. Spread of the products alone: {low} to {high} ms.
"""
_CLOCK = """\
*Clock* is the average of the device's multiprocessors over a window, compared in the same way: at
0.98 of it the same work takes 1.02 times as long, whatever else the copies take.
"""
_CYCLES = """\
*Cycles* are time by clock, window by window: what the copies cost whatever the clock did.
"""


_SHARDS_INTRO = """\
What `portable_shards` costs a copy, in GB/s, beside one large copy (*memcpy*): `in N` is a rank
that holds N shards, whose blocks are divided into N times as many pieces; `in 1` one whose blocks
are not divided. BLHNC is the layout that the connector asks for, LBNHC vLLM's own. `staged` goes
through a small buffer, `direct` is a kernel on mapped memory, `apart` are shards in slots of their
own, as in the memory of a daemon on the same host.
"""


def shard_section(results: Results) -> str:
    found = results.of("shard_copy")
    if not found:
        return ""
    return "\n".join(["## Copies of shards\n", _SHARDS_INTRO, *map(_shards, found)])


def _shards(result: Result) -> str:
    shapes: dict[str, Any] = result.data["shapes"]
    parts = [measured_on(result)]
    for way, title in (("in", "Host to device"), ("out", "Device to host")):
        names = list(dict.fromkeys(name for shape in shapes.values() for name in shape[way]))
        rows = [[name, *(number(one[way].get(name)) for one in shapes.values())] for name in names]
        parts.append(f"{title}:\n\n{table(['', *shapes], rows)}")
    return "\n".join(parts)


def block_section(results: Results) -> str:
    found = results.of("block_copy")
    if not found:
        return ""
    return "\n".join(["## Copies of blocks\n", _INTRO, *(_run(result) for result in found)])


def _run(result: Result) -> str:
    shapes: dict[str, Any] = result.data["shapes"]
    parts = [measured_on(result)]
    for way, title in (("in", "Host to device"), ("out", "Device to host")):
        names = list(dict.fromkeys(name for shape in shapes.values() for name in shape[way]))
        ratios = [name for name in next(iter(shapes.values()))["ratios"] if f" {way} " in name]
        rows = [
            [
                shape_name,
                f"{shape['block_bytes'] / 1024:,.0f} KiB",
                *(number(shape[way].get(name)) for name in names),
                *(number(shape["ratios"].get(name), 3) for name in ratios),
            ]
            for shape_name, shape in shapes.items()
        ]
        head = ["shape / block size", "bytes", *names, *ratios]
        parts.append(f"{title}:\n\n{table(head, rows)}")
    parts.append(_verdict(shapes))
    interference = result.data.get("interference")
    if interference:
        parts.append(_interference(interference))
    return "\n".join(parts)


def _verdict(shapes: dict[str, Any]) -> str:
    """What of goal P1 is reached, and where not."""
    told = []
    for against, goal in (("memcpy", 0.97), ("pages", 1.3)):
        count, below, too_fast = 0, [], 0
        for shape, found in shapes.items():
            for name, ratio in found["ratios"].items():
                layout, way, _, other = name.split(" ", 3)
                if other != against:
                    continue
                count += 1
                if ratio < goal:
                    below.append((ratio, f"{shape} {layout} {way}"))
                    too_fast += found[way]["layers pages"] * goal > found[way]["memcpy"]
        text = f"{count - len(below)} of {count} reach {goal:g} of {against}"
        if below:
            text += "; not " + ", ".join(f"{case} ({ratio:.3g})" for ratio, case in sorted(below))
        if below and against == "pages":
            text += (
                f". In {too_fast} of these {len(below)} nothing could: single pages of that size "
                f"already exceed memcpy / {goal:g}"
            )
        told.append(text)
    return f"Goal P1: {'. '.join(told)}.\n"


def _interference(interference: dict[str, Any]) -> str:
    text = _INTERFERENCE
    low, high = interference["alone_range_ms"]
    text = text.format(low=number(low), high=number(high))
    head = ["copies beside", "time of the products"]
    rows = [[way, median(found, 3)] for way, found in interference["time_ratio"].items()]
    clocks = interference.get("clock_ratio")
    if clocks:
        text += _CLOCK
        head.append("clock")
        for row in rows:
            row.append(_clock(clocks.get(row[0]), interference["clock_ghz"].get(row[0])))
    cycles = interference.get("cycle_ratio")
    if cycles:
        text += _CYCLES
        head.append("cycles")
        for row in rows:
            row.append(median(cycles.get(row[0]), 3))
    parts = [text, table(head, rows)]
    excluded = interference.get("windows_excluded")
    if excluded:
        told = "; ".join(_excluded(way, reasons) for way, reasons in excluded.items())
        parts.append(f"Windows excluded: {told}.\n")
    return "\n".join(parts)


def _clock(of_alone: float | None, ghz: float | None) -> str:
    return number(of_alone, 3) if ghz is None else f"{number(of_alone, 3)} ({ghz:.2f} GHz)"


def _excluded(way: str, reasons: dict[str, int]) -> str:
    return f"{way}: " + ", ".join(f"{count} ({reason})" for reason, count in reasons.items())
