"""Keys, lookups and the index of the CPU tier (`benchmarks/lookup.py`)."""

from __future__ import annotations

from benchmarks.markdown import measured_on, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
What the scheduler half costs: keys and lookup of one long prompt (goal P11: at most 3 ms), and the
index as it grows (goal P12: constant cost, at most 150 bytes a block).
"""


def section(results: Results) -> str:
    found = results.of("lookup")
    if not found:
        return ""
    return "\n".join(["## Keys and index\n", _INTRO, *(_run(result) for result in found)])


def _run(result: Result) -> str:
    prompt = result.data["prompt"]
    text = measured_on(result) + (
        f"\nA prompt of {prompt['tokens']:,} tokens: keys {prompt['keys_ms']:.2f} ms, lookup "
        f"{prompt['lookup_ms']:.2f} ms, together {prompt['together_ms']:.2f} ms.\n\n"
    )
    rows = [
        [
            policy,
            f"{case['blocks']:,}",
            number(case["bytes_per_block"], 0),
            number(case["lookup_us_per_block"], 3),
            number(case["store_with_eviction_us"], 1),
        ]
        for policy, cases in result.data["index"].items()
        for case in cases
    ]
    header = ["policy", "blocks", "bytes a block", "lookup, µs a block", "store with eviction, µs"]
    return text + table(header, rows)
