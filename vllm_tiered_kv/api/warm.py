"""Sends prompts to a running server for one token each, before users ask for them.

The server applies its own template and tokenizer, so the blocks are those of later requests. What a
tier holds is loaded, the rest is computed and stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm_tiered_kv.api.openai_server import OpenAIServer
from vllm_tiered_kv.api.prompt_file import Prompt
from vllm_tiered_kv.errors import ReplayError


@dataclass
class WarmReport:
    """What became of the prompts."""

    prompts: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        done = self.prompts - len(self.failures)
        return [*self.failures, f"{done} of {self.prompts} prompts are warm, {self.tokens} tokens"]


def warm(
    server: OpenAIServer,
    prompts: Sequence[Prompt],
    model: str | None,
    concurrency: int,
    pin_s: float,
    salt: str | None,
    on_progress: Callable[[str], None],
) -> WarmReport:
    """Sends every prompt once. One that fails does not stop the others."""
    model = server.choose_model(model)
    controls = {"pin_seconds": pin_s} if pin_s else {}
    report = WarmReport(len(prompts))

    def send(prompt: Prompt) -> int | str:
        try:
            return server.prefill(prompt, model, controls, salt)
        except ReplayError as error:
            return f"line {prompt.line}, {prompt.title!r}: {error}"

    with ThreadPoolExecutor(concurrency) as pool:
        for number, result in enumerate(pool.map(send, prompts), 1):
            if isinstance(result, str):
                report.failures.append(result)
            else:
                report.tokens += result
            on_progress(f"{number} of {len(prompts)}")
    return report
