"""What the turns of `chats.py` amount to: shares from cache, times, tables of modes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.chat_client import Row, from_lists
from benchmarks.chat_workloads import Workload


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def times(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    found["mean"] = statistics.fmean(values)
    return {name: round(value, 2) for name, value in found.items()}


def share(rows: Sequence[Row]) -> float | None:
    """Of prompt tokens, those that came from a cache."""
    prompt = sum(row.prompt for row in rows)
    return round(sum(row.cached for row in rows) / prompt, 4) if prompt else None


def later_turns(rows: Sequence[Row]) -> list[Row]:
    """From the second on; all, where chats have one turn only."""
    return [row for row in rows if row.turn > 1] or list(rows)


def summarise(rows: Sequence[Row], workload: Workload, block_size: int) -> dict[str, Any]:
    """Times in ms are those of turns from the second on, if not said otherwise."""
    later = later_turns(rows)
    first = times([row.ttft_ms for row in rows if row.turn == 1])
    found: dict[str, Any] = {
        "turns": len(rows),
        "share": share(later),
        "share_of_all_turns": share(rows),
        "ttft_ms": times([row.ttft_ms for row in later]),
        "first_ttft_p50_ms": first and first["p50"],
        "output_token_ms": times(
            [(r.duration_ms - r.ttft_ms) / (r.answer - 1) for r in later if r.answer > 1]
        ),
        "queue_ms": times([row.queue_ms for row in later]),
        "compute_ms": times([row.compute_ms for row in later]),
        "done_s": round(max((row.end_s for row in rows), default=0.0), 2),
    }
    if workload.kind == "prefill" and rows:
        found["tokens_per_s"] = round(sum(row.prompt for row in rows) / found["done_s"], 1)
        found["full_blocks"] = sum((row.prompt - row.cached) // block_size for row in rows)
    if workload.kill_after_turn:
        found["restart"] = _restart(rows, workload, block_size)
    return found


def _restart(rows: Sequence[Row], workload: Workload, block_size: int) -> dict[str, Any]:
    """Shares before and after the engine was killed, beside what could have been cached."""
    phases: dict[str, list[Row]] = {"before": [], "first_turn": [], "later_turns": []}
    returned = set()
    for row in sorted(rows, key=lambda row: (row.chat, row.turn)):
        if row.turn == 1:
            continue
        phase = "before"
        if row.engine:
            phase = "later_turns" if row.chat in returned else "first_turn"
            returned.add(row.chat)
        phases[phase].append(row)

    def reusable(row: Row) -> int:
        # The KV of an answer's last token is not computed: nothing follows it.
        return (row.prompt - workload.new_tokens - 1) // block_size * block_size

    return {
        phase: {
            "turns": len(some),
            "share": share(some),
            "reusable_share": round(
                sum(reusable(row) for row in some) / sum(row.prompt for row in some), 4
            ),
            "ttft_ms": times([row.ttft_ms for row in some]),
        }
        for phase, some in phases.items()
        if some
    }


def pool(entries: Sequence[dict[str, Any]], columns: Sequence[str], workload: Workload) -> Any:
    """All rounds of one mode on one workload as one: turns together, durations as medians."""
    rounds = [from_lists(columns, entry["rows"]) for entry in entries]
    block_size = entries[0]["engine"]["block_size"]
    found = summarise([row for rows in rounds for row in rows], workload, block_size)
    each = [summarise(rows, workload, block_size) for rows in rounds]
    for name in ("done_s", "tokens_per_s"):
        if name in found:
            found[name] = round(statistics.median(one[name] for one in each), 2)
    counters: dict[str, dict[str, float]] = {}
    for entry in entries:
        for name, by_label in entry["counters"].items():
            into = counters.setdefault(name, {})
            for labels, value in by_label.items():
                into[labels] = into.get(labels, 0) + value
    found["rounds"] = len(entries)
    found["counters"] = counters
    for name in ("gpu_mib", "pss_mib", "host_growth_mib", "too_long"):
        known = [entry[name] for entry in entries if entry[name] is not None]
        found[name] = max(known, default=None)
    return found


def equal_chats(entries: Sequence[dict[str, Any]], mode: str) -> tuple[int, int] | None:
    """Chats with the tokens that `limit` generated in the same round, and how many there are."""
    limit = {entry["round"]: entry["digests"] for entry in entries if entry["mode"] == "limit"}
    pairs = [
        (mine, theirs)
        for entry in entries
        if entry["mode"] == mode and entry["round"] in limit
        for mine, theirs in zip(entry["digests"], limit[entry["round"]], strict=True)
    ]
    return (sum(mine == theirs for mine, theirs in pairs), len(pairs)) if pairs else None
