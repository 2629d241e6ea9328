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
Matrix products beside copies that go on all the while, against the same products alone just before
(goal: at most 1.01). Products of random numbers take all the power the device may draw, and copies
draw some of it; products of zeros take less. *Clock* is that of the device while the products ran.
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
                *(number(shape["ratios"].get(name), 2) for name in ratios),
            ]
            for shape_name, shape in shapes.items()
        ]
        head = ["shape / block size", "bytes", *names, *ratios]
        parts.append(f"{title}:\n\n{table(head, rows)}")
    compute = result.data.get("compute")
    if compute:
        parts.append(f"{_COMPUTE}\n{_compute_table(compute)}")
    return "\n".join(parts)


def _compute_table(compute: dict[str, Any]) -> str:
    head = ["copies beside"]
    for operands, told in compute.items():
        low, high = told["spread_alone"]
        head += [f"{operands} ({number(low)} to {number(high)} ms alone)", "clock, MHz"]
    ways = next(iter(compute.values()))["of_alone"]
    rows = [["none", *(cell for told in compute.values() for cell in ("1", _clock(told, "alone")))]]
    rows += [
        [
            way,
            *(
                cell
                for told in compute.values()
                for cell in (median(told["of_alone"][way], 3), _clock(told, way))
            ),
        ]
        for way in ways
    ]
    return table(head, rows)


def _clock(told: dict[str, Any], way: str) -> str:
    mhz, capped = told["clock_mhz"].get(way), told["share_power_capped"].get(way)
    return "" if mhz is None else f"{mhz}, at its power limit in {100 * capped:.0f} %"
