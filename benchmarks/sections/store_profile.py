"""Where the time of a store goes (`benchmarks/store_profile.py`)."""

from __future__ import annotations

from benchmarks.markdown import measured_on, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
## Parts of a store

What a store that gathers and then drains is made of, and other ways to do it: the speed of each way
as a part of one large copy of as many bytes. The first number is as the connector calls it, the
second what the device takes when the host has enqueued everything before; the difference is the
host's. *drain over N*: whole blocks by DMA over so many streams, gathered before. *parts*: the
drain of a part begins behind its gather, with the shares of the parts; *joined*, the streams wait
for each other between two parts; *by N*, all but the first part gathered by so many CTAs.
"""


def section(results: Results) -> str:
    found = results.of("store_profile")
    return "\n".join([_INTRO, *(_run(result) for result in found)]) if found else ""


def _run(result: Result) -> str:
    cases = result.data["cases"]
    ways = list(dict.fromkeys(way for case in cases.values() for way in case["ways"]))
    rows = [[way, *(_of_memcpy(case["ways"], way) for case in cases.values())] for way in ways]
    parts = [measured_on(result), table(["way", *cases], rows)]
    if any("drain_after" in case for case in cases.values()):
        parts.append(_drains(result))
    return "\n".join(parts)


def _of_memcpy(ways: dict[str, dict[str, dict[str, float]]], way: str) -> str:
    if way not in ways:
        return number(None)
    limit, found = ways["memcpy"], ways[way]
    return " / ".join(number(limit[how]["ms"] / found[how]["ms"], 3) for how in found)


def _drains(result: Result) -> str:
    cases = {n: case for n, case in result.data["cases"].items() if "drain_after" in case}
    befores = list(dict.fromkeys(name for case in cases.values() for name in case["drain_after"]))
    rows = [
        [name, *(number(case["drain_after"][name]["ms"], 3) for case in cases.values())]
        for name in befores
    ]
    text = "Milliseconds of the drain alone over four streams, by what was gathered just before:\n"
    return "\n".join([text, table(["before", *cases], rows)])
