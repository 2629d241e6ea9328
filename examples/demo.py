"""Ask a real model about a long text: computed, from vLLM's own cache, and from the CPU tier.

    make demo            (or: .venv/bin/python examples/demo.py)

Every question is asked three times, greedily, in one vLLM engine:

1. computed: the device's prefix cache and all tiers are emptied first, so nothing is reused;
2. device: the question is repeated at once, so vLLM's own prefix cache serves it;
3. tier: only the device's prefix cache is emptied first, so tokens that are not computed
   come from a tier.

The exit status is 0 only if pass 1 reused nothing, pass 3 loaded tokens from a tier, and
the answers are equal token by token. Without a GPU the model runs in float32. In bfloat16
vLLM's own prefix cache can change an answer: fewer tokens are computed at once, sums are
rounded differently, and a tie between two words is decided the other way. Where that
happens on a GPU (pass 2 differs from pass 1), pass 3 must equal pass 2, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from smollm2 import NAME, cache_folder, ensure_model, is_complete

if TYPE_CHECKING:
    from vllm import LLM

TEXT = Path(__file__).with_name("long_text.txt")
QUESTIONS = (  # simple enough for such a small model
    "What is the name of the ferry, and what colour is it?",
    "How many times a day does the ferry cross the river?",
    "What does Captain Brannock want to buy when she retires?",
)
ANSWER_TOKENS = 24
CPU_MEMORY = "2GiB"
HIT_TOKENS = "vllm:tiered_kv_hit_tokens"
LOG_TAIL_LINES = 30
SETTLE_S = 30.0


class DemoError(Exception):
    """The demo could not run as described."""


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: tuple[int, ...]
    ttft: float
    cached: int  # prompt tokens vLLM did not compute, from any cache
    loaded: dict[str, int]  # tier -> prompt tokens loaded from it

    @property
    def served_by(self) -> str:
        return "+".join(sorted(self.loaded)) or ("uncounted" if self.cached else "computed")


@dataclass(frozen=True)
class Row:
    question: str
    prompt_tokens: int
    computed: Answer
    device: Answer
    tier: Answer

    @property
    def all_equal(self) -> bool:
        return self.computed.tokens == self.device.tokens == self.tier.tokens

    @property
    def only_rounding_differs(self) -> bool:
        """vLLM's own cache changed the answer, and the tier returned the same answer as that."""
        return self.computed.tokens != self.device.tokens == self.tier.tokens


class Screen:
    """Prints the demo's own lines to the terminal and redirects all other output to a log file."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._began = time.monotonic()
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        sys.stdout.flush()
        # Redirect the descriptors, because native libraries and worker processes write to them.
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)

    def show(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def step(self, text: str) -> None:
        self.show(f"[{time.monotonic() - self._began:4.0f}s] {text}")

    def show_log_tail(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        self.show("\n".join(f"  | {line}" for line in lines))
        self.show(f"whole log: {self.log}")


def start_engine(model: Path) -> LLM:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read by CPU builds only
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM
    from vllm.platforms import current_platform

    return LLM(
        model=str(model),
        dtype="float32" if current_platform.is_cpu() else "auto",
        max_model_len=4096,
        enforce_eager=True,  # starts sooner
        enable_prefix_caching=True,
        disable_log_stats=False,  # the hit counters are read from vLLM's own metrics
        kv_transfer_config={
            "kv_connector": "TieredKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": CPU_MEMORY},
        },
    )


def hit_tokens(llm: LLM) -> dict[str, int]:
    hits: dict[str, int] = {}
    for metric in llm.get_metrics():
        if metric.name == HIT_TOKENS:
            tier = metric.labels["tier"]
            hits[tier] = hits.get(tier, 0) + int(metric.value)
    return hits


def forget(llm: LLM, tiers_too: bool) -> None:
    """Empties the device's prefix cache, and the tiers with `tiers_too`."""
    deadline = time.monotonic() + SETTLE_S
    while not llm.reset_prefix_cache(reset_connector=tiers_too):
        # A finishing request still uses blocks; an in-process engine makes progress only
        # when it is stepped.
        if time.monotonic() > deadline:
            raise DemoError(f"the prefix cache was still in use after {SETTLE_S:.0f} s")
        llm.llm_engine.step()
        time.sleep(0.01)


def ask(llm: LLM, messages: list[dict[str, str]]) -> tuple[int, Answer]:
    from vllm import SamplingParams

    before = hit_tokens(llm)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    (output,) = llm.chat(messages, sampling, use_tqdm=False)
    llm.llm_engine.step()  # the next step publishes the counters of the last one
    after = hit_tokens(llm)
    if output.metrics is None:
        raise DemoError("vLLM reported no timings for the request")
    completion = output.outputs[0]
    return len(output.prompt_token_ids), Answer(
        text=" ".join(completion.text.split()),
        tokens=tuple(completion.token_ids),
        ttft=output.metrics.first_token_latency,
        cached=output.num_cached_tokens or 0,
        loaded={
            tier: count - before.get(tier, 0)
            for tier, count in after.items()
            if count > before.get(tier, 0)
        },
    )


def compare(llm: LLM, text: str, question: str) -> Row:
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    forget(llm, tiers_too=True)
    prompt_tokens, computed = ask(llm, messages)
    _, device = ask(llm, messages)
    forget(llm, tiers_too=False)
    _, tier = ask(llm, messages)
    return Row(question, prompt_tokens, computed, device, tier)


def table(rows: list[Row]) -> str:
    def ms(answer: Answer) -> str:
        return f"{answer.ttft * 1000:.0f} ms"

    lines = [
        ("", "first", "after", "prompt", "loaded", "TTFT", "TTFT", "TTFT", "tier vs", "answers"),
        (
            *("question", "pass", "reset", "tokens", "tokens"),
            *("computed", "device", "tier", "computed", "equal"),
        ),
    ]
    for number, row in enumerate(rows, start=1):
        equal = "yes" if row.all_equal else "yes*" if row.only_rounding_differs else "NO"
        lines.append(
            (
                *(f"Q{number}", row.computed.served_by, row.tier.served_by),
                *(str(row.prompt_tokens), str(sum(row.tier.loaded.values()))),
                *(ms(row.computed), ms(row.device), ms(row.tier)),
                *(f"{row.computed.ttft / row.tier.ttft:.1f} x", equal),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    words = 3  # columns with words; the others have numbers
    drawn = [
        "  ".join(
            cell.ljust(width) if index < words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    drawn.insert(2, "-" * len(drawn[0]))
    if any(row.only_rounding_differs for row in rows):
        drawn.append("* equal to the answer from vLLM's own cache, which differs from the computed")
        drawn.append(
            "  one: the rounding of vLLM's arithmetic depends on how much is computed at once"
        )
    return "\n".join(drawn)


def complaints(rows: list[Row], exact: bool) -> list[str]:
    found = []
    for number, row in enumerate(rows, start=1):
        if row.computed.cached or row.computed.loaded:
            found.append(f"Q{number}: {row.computed.cached} tokens of the first pass were cached")
        if not row.tier.loaded:
            found.append(f"Q{number}: no tier served anything in the third pass")
        if not row.all_equal and (exact or not row.only_rounding_differs):
            found.append(f"Q{number}: the answers differ")
    return found


def run(screen: Screen, model: Path | None) -> int:
    is_new = model is None and not is_complete(cache_folder() / NAME)
    screen.step(f"about {'two minutes' if is_new else 'a minute'} from here, on two cores")
    folder = model or ensure_model(report=screen.step)
    screen.step("starting vLLM (about half a minute)")
    llm = start_engine(folder)
    text = TEXT.read_text(encoding="utf-8").strip()
    screen.step("warming up with another text of this length, so that no pass pays for it")
    ask(llm, [{"role": "user", "content": " ".join(reversed(text.split()))}])

    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    screen.show()
    screen.show(
        f"A text of {len(text.split())} words, {len(QUESTIONS)} questions about it, each asked\n"
        f"three times ({folder.name}, {dtype}, greedy):\n"
        "  computed  after emptying the device's cache and all tiers\n"
        "  device    again at once: vLLM's own prefix cache\n"
        "  tier      after emptying the device's cache only"
    )
    screen.show()
    rows = []
    for number, question in enumerate(QUESTIONS, start=1):
        screen.step(f"asking Q{number}: {question}")
        row = compare(llm, text, question)
        rows.append(row)
        for name in ("computed", "device", "tier"):
            screen.show(f"        {name + ':':9} {getattr(row, name).text}")

    screen.show()
    screen.show(table(rows))
    screen.show()
    found = complaints(rows, exact=dtype == "float32")
    for complaint in found:
        screen.show(f"FAILED  {complaint}")
    if not found:
        screen.show("Every question was answered from a tier with an equal answer.")
    screen.show(f"vLLM's log: {screen.log}")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="another model folder (default: SmolLM2-135M)")
    options = parser.parse_args()
    screen = Screen(cache_folder() / "demo.log")
    try:
        return run(screen, options.model)
    except Exception as error:
        traceback.print_exc()  # to the log
        screen.show_log_tail()
        screen.show(f"FAILED  {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
