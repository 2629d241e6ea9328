"""A daemon on the same host (`benchmarks/daemon_tier.py`, `benchmarks/remote_tier.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import measured_on, number, table
from benchmarks.stored_results import Result, Results

_HITS = """\
### Hits

Times to the first token in milliseconds, medians with the range. `ipc`: the daemon's memory is
mapped; `tcp`: over the loopback. Goal P7: a daemon hit takes at most 1.1 times a hit in the CPU
tier.
"""
_BYTES = """\
### Bytes

GB/s between a client and a daemon, medians. *bare*: a plain socket with as many connections, the
limit of TCP (goal P8: at least 0.9 of it).
"""


def section(results: Results) -> str:
    hits, moved = results.of("daemon_tier"), results.of("remote_tier")
    if not hits and not moved:
        return ""
    parts = ["## A daemon on the same host\n"]
    if hits:
        parts += [_HITS, *(_hits(result) for result in hits)]
    if moved:
        parts += [_BYTES, *(_bytes(result) for result in moved)]
    return "\n".join(parts)


def _hits(result: Result) -> str:
    kinds = ("cold", "device_hit", "cpu_hit", "daemon_hit")
    rows = [
        [
            way,
            *(_range(found[f"{kind}_ms"]) for kind in kinds),
            number(found["daemon_over_cpu"], 2),
        ]
        for way, found in result.data["ways"].items()
        if "failed" not in found
    ]
    header = ["way", *(kind.replace("_", " ") for kind in kinds), "daemon over CPU"]
    return measured_on(result) + "\n" + table(header, rows)


def _range(times: dict[str, float]) -> str:
    return f"{number(times['median'])} ({number(times['min'])} … {number(times['max'])})"


def _bytes(result: Result) -> str:
    cases: list[dict[str, Any]] = result.data["results"]
    ways = list(dict.fromkeys(way for case in cases for way in case["gb_per_s"]))
    ratios = list(dict.fromkeys(way for case in cases for way in case["of_bare_pair"]))
    rows = [
        [
            f"{case['block_bytes'] // 1024:,} KiB",
            str(case["connections"]),
            f"{case['total_bytes'] >> 20:,} MiB",
            *(number(case["gb_per_s"].get(way, {}).get("median"), 2) for way in ways),
            *(number(case["of_bare_pair"].get(way), 2) for way in ratios),
        ]
        for case in cases
    ]
    header = ["block", "connections", "in all", *ways, *(f"{way} of bare" for way in ratios)]
    return measured_on(result) + "\n" + table([name.replace("_", " ") for name in header], rows)
