"""A tier about as fast as the model, or slower (`benchmarks/slow_tier.py`)."""

from __future__ import annotations

import statistics

from benchmarks.markdown import measured_on, median, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
Prompts that lie on the SSD of a daemon, or in its memory, asked of engines that take turns: vLLM
alone, and ours with `load_policy` always, auto and never. Times to the first token, medians with
quartiles, in milliseconds. `auto` starts without any knowledge, and its first rounds are counted.
Goal P10: `auto` never takes more than 1.05 of what vLLM alone takes.
"""


def section(results: Results) -> str:
    found = results.of("slow_tier")
    if not found:
        return ""
    return "\n".join(["## A slow tier: load or compute\n", _INTRO, *(_run(r) for r in found)])


def _run(result: Result) -> str:
    derived = result.data["derived"]
    rows = [
        [
            f"`{mode}`",
            median(derived["ms"][mode]),
            number(ratio, 3),
            number(derived["worst_ratio"][mode], 3),
            number(_loaded(result, mode)),
        ]
        for mode, ratio in derived["ratio_to_vllm"].items()
    ]
    head = ["mode", "time to first token", "of vLLM alone", "slowest, of vLLM alone"]
    head.append(f"tokens loaded of {result.data['prompt_tokens']:,}")
    return measured_on(result) + "\n" + table(head, rows)


def _loaded(result: Result, mode: str) -> float:
    samples = result.data["samples"]
    return float(statistics.median(s["loaded_tokens"] for s in samples if s["mode"] == mode))
