"""Our connector beside vLLM's own (`benchmarks/connectors.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.connector_summary import KINDS
from benchmarks.plots import Plot, Series
from benchmarks.result_files import Result, Results
from benchmarks.sections.markdown import image, measured_on, median, number, table

_INTRO = """\
Every engine is a process of its own on the same device; they take turns on the same prompts, in
rotating order. A *device hit* is a prompt whose KV blocks are all in the device's prefix cache, a
*tier hit* one whose blocks are in host memory alone, a *batch* several prompts asked at once. The
*load cost* is a tier hit less the device hit of the same engine in the same turn. All times are to
the first token. Times are medians with quartiles, in milliseconds. Compare within a table only.

LMCache is not shown. Its compiled operators are made for another torch than this machine's; rebuilt
for it they gave wrong tokens in 64 of 80 requests, and the cause was not found. Times of a set-up
that we broke compare nothing.
"""
_FAST_MODE = """\
Times of device hits have two modes on this machine. They are split where the variance of the
logarithms on both sides is least (over all engines of the table): the fast mode ends at {limit} ms.
"""


def section(results: Results) -> str:
    found = results.of("connectors")
    if not found:
        return ""
    return "\n".join(["## Beside other connectors\n", _INTRO, *(_run(result) for result in found)])


def _run(result: Result) -> str:
    images = [image(plot.name, plot.title) for plot in plots_of(result)]
    return "\n".join([f"### {result.name}\n", describe(result), *images])


def describe(result: Result) -> str:
    """One run as text: goals and tables."""
    data = result.data
    copy = data["pinned_copy"]
    parts = [measured_on(result)]
    parts.append(_sizes(data))
    if data["derived"]["goals"]:
        parts.append(_goals(data["derived"]["goals"]))
    for group in data["derived"]["groups"]:
        parts.append(_table(group, copy))
        if group["fast_mode_limit_ms"] is not None:
            parts.append(_FAST_MODE.format(limit=group["fast_mode_limit_ms"]))
    parts += [_hooks(done["hook_ms"]) for done in data["rounds"] if done.get("hook_ms")]
    parts += [f"`{mode}` failed: {why}\n" for mode, why in data["failed"].items()]
    if data["not_run"]:
        parts.append(f"Not run on this machine: {', '.join(data['not_run'])}.\n")
    return "\n".join(parts)


def _sizes(data: dict[str, Any]) -> str:
    text = (
        f"Prompts of {data['prompt_tokens']:,} tokens ({data['prompt_bytes'] / 1e6:,.1f} MB of "
        f"KV), batches of {data['batch']}."
    )
    copy = data["pinned_copy"]
    if copy:
        text += (
            f" One copy of one prompt's bytes to the device takes {copy['to_device_ms']:.1f} ms "
            f"({copy['to_device_gbs']:.1f} GB/s), measured in the same run."
        )
    return text + "\n"


def _hooks(by_mode: dict[str, float]) -> str:
    sums = [f"`{mode}` {ms:.2f} ms" for mode, ms in by_mode.items() if ms]
    return f"Of a device hit, time inside the connector's hooks: {', '.join(sums)}.\n"


def _goals(goals: list[dict[str, Any]]) -> str:
    return table(
        ["goal", "what", "measured", "wanted", "reached"],
        [
            [
                goal["id"],
                f"{goal['what']} (table {goal['group'] + 1})",
                f"{goal['value']:.4f} {goal['unit']}",
                f"{'≤' if goal['at_most'] else '≥'} {goal['limit']} {goal['unit']}",
                "yes" if goal["reached"] else "**no**",
            ]
            for goal in goals
        ],
    )


def _table(group: dict[str, Any], copy: dict[str, float] | None) -> str:
    header = ["mode", *(kind.replace("_", " ") for kind in KINDS), "fast device hit"]
    header += ["load cost", "× copy", "cold throughput of vllm", "hits", "tokens equal"]  # noqa: RUF001
    rows = []
    for mode, found in group["modes"].items():
        cost = found.get("load_cost")
        tiers = [found[kind] for kind in ("tier_hit", "tier_batch") if kind in found]
        rows.append(
            [
                f"`{mode}`",
                *(median(found.get(kind)) for kind in (*KINDS, "device_hit_fast", "load_cost")),
                number(cost["median"] / copy["to_device_ms"], 2) if cost and copy else number(None),
                number(found["cold_throughput"], 3),
                _of(tiers, "hits"),
                _of(tiers, "equal"),
            ]
        )
    return f"Table {group['group'] + 1}:\n\n" + table(header, rows)


def _of(tiers: list[dict[str, Any]], name: str) -> str:
    if not tiers:
        return number(None)
    count, requests = (sum(tier[what] for tier in tiers) for what in (name, "requests"))
    text = f"{count} of {requests}"
    return text if count == requests else f"**{text}**"


def plots(results: Results) -> list[Plot]:
    return [plot for result in results.of("connectors") for plot in plots_of(result)]


def plots_of(result: Result) -> list[Plot]:
    """Load cost and batches from the tier, by mode; a mode of several groups by its first."""
    modes: dict[str, dict[str, Any]] = {}
    for group in result.data["derived"]["groups"]:
        for mode, found in group["modes"].items():
            modes.setdefault(mode, found)
    copy = result.data["pinned_copy"]
    limit = copy["to_device_ms"] if copy else None
    batch = result.data["batch"]
    made = [
        _bars(result, modes, "load_cost", "Load cost of a tier hit", limit),
        _bars(
            result, modes, "tier_batch", f"{batch} prompts from the tier", limit and limit * batch
        ),
    ]
    return [plot for plot in made if plot is not None]


def _is_right(mode: dict[str, Any]) -> bool:
    tiers = [mode[kind] for kind in ("tier_hit", "tier_batch") if kind in mode]
    return all(tier["equal"] == tier["requests"] for tier in tiers)


def _bars(
    result: Result, modes: dict[str, dict[str, Any]], kind: str, title: str, limit: float | None
) -> Plot | None:
    found = {
        mode: m[kind]
        for mode, m in modes.items()
        # A time is worth nothing where the tokens are wrong.
        if kind in m and m[kind]["median"] > 0 and _is_right(m)
    }
    if not found:
        return None
    found = dict(sorted(found.items(), key=lambda item: item[1]["median"]))

    def each(name: str) -> tuple[float, ...]:
        return tuple(spread[name] for spread in found.values())

    return Plot(
        name=f"{result.name}-{kind.replace('_', '-')}",
        title=title,
        x_label="",
        y_label="ms, median and quartiles",
        series=(Series(title, tuple(found), each("median"), each("q1"), each("q3")),),
        bars=True,
        limit=limit,
        limit_label="the same bytes in one copy",
    )
