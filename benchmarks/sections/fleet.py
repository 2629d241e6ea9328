"""What the simulation of many daemons gives: parts of docs/scaling.md, and the plot."""

from __future__ import annotations

from typing import Any

from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import image, number, table

_SECTION = """\
## Many daemons, simulated

No bytes move here: the code that places and evicts runs under recorded traffic, and what it decides
is counted. [scaling.md](scaling.md#what-a-simulation-says) has the tables.
"""


def section(results: Results) -> str:
    found = results.of("simulated_fleet")
    if not found:
        return ""
    shown = [image(plot.name, plot.title) for plot in plots(results)]
    return "\n".join([_SECTION, *(made_by(result) for result in found), *shown])


def made_by(result: Result) -> str:
    """Without the machine: it decides nothing here."""
    found = result.data["environment"]
    changes = " with changes" if found["uncommitted_changes"] else ""
    commit = (found["commit"] or "unknown")[:10]
    return f"Simulated at commit {commit}{changes}:\n`{found['command']}`\n"


def _cases(results: Results, group: str) -> list[dict[str, Any]]:
    return [
        case
        for result in results.of("simulated_fleet")
        for case in result.data["cases"]
        if case["group"] == group
    ]


def placement_table(results: Results) -> str:
    rows = []
    for case in _cases(results, "placement"):
        over_mean = case["max_over_mean"]
        rows.append(
            [
                str(case["daemons"]),
                case["traffic"],
                f"{case['head_tokens']:,}",
                "0, 64, 512, 4096" if case["long_runs"] else "every 64",
                f"{case['hit']:.0%}",
                number(over_mean["put"]),
                number(over_mean["loaded"]),
                number(over_mean["requests"]),
                number(case["p99_minute_over_mean"]),
            ]
        )
    header = ["daemons", "traffic", "shared head", "runs begin at block", "hit"]
    header += ["put, max/mean", "loaded, max/mean", "lookups, max/mean", "p99 minute/mean"]
    return table(header, rows)


def _plain(results: Results) -> dict[str, Any] | None:
    """The case that those of hot heads are compared with."""
    for case in _cases(results, "placement"):
        if case["head_tokens"] == 24576 and not case["long_runs"]:
            return case
    return None


def hot_table(results: Results) -> str:
    cases = [case for case in [_plain(results)] if case] + _cases(results, "hot")
    rows = [
        [
            str(case["hot_copies"]),
            f"{case['engine_tokens']:,}",
            f"{case['hit']:.0%}",
            f"{case['hit_in_engine']:.0%}",
            f"{case['loaded_tokens']:,}",
            number(case["max_over_mean"]["loaded"]),
        ]
        for case in cases
    ]
    header = ["copies of hot runs", "tokens an engine keeps itself", "hit", "of it in the engine"]
    return table([*header, "tokens loaded per request", "loaded, max/mean"], rows)


def failure_name(case: dict[str, Any]) -> str:
    first, *later = case["events"]
    if first["what"] == "add":
        return f"{first['count']} added"
    back = "empty" if later[0]["what"] == "replace" else "with its SSD"
    return f"{first['count']} killed, back {back}"


def _mean_hit(case: dict[str, Any], start: float, stop: float) -> float:
    minutes = case["hit_by_minute"][int(start / 60) : int(stop / 60)]
    return float(sum(minutes) / max(len(minutes), 1))


def failure_table(results: Results) -> str:
    """Each column is the mean hit rate of some minutes."""
    spans = [(1500, 1800), (1800, 2100), (2100, 2400), (2400, 2700), (2700, 3000)]
    undisturbed = next(
        case
        for case in _cases(results, "placement")
        if (case["daemons"], case["head_tokens"], case["long_runs"]) == (64, 2048, False)
    )
    rows = [
        [name, *(f"{_mean_hit(case, *span):.1%}" for span in spans)]
        for name, case in [
            ("nothing happens", undisturbed),
            *((failure_name(case), case) for case in _cases(results, "failures")),
        ]
    ]
    header = [f"minutes {start // 60} to {stop // 60}" for start, stop in spans]
    return table(["what happens to 64 daemons", *header], rows)


def moved_table(results: Results) -> str:
    (result,) = results.of("simulated_fleet")
    rows = [[name, f"{share:.1%}"] for name, share in result.data["moved"].items()]
    return table(["daemons", "runs that move"], rows)


def plots(results: Results) -> list[Plot]:
    found = results.of("simulated_fleet")
    cases = _cases(results, "failures")
    if not found or not cases:
        return []
    series = tuple(
        Series(
            failure_name(case),
            tuple(range(20, len(case["hit_by_minute"]))),
            tuple(round(100 * hit, 2) for hit in case["hit_by_minute"][20:]),
        )
        for case in cases
    )
    return [
        Plot(
            f"{found[0].name}-failures",
            "Blocks found, 64 daemons: killed or added at minute 30, back at minute 40",
            "minute",
            "% of the blocks of all prompts",
            series,
        )
    ]
