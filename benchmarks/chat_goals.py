"""Ratios between the modes of one run of `chats.py`, beside their goals."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.chat_modes import PEERS
from benchmarks.chat_summary import equal_chats, pool
from benchmarks.chat_workloads import Workload

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
                for reason, count in dropped(modes["tiered"]).items()
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
            ratio = stored(modes[mode]).get(tier, 0.0) / modes[mode]["full_blocks"]
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
        peers = {mode: modes[mode]["ttft_ms"][point] for mode in PEERS if mode in modes}
        if peers:
            best = min(peers, key=peers.__getitem__)
            ratio = _ratio(modes, "tiered", best, "ttft_ms", point)
            what = f"TTFT {point}: tiered over the best peer ({best})"
            found += _at_most("P19", "agents", what, ratio, 0.7)
    return found


def stored(mode: dict[str, Any]) -> dict[str, float]:
    """Blocks by tier; empty for any connector but ours."""
    found: dict[str, float] = mode["counters"].get("tiered_kv_stored_blocks", {})
    return found


def dropped(mode: dict[str, Any]) -> dict[str, float]:
    """Blocks by tier and reason, those that occurred."""
    found: dict[str, float] = mode["counters"].get("tiered_kv_dropped_blocks", {})
    return {reason: count for reason, count in found.items() if count}


def _ratio(modes: Modes, of: str, over: str, *names: str) -> float | None:
    values: list[Any] = [modes.get(of), modes.get(over)]
    for name in names:
        values = [value and value.get(name) for value in values]
    return values[0] / values[1] if values[0] is not None and values[1] else None


def _at_most(id: str, workload: str, what: str, value: float | None, limit: float) -> list[Goal]:
    return [] if value is None else [Goal(id, workload, what, value, limit, True)]


def _at_least(id: str, workload: str, what: str, value: float | None, limit: float) -> list[Goal]:
    return [] if value is None else [Goal(id, workload, what, value, limit, False)]
