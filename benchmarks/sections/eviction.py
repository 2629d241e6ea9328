"""What eviction policies are worth on recorded traffic (`benchmarks/eviction.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import image, measured_on, number, table

_INTRO = """\
The real index, driven with the requests of public traces, in one tier without a GPU cache in front
of it. *Hit* is the share of the blocks asked for, *saved* the prefill less the load of the hits, as
a share of what hits of every block would save, and *way* how far that is from LRU to `belady`.
Capacities are shares of the distinct blocks asked for.

- `belady` knows the future. No policy has more hits: it drops what is asked for last or never
  again, and need not store it.
- `ended` is LRU told which sessions have ended (`BlockIndex.mark_dead`).
- `told` is LRU told that and how long tools will take, about (`BlockIndex.expect_again`).

`chat` is the conversation trace of Mooncake (FAST '25), `agents` sessions of coding agents from
kv-cache-tester; both are licensed under Apache-2.0. Only halves are shown that no policy was tuned
on: the second half of the chats' time and every second session. Goal P21: nothing below LRU, 0.4 of
the way on chats without hints, 0.8 with them.
"""

_ENDS_OF_THE_WAY = ("lru", "belady")


def section(results: Results) -> str:
    found = results.of("eviction")
    if not found:
        return ""
    return "\n".join(["## Eviction on recorded traffic\n", _INTRO, *(_run(one) for one in found)])


def plots(results: Results) -> list[Plot]:
    return [plot for result in results.of("eviction") for plot in _plots(result)]


def _run(result: Result) -> str:
    parts = [measured_on(result)]
    images = {plot.name: image(plot.name, plot.title) for plot in _plots(result)}
    for name, trace in result.data["traces"].items():
        parts.append(
            f"`{name}`: {trace['requests']:,} requests ask for {trace['asked']:,} blocks of "
            f"{trace['block_tokens']} tokens, {trace['distinct']:,} of them distinct; hits of all "
            f"would save {trace['saved_if_all_hit_s']:,.0f} s.\n"
        )
        parts += [_table(trace), images[_plot_name(result, name)]]
    return "\n".join(parts)


def _table(trace: dict[str, Any]) -> str:
    rows = [
        [
            f"{case['share']:.0%}",
            f"{case['blocks']:,}",
            policy,
            f"{found['hit']:.1%}",
            f"{found['saved_s'] / trace['saved_if_all_hit_s']:.1%}",
            number(found["way"], 2) if policy not in _ENDS_OF_THE_WAY else "",
        ]
        for case in trace["capacities"]
        for policy, found in case["policies"].items()
    ]
    return table(["capacity", "blocks", "policy", "hit", "saved", "way"], rows)


def _plots(result: Result) -> list[Plot]:
    return [_plot(result, name, trace) for name, trace in result.data["traces"].items()]


def _plot_name(result: Result, trace: str) -> str:
    return f"{result.name}-{trace}"


def _plot(result: Result, name: str, trace: dict[str, Any]) -> Plot:
    cases = trace["capacities"]
    return Plot(
        name=_plot_name(result, name),
        title=f"Prefill saved, {name}",
        x_label="capacity, % of the distinct blocks",
        y_label="% of what hits of every block would save",
        series=tuple(
            Series(
                label=policy,
                x=tuple(100 * case["share"] for case in cases),
                y=tuple(
                    round(
                        100 * case["policies"][policy]["saved_s"] / trace["saved_if_all_hit_s"], 2
                    )
                    for case in cases
                ),
            )
            for policy in cases[0]["policies"]
        ),
    )
