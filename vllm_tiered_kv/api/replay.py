"""Sends every prompt to a running server without the cache and with it, and compares the answers.

Without the cache: a new cache salt gives every block a new key, so everything is computed. With the
cache: twice, so that the second round finds the blocks stored by the first. Between the two, the
GPU prefix cache is emptied if the server allows it; otherwise it may serve the prompts instead of a
tier. The server's counters tell whether blocks were loaded: without loads, equal answers prove
nothing.
"""

from __future__ import annotations

import enum
import math
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_kv.api.answers import Answer, AnswerComparison, Outcome, compare_answers
from vllm_tiered_kv.api.openai_server import OpenAIServer
from vllm_tiered_kv.api.prompt_file import Prompt
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.metrics import names

_COUNTERS = (
    names.LOADED_BLOCKS,
    names.LOAD_FAILURES,
    names.VERIFIED_BLOCKS,
    names.DIFFERING_BLOCKS,
)
_COUNTER_DELAY_S = 5.0  # a server publishes its counters with a delay


class Round(str, enum.Enum):
    """The rounds of a replay. The value appears in reports."""

    COMPUTED = "computed"  # without the cache
    FIRST = "first"  # with the cache: held blocks are used, the others are stored
    SECOND = "second"  # with the cache again


class Exit(enum.IntEnum):
    """Exit status of `tiered-kv replay`."""

    EQUAL = 0
    DIFFERENT = 1
    FAILED = 2
    NOTHING_LOADED = 3


@dataclass(frozen=True)
class ReplaySettings:
    """Options of a replay, as the command line sets them."""

    model: str | None = None
    max_tokens: int = 64
    concurrency: int = 1
    salt: str | None = None
    tie: float = 0.15
    drift: float = 0.25
    needs_loads: bool = True
    empties_gpu_cache: bool = True


@dataclass
class PromptResult:
    """The answers to one prompt and their comparisons."""

    prompt: Prompt
    comparisons: dict[Round, AnswerComparison] = field(default_factory=dict)
    errors: dict[Round, str] = field(default_factory=dict)
    answers: dict[Round, Answer] = field(default_factory=dict)

    @property
    def worst(self) -> Outcome:
        found = {comparison.outcome for comparison in self.comparisons.values()}
        for outcome in (Outcome.DIFFERENT, Outcome.DRIFT):
            if outcome in found:
                return outcome
        if self.errors:
            return Outcome.FAILED
        return Outcome.TIE if Outcome.TIE in found else Outcome.EQUAL

    @property
    def is_different(self) -> bool:
        return self.worst in (Outcome.DIFFERENT, Outcome.DRIFT)


@dataclass
class ReplayReport:
    """The results of a replay, for people and as JSON."""

    model: str
    results: list[PromptResult]
    counted: dict[str, float] | None = None
    """Increase of the server's counters in the rounds with the cache; None without metrics."""
    gpu_cache_emptied: bool = False
    needs_loads: bool = True

    @property
    def loaded_blocks(self) -> float | None:
        return None if self.counted is None else self.counted[names.LOADED_BLOCKS.name]

    @property
    def exit_status(self) -> Exit:
        if any(result.is_different for result in self.results):
            return Exit.DIFFERENT
        if any(result.errors for result in self.results):
            return Exit.FAILED
        if not self.loaded_blocks and self.needs_loads:
            return Exit.NOTHING_LOADED
        return Exit.EQUAL

    def lines(self) -> list[str]:
        """Returns the report for people: a line per prompt, then a summary."""
        return [_line(result) for result in self.results] + self._summary()

    def _summary(self) -> list[str]:
        counts = {kind: sum(r.worst is kind for r in self.results) for kind in Outcome}
        outcomes = ", ".join(f"{count} {kind.value}" for kind, count in counts.items() if count)
        lines = ["", f"{len(self.results)} prompts: {outcomes}"]
        if self.counted is None:
            lines.append("WARNING: the server has no /metrics; it may not have loaded any block")
        elif not self.loaded_blocks:
            lines += [
                "WARNING: NO BLOCK WAS LOADED FROM A TIER, SO THIS PROVES NOTHING.",
                "  Check that the connector is configured, that prompts are longer than a block,",
                "  that load_policy is not `never` and verify_fraction is not 1. If the GPU prefix",
                "  cache holds these prompts, start the server with VLLM_SERVER_DEV_MODE=1 so that",
                "  it can be emptied, or replay more prompts.",
            ]
        else:
            lines.append(f"{self.loaded_blocks:.0f} blocks were loaded from tiers")
        for metric in (names.LOAD_FAILURES, names.DIFFERING_BLOCKS):
            if self.counted and self.counted[metric.name]:
                lines.append(f"the server counted {self.counted[metric.name]:.0f} {metric.name}")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "status": int(self.exit_status),
            "counted": self.counted,
            "gpu_cache_emptied": self.gpu_cache_emptied,
            "prompts": [
                {
                    "line": result.prompt.line,
                    "outcome": result.worst.value,
                    "errors": {at.value: error for at, error in result.errors.items()},
                    "rounds": {
                        at.value: {
                            "outcome": found.outcome.value,
                            "token": found.index,
                            "logprob_gap": found.gap if math.isfinite(found.gap) else None,
                            "logprob_drift": found.drift if math.isfinite(found.drift) else None,
                        }
                        for at, found in result.comparisons.items()
                    },
                    "answers": {
                        at.value: {"text": answer.text, "cached_tokens": answer.cached_tokens}
                        for at, answer in result.answers.items()
                    },
                }
                for result in self.results
            ],
        }


class Replay:
    """Runs the rounds of a replay and compares their answers. The command line calls it."""

    def __init__(
        self,
        server: OpenAIServer,
        baseline: OpenAIServer | None,
        settings: ReplaySettings,
        report_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`baseline` is a server without the cache that replaces the rounds with new salts."""
        self._server = server
        self._baseline = baseline or server
        self._settings = settings
        self._report_progress = report_progress

    def run(self, prompts: Sequence[Prompt]) -> ReplayReport:
        """Runs all rounds. Raises ReplayError if a server is unusable or answers no prompt."""
        model = self._server.choose_model(self._settings.model)
        self._baseline_model = model
        if self._baseline is not self._server:
            self._baseline_model = self._baseline.choose_model(self._settings.model)
        report = ReplayReport(
            model,
            [PromptResult(prompt) for prompt in prompts],
            needs_loads=self._settings.needs_loads,
        )
        self._ask_all(report, Round.COMPUTED)
        before = self._server.counters(_COUNTERS)
        self._ask_all(report, Round.FIRST)
        if self._settings.empties_gpu_cache:
            report.gpu_cache_emptied = self._server.forget_gpu_cache()
            if not report.gpu_cache_emptied:
                self._report_progress(
                    "could not empty the GPU prefix cache; it may serve prompts instead of a tier"
                )
        self._ask_all(report, Round.SECOND)
        report.counted = self._counter_increase(before)
        for result in report.results:
            self._compare(result)
        return report

    def _ask_all(self, report: ReplayReport, at: Round) -> None:
        done = 0
        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            for result, answer in zip(
                report.results,
                pool.map(lambda result: self._ask(result.prompt, report.model, at), report.results),
                strict=True,
            ):
                if isinstance(answer, Answer):
                    result.answers[at] = answer
                else:
                    result.errors[at] = str(answer)
                done += 1
                if done == len(report.results) or not done % max(1, len(report.results) // 10):
                    self._report_progress(f"{at.value}: {done} of {len(report.results)}")
        if at is Round.COMPUTED and not any(result.answers for result in report.results):
            raise ReplayError(f"no prompt was answered: {report.results[0].errors[at]}")

    def _ask(self, prompt: Prompt, model: str, at: Round) -> Answer | ReplayError:
        server, salt = self._server, self._settings.salt
        if at is Round.COMPUTED:
            server, model = self._baseline, self._baseline_model
            salt = f"replay-{uuid.uuid4().hex}"
        try:
            return server.ask(prompt, model, self._settings.max_tokens, salt)
        except ReplayError as error:
            return error

    def _compare(self, result: PromptResult) -> None:
        computed = result.answers.get(Round.COMPUTED)
        for at in (Round.FIRST, Round.SECOND):
            other = result.answers.get(at)
            if computed is not None and other is not None:
                result.comparisons[at] = compare_answers(
                    computed, other, self._settings.tie, self._settings.drift
                )

    def _counter_increase(self, before: dict[str, float] | None) -> dict[str, float] | None:
        end = time.monotonic() + _COUNTER_DELAY_S
        while True:
            after = self._server.counters(_COUNTERS)
            if before is None or after is None:
                return None
            increase = {name: after[name] - before[name] for name in after}
            if increase[names.LOADED_BLOCKS.name] or time.monotonic() > end:
                return increase
            time.sleep(0.25)


def _line(result: PromptResult) -> str:
    head = f"line {result.prompt.line}: {result.worst.value:9} {result.prompt.title}"
    parts = [f"{at.value} round failed: {error}" for at, error in result.errors.items()]
    for at, found in result.comparisons.items():
        if found.outcome in (Outcome.TIE, Outcome.DIFFERENT):
            parts.append(
                f"{at.value} round: token {found.index} differs, logprob gap {found.gap:.3g}"
            )
        elif found.outcome is Outcome.DRIFT:
            parts.append(
                f"{at.value} round: logprob of token {found.index} is {found.drift:.3g} off"
            )
    return "\n    ".join([head, *parts])
