"""What the turns of `chats.py` amount to: shares from cache, times, ratios beside goals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.chat_client import Row, from_lists
from benchmarks.chat_workloads import Workload
from benchmarks.engine_configs import CHAT_BASELINES


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
    found["stored_blocks"] = counters.get("tiered_kv_stored_blocks", {})
    dropped = counters.get("tiered_kv_dropped_blocks", {})
    found["dropped_blocks"] = {reason: count for reason, count in dropped.items() if count}
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


Modes = dict[str, dict[str, Any]]

_TOO_LATE = ("staging_full", "reused")
"""Reasons for drops that mean that the GPU went on before a block was copied."""


@dataclass(frozen=True)
class Goal:
    """One ratio or count, and what it should be."""

    id: str
    workload: str
    what: str
    value: float
    limit: float
    at_most: bool
    unit: str = "x"

    @property
    def reached(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def derive(content: dict[str, Any]) -> dict[str, Any]:
    """All that is computed from the entries of a result.

    There are no goals for a tiny model: what it does on a CPU is no merit.
    """
    workloads: dict[str, Modes] = {}
    for name, sizes in content["workloads"].items():
        entries = [e for e in content["entries"] if e["workload"] == name and "failed" not in e]
        modes: Modes = {}
        for mode in dict.fromkeys(entry["mode"] for entry in entries):
            mine = [entry for entry in entries if entry["mode"] == mode]
            modes[mode] = pool(mine, content["columns"], Workload(**sizes))
            modes[mode]["equal_chats"] = equal_chats(entries, mode)
        if modes:
            workloads[name] = modes
    found = [] if content["tiny"] else goals(workloads)
    return {
        "workloads": workloads,
        "goals": [
            {**asdict(goal), "value": round(goal.value, 4), "reached": goal.reached}
            for goal in found
        ],
    }


def without_turns(content: dict[str, Any]) -> dict[str, Any]:
    """The result that is kept: what is derived, and which engines failed."""
    kept = {name: value for name, value in content.items() if name not in ("entries", "columns")}
    failed = [
        {name: entry[name] for name in ("mode", "workload", "failed")}
        for entry in content["entries"]
        if "failed" in entry
    ]
    return {**kept, "failed": failed}


def goals(workloads: dict[str, Modes]) -> list[Goal]:
    """Those whose modes have run."""
    return [
        *_share_goals(workloads),
        *_time_goals(workloads),
        *_prefill_goals(workloads.get("prefill", {})),
        *_daemon_goals(workloads),
        *_agent_goals(workloads.get("agents", {})),
    ]


def _share_goals(workloads: dict[str, Modes]) -> list[Goal]:
    found = []
    for name in ("calm", "tight"):
        modes = workloads.get(name, {})
        ratio = _ratio(modes, "tiered", "limit", "share")
        what = "share from cache: tiered over limit"
        found += _at_least("P16", name, what, ratio, 0.99)
        if "tiered" in modes:
            lost = sum(
                count
                for reason, count in modes["tiered"]["dropped_blocks"].items()
                if reason.rpartition("/")[2] in _TOO_LATE
            )
            what = "blocks dropped before they were copied"
            found.append(Goal("P16", name, what, lost, 0.0, True, "blocks"))
    return found


def _time_goals(workloads: dict[str, Modes]) -> list[Goal]:
    found = []
    for point, limit in (("p50", 0.7), ("p90", 0.6)):
        ratio = _ratio(workloads.get("calm", {}), "tiered", "offloading_blhnc", "ttft_ms", point)
        what = f"TTFT {point}: tiered over offloading_blhnc"
        found += _at_most("P16", "calm", what, ratio, limit)
    for other, limit in (("offloading_blhnc", 0.95), ("limit", 1.06)):
        ratio = _ratio(workloads.get("tight", {}), "tiered", other, "done_s")
        found += _at_most("P16", "tight", f"all done: tiered over {other}", ratio, limit)
    return found


def _prefill_goals(modes: Modes) -> list[Goal]:
    found = []
    for mode, tier, limit in (("tiered", "cpu", 0.995), ("tiered_daemon", "remote", 0.99)):
        if mode in modes and modes[mode]["full_blocks"]:
            ratio = modes[mode]["stored_blocks"].get(tier, 0.0) / modes[mode]["full_blocks"]
            what = f"full blocks stored ({tier}): {mode}"
            found += _at_least("P17", "prefill", what, ratio, 1.0)
        ratio = _ratio(modes, mode, "vllm", "tokens_per_s")
        found += _at_least("P17", "prefill", f"throughput: {mode} over vllm", ratio, limit)
    return found


def _daemon_goals(workloads: dict[str, Modes]) -> list[Goal]:
    ratio = _ratio(workloads.get("calm", {}), "tiered_daemon", "tiered", "ttft_ms", "p50")
    found = _at_most("P18", "calm", "TTFT p50: tiered_daemon over tiered", ratio, 1.15)
    killed = workloads.get("restart", {}).get("tiered_daemon")
    later = killed and killed["restart"].get("later_turns")
    if later:
        what = "share from cache over what is reusable, after one turn since the restart"
        ratio = later["share"] / later["reusable_share"]
        found += _at_least("P18", "restart", what, ratio, 0.99)
    return found


def _agent_goals(modes: Modes) -> list[Goal]:
    found = []
    for point in ("p50", "p90"):
        others = {mode: modes[mode]["ttft_ms"][point] for mode in CHAT_BASELINES if mode in modes}
        if others:
            best = min(others, key=others.__getitem__)
            ratio = _ratio(modes, "tiered", best, "ttft_ms", point)
            what = f"TTFT {point}: tiered over the best other ({best})"
            found += _at_most("P19", "agents", what, ratio, 0.7)
    return found


def _ratio(modes: Modes, of: str, over: str, *names: str) -> float | None:
    values: list[Any] = [modes.get(of), modes.get(over)]
    for name in names:
        values = [value and value.get(name) for value in values]
    return values[0] / values[1] if values[0] is not None and values[1] else None


def _at_most(id: str, workload: str, what: str, value: float | None, limit: float) -> list[Goal]:
    return [] if value is None else [Goal(id, workload, what, value, limit, True)]


def _at_least(id: str, workload: str, what: str, value: float | None, limit: float) -> list[Goal]:
    return [] if value is None else [Goal(id, workload, what, value, limit, False)]
