"""Many chats at once (`benchmarks/chats.py`)."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import image, measured_on, number, table

_INTRO = """\
Each row is a fresh engine as `vllm serve` runs it: vLLM's asynchronous engine with its core in a
process of its own. All modes get the same arrival plan, one after the other. `limit` is vLLM alone
with a GPU cache that holds everything, `limit_seqs` the same with only as many requests at once as
fit into the GPU cache of the other modes: where running requests fill that cache, as in `tight`, no
cache behind it can be faster. In `agents` too, `limit` itself takes more than 0.7 of the best
other connector's time at the 90th percentile. The *share from cache* counts prompt tokens that are
not computed, on the GPU or in a tier. Times are in milliseconds and, like the share, those of turns
from the second on: to the first token (TTFT), in the engine's queue (where requests also wait for
loads that run beside the steps), from there to the first token, and per output token. Blocks stored
and dropped are those that our connector counts. *Host* is the memory of all processes (PSS) and the
growth of what the machine uses, which includes memory that the CUDA driver pins. *Tokens equal*
counts chats that generate the same tokens as under `limit`; batches of other sizes round
differently, so fewer than all is no error.
"""


def section(results: Results) -> str:
    found = results.of("chats")
    if not found:
        return ""
    return "\n".join(["## Many chats at once\n", _INTRO, *(_run(result) for result in found)])


def _run(result: Result) -> str:
    images = [image(plot.name, plot.title) for plot in plots_of(result)]
    return "\n".join([f"### {result.name}\n", describe(result), *images])


def describe(result: Result) -> str:
    """One run as text: goals and tables."""
    data = result.data
    parts = [measured_on(result)]
    if data.get("resumed"):
        more = [f"`{one['command']}`" for one in data["resumed"]]
        parts.append(f"Continued by {', '.join(dict.fromkeys(more))}.\n")
    parts.append(
        f"Host memory of each mode: {data['cpu_gib']:g} GiB, as a CPU tier or as the memory of the "
        f"daemon, beside which the engine has {data['daemon_cpu_gib']:g} GiB.\n"
        if not data["tiny"]
        else "A tiny model without GPU: the numbers only show that it works.\n"
    )
    if data["derived"]["goals"]:
        parts.append(_goals(data["derived"]["goals"]))
    for name, modes in data["derived"]["workloads"].items():
        sizes = data["workloads"][name]
        parts.append(f"{load_text(sizes, data)}\n{_table(sizes, modes)}")
        if sizes["kill_after_turn"]:
            parts.append(restart_table(modes))
        too_long = max(mode["too_long"] for mode in modes.values())
        if too_long:
            parts.append(f"{too_long} requests are longer than the model allows and left out.\n")
    parts += [
        f"`{entry['mode']}` on `{entry['workload']}` failed: {entry['failed']}\n"
        for entry in data["failed"]
    ]
    return "\n".join([*parts, *without_result(result)])


def without_result(result: Result) -> list[str]:
    """Sentences on modes that the commands name and the tables lack.

    Programs before November 2026 did not record in `not_run` what their time did not allow: there
    only the command tells that a mode was to run, and nothing tells why it has no result.
    """
    data = result.data
    parts = [f"Not run: {_not_run(data['not_run'])}.\n"] if data["not_run"] else []
    for name, modes in data["derived"]["workloads"].items():
        known = {*modes, *(one["mode"] for one in data["failed"] if one["workload"] == name)}
        asked = dict.fromkeys(mode for modes in _asked(data, name) for mode in modes)
        lacking = [
            f"`{mode}`"
            for mode in asked
            if mode not in known and f"{mode} on {name}" not in data["not_run"]
        ]
        if lacking:
            parts.append(
                f"No result on `{name}`: {', '.join(lacking)} (named by the command; why was not "
                "recorded).\n"
            )
    return parts


def _asked(data: dict[str, Any], workload: str) -> Iterator[list[str]]:
    """The modes of each command that names this workload, and modes."""
    for run in (data["environment"], *data.get("resumed", [])):
        words = shlex.split(run["command"])
        given = {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}
        workloads = given.get("--workloads", "calm,tight").split(",")
        if "--kill-after-turn" in given:
            workloads.append("restart")
        if "--modes" in given and workload in workloads:
            yield given["--modes"].split(",")


def _not_run(reasons: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for case, why in reasons.items():
        by_reason.setdefault(why, []).append(case)
    return "; ".join(f"{', '.join(cases)} ({why})" for why, cases in by_reason.items())


def _goals(goals: list[dict[str, Any]]) -> str:
    return table(
        ["goal", "workload", "what", "measured", "wanted", "reached"],
        [
            [
                goal["id"],
                f"`{goal['workload']}`",
                goal["what"],
                f"{goal['value']:.4f} {goal['unit']}",
                f"{'≤' if goal['at_most'] else '≥'} {goal['limit']:g} {goal['unit']}",
                "yes" if goal["reached"] else "**no**",
            ]
            for goal in goals
        ],
    )


def load_text(sizes: dict[str, Any], data: dict[str, Any]) -> str:
    """The load as a paragraph."""
    cache = f"a GPU cache of {sizes['cache_tokens']:,} tokens"
    if sizes["kind"] == "prefill":
        text = (
            f"distinct prompts of {sizes['first_tokens']:,} tokens, always {sizes['chats']} "
            f"outstanding, for {sizes['seconds']:g} s; {cache}"
        )
    elif sizes["kind"] == "trace":
        text = (
            f"{data['trace']}, up to {sizes['max_requests']} requests, {sizes['speedup']:g} times "
            f"as fast, lengths times {sizes['length_scale']:g}; {cache}"
        )
    else:
        shared = sizes["shared_tokens"]
        first = f"{shared:,} shared tokens and " if shared else ""
        pause = f"exponential pauses of {sizes['think_s']:g} s on average"
        if sizes["pause_range_s"]:
            low, high = sizes["pause_range_s"]
            pause = f"log-uniform pauses of {low:g} … {high:g} s"
        text = (
            f"{sizes['chats']} chats of {sizes['turns']} turns, {pause}; they begin with {first}"
            f"{sizes['first_tokens']:,} own tokens, every turn adds {sizes['new_tokens']} new "
            f"and {sizes['answer_tokens']} generated ones; {cache}"
        )
    if sizes["kill_after_turn"]:
        text += f"; the engine is killed after {sizes['kill_after_turn']} turns on average"
    return f"`{sizes['name']}`: {text}.\n"


Column = tuple[str, Callable[[dict[str, Any]], str]]


def _at(name: str, point: str, digits: int = 0) -> Callable[[dict[str, Any]], str]:
    return lambda mode: number(mode[name] and mode[name][point], digits)


def _pair(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda mode: f"{_at(name, 'p50')(mode)} / {_at(name, 'p90')(mode)}"


def stored_blocks(mode: dict[str, Any]) -> str:
    return ", ".join(
        f"{count:,.0f} {tier}" for tier, count in mode["stored_blocks"].items()
    ) or number(None)


def _drops(mode: dict[str, Any]) -> str:
    lost = [f"{count:,.0f} {reason}" for reason, count in mode["dropped_blocks"].items()]
    return ", ".join(lost) or ("0" if mode["stored_blocks"] else number(None))


def gib(mib: float | None) -> str:
    return number(mib and mib / 1024)


def _equal(mode: dict[str, Any]) -> str:
    return "{} of {}".format(*mode["equal_chats"]) if mode["equal_chats"] else number(None)


_CHATS: list[Column] = [
    ("share from cache", lambda mode: number(mode["share"], 3)),
    ("of all turns", lambda mode: number(mode["share_of_all_turns"], 3)),
    ("TTFT p50", _at("ttft_ms", "p50")),
    ("p90", _at("ttft_ms", "p90")),
    ("p99", _at("ttft_ms", "p99")),
    ("mean", _at("ttft_ms", "mean")),
    ("first turn p50", lambda mode: number(mode["first_ttft_p50_ms"], 0)),
    ("queue p50 / p90", _pair("queue_ms")),
    ("queue to first token p50 / p90", _pair("compute_ms")),
    ("per output token, mean", _at("output_token_ms", "mean", 1)),
    ("p50", _at("output_token_ms", "p50", 1)),
    ("all done, s", lambda mode: number(mode["done_s"])),
]
_PREFILL: list[Column] = [
    ("prompt tokens/s", lambda mode: number(mode["tokens_per_s"], 0)),
    ("full blocks computed", lambda mode: number(mode["full_blocks"], 0)),
]
_MEMORY: list[Column] = [
    ("blocks stored", stored_blocks),
    ("dropped", _drops),
    ("GPU, GiB", lambda mode: gib(mode["gpu_mib"])),
    ("host, GiB", lambda mode: f"{gib(mode['pss_mib'])} / {gib(mode['host_growth_mib'])}"),
]


def _table(sizes: dict[str, Any], modes: dict[str, dict[str, Any]]) -> str:
    own = _PREFILL if sizes["kind"] == "prefill" else _CHATS
    columns = [*own, *_MEMORY]
    if any(mode["equal_chats"] for mode in modes.values()):
        columns.append(("tokens equal", _equal))
    return table(
        ["mode", *(name for name, _ in columns)],
        [[f"`{mode}`", *(show(found) for _, show in columns)] for mode, found in modes.items()],
    )


def restart_table(modes: dict[str, dict[str, Any]]) -> str:
    names = {
        "before": "before",
        "first_turn": "first turn of each chat after it",
        "later_turns": "turns after that",
    }
    return table(
        ["mode", "restart", "turns", "share from cache", "share that is reusable", "TTFT p50"],
        [
            [
                f"`{mode}`",
                names[phase],
                str(some["turns"]),
                number(some["share"], 3),
                number(some["reusable_share"], 3),
                number(some["ttft_ms"]["p50"], 0),
            ]
            for mode, found in modes.items()
            for phase, some in found["restart"].items()
        ],
    )


def plots(results: Results) -> list[Plot]:
    return [plot for result in results.of("chats") for plot in plots_of(result)]


def plots_of(result: Result) -> list[Plot]:
    """TTFT by mode, one plot for each workload that compares several."""
    made = []
    for name, modes in result.data["derived"]["workloads"].items():
        if result.data["workloads"][name]["kind"] == "prefill" or len(modes) < 2:
            continue
        ordered = dict(sorted(modes.items(), key=lambda item: item[1]["ttft_ms"]["p50"]))
        series = tuple(
            Series(point, tuple(ordered), tuple(m["ttft_ms"][point] for m in ordered.values()))
            for point in ("p50", "p90")
        )
        made.append(
            Plot(
                name=f"{result.name}-{name}-ttft",
                title=f"TTFT of later turns, workload {name}",
                x_label="",
                y_label="ms",
                series=series,
                bars=True,
            )
        )
    return made
