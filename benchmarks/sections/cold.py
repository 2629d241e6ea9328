"""What storing adds to a cold prompt (`benchmarks/cold_prompt.py`, `benchmarks/token_copy.py`)."""

from __future__ import annotations

from benchmarks.markdown import measured_on, median, number, table
from benchmarks.stored_results import Result, Results

_INTRO = """\
One prompt that nobody has seen at a time, asked of vLLM alone and of our connector, which take
turns; ours also with parts of storing left out. Milliseconds, medians with quartiles.
"""
_TOKEN_INTRO = """\
A sampled token has to get to the host past the blocks that are being stored. A few bytes on a
stream of their own, 2 ms after 587 MB in blocks of 0.875 MiB were sent on their way, in
milliseconds. Behind the copies of one stream they wait for all of them; between those of several
streams, as stores are made here, they hardly wait.
"""


def section(results: Results) -> str:
    parts = [_prompt(result) for result in results.of("cold_prompt")]
    if parts:
        parts.insert(0, _INTRO)
    tokens = [_token(result) for result in results.of("token_copy")]
    if tokens:
        parts += [_TOKEN_INTRO, *tokens]
    return "\n".join(["## A cold prompt\n", *parts]) if parts else ""


def _prompt(result: Result) -> str:
    derived = result.data["derived"]
    answers = list(derived)
    head = ["", *(c for n in answers for c in (f"{n} token{'s' * (n != '1')}", "of vLLM alone"))]
    rows = []
    for mode in derived[answers[0]]:
        row = [mode if mode != "vllm" else "vLLM alone"]
        for answer in answers:
            found = derived[answer].get(mode)
            row += [median(found), number(found["of_vllm"], 3) if found else number(None)]
        rows.append(row)
    hooks = result.data["hooks_ms"]
    longest = sorted(hooks, key=lambda name: -hooks[name])[:4]
    said = ", ".join(f"`{name}` {hooks[name]:.2f}" for name in longest)
    total = sum(hooks.values())
    text = measured_on(result) + "\n" + table(head, rows)
    return text + f"\nvLLM spends {total:.2f} ms of such a prompt in our hooks, most in {said}.\n"


def _token(result: Result) -> str:
    rows = [
        [name, median(found["token_ms"], 2), median(found["blocks_ms"], 2)]
        for name, found in result.data["ways"].items()
    ]
    return measured_on(result) + "\n" + table(["blocks on their way", "token", "all blocks"], rows)
