"""Copies of scattered blocks between device and host (`benchmarks/block_copy.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import measured_on, median, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
Random blocks of each shape to and from random pinned slots, in GB/s. *memcpy* is one large copy,
the limit; *pages* one DMA descriptor for every page of every layer, in one batch. *layers* is the
layer-outermost layout of vLLM, *blocks* the block-outermost one. The last columns compare the best
way of each layout with both (goals: at least 0.97 of memcpy, at least 1.3 times pages).
"""
_COMPUTE = """\
Matrix products beside copies that go on all the while, against the same products alone (goal: at
most 1.01). Spread of the products alone: {low} to {high} ms.
"""
_COMPUTE_WINDOWS = """\
Matrix products that run without a pause, in windows. Every other window has copies beside it all
the while; its time is compared with the mean of the windows before and after it, which have none
(goal: at most 1.01). *nothing* is a window without copies as well: what it shows is the error of
the method. Spread of the products alone: {low} to {high} ms.
"""
_COMPUTE_CLOCK = """\
*Clock* is the average of the device's multiprocessors over a window, compared in the same way: at
0.98 of it the same work takes 1.02 times as long, whatever else the copies take.
"""
_COMPUTE_CYCLES = """\
*Cycles* are time by clock, window by window: what the copies cost whatever the clock did.
"""


def section(results: Results) -> str:
    found = [result for result in results.of("block_copy") if _is_current(result)]
    if not found:
        return ""
    return "\n".join(["## Copies of blocks\n", _INTRO, *(_run(result) for result in found)])


def _is_current(result: Result) -> bool:
    return all("in" in shape for shape in result.data["shapes"].values())


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
    compute = result.data.get("compute")
    if compute:
        parts.append(_compute(compute))
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


def _compute(compute: dict[str, Any]) -> str:
    """Earlier results have no windows, and their ratios may be one number each."""
    text = _COMPUTE_WINDOWS if "windows_left_out" in compute else _COMPUTE
    low, high = compute["spread_alone"]
    text = text.format(low=number(low), high=number(high))
    head = ["copies beside", "time of the products"]
    rows = [[way, _ratio(found)] for way, found in compute["of_alone"].items()]
    clocks = compute.get("clock_of_alone")
    if clocks:
        text += _COMPUTE_CLOCK
        head.append("clock")
        for row in rows:
            row.append(_clock(clocks.get(row[0]), compute["clock_ghz"].get(row[0])))
    cycles = compute.get("cycles_of_alone")
    if cycles:
        text += _COMPUTE_CYCLES
        head.append("cycles")
        for row in rows:
            row.append(median(cycles.get(row[0]), 3))
    parts = [text, table(head, rows)]
    left_out = compute.get("windows_left_out")
    if left_out:
        told = "; ".join(_left_out(way, reasons) for way, reasons in left_out.items())
        parts.append(f"Windows left out: {told}.\n")
    return "\n".join(parts)


def _ratio(of_alone: float | dict[str, float]) -> str:
    return median(of_alone, 3) if isinstance(of_alone, dict) else number(of_alone, 3)


def _clock(of_alone: float | None, ghz: float | None) -> str:
    return number(of_alone, 3) if ghz is None else f"{number(of_alone, 3)} ({ghz:.2f} GHz)"


def _left_out(way: str, reasons: dict[str, int]) -> str:
    return f"{way}: " + ", ".join(f"{count} ({reason})" for reason, count in reasons.items())
