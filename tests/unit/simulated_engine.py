"""A model, a tier and an engine that take as long as they are told to, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_kv.cache.background_probes import BackgroundProbes
from vllm_tiered_kv.cache.cost_model import Choice, CostModel, Span
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision

BLOCK = 16
BYTES_PER_TOKEN = 57344  # of a 7B model with grouped heads
STEP_TOKENS = 8192
LOOKS = {Tier.CPU: Tier.CPU, Tier.SSD: Tier.REMOTE, Tier.MEMORY: Tier.REMOTE}


class Decider:
    """The cost model and its probes, put together as the scheduler half does."""

    def __init__(
        self,
        policy: LoadPolicy = LoadPolicy.AUTO,
        alignment: int = BLOCK,
        step_tokens: int = STEP_TOKENS,
        longest_load_s: float = 5.0,
        **settings: Any,
    ) -> None:
        self.policy = policy
        self.costs = CostModel(
            policy, BYTES_PER_TOKEN, alignment, step_tokens, longest_load_s, **settings
        )
        self.probes = BackgroundProbes(self.costs)
        self.speeds = self.costs.speeds

    def choose(self, now: float, computed: int, spans: list[Span]) -> Choice:
        choice = self.costs.choose(now, computed, spans)
        return self.probes.added(now, choice) if self.policy is LoadPolicy.AUTO else choice

    def settle(self, name: str, now: float, choice: Choice) -> None:
        self.costs.settle(name, now, choice)
        self.probes.begin(name, now, choice)


def span(source: Tier, tokens: int) -> Span:
    return Span(LOOKS[source], tokens, {} if source is Tier.CPU else {source: 1.0})


@dataclass
class Model:
    """A GPU that takes 257 ms for 10,240 tokens."""

    step_s: float = 0.008
    token_s: float = 1.88e-5
    attended_s: float = 1.0e-9

    def step(self, computed: int, tokens: int) -> float:
        attended = tokens * (computed + tokens / 2)
        return self.step_s + self.token_s * tokens + self.attended_s * attended


@dataclass
class Engine:
    """One request after the other; everything takes as long as it is said to."""

    speed: Callable[[int], float]  # bytes per second of the tier for the n-th request
    latency_s: float = 0.001
    noise: float = 0.05
    source: Tier = Tier.SSD
    decider: Decider = field(default_factory=Decider)
    model: Model = field(default_factory=Model)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 1000.0
    asked: int = 0
    probed: float = 0.0  # seconds
    ours: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def ask(self, prompt: int, held: int) -> Decision:
        chosen = self.decider.choose(self.now, 0, [span(self.source, held)])
        name = f"r{self.asked}"
        self.decider.settle(name, self.now, chosen)
        seconds = 0.0
        if chosen.tokens:
            nbytes = chosen.tokens * BYTES_PER_TOKEN
            load = self.latency_s + nbytes / self.speed(self.asked)
            load *= 1 + self.rng.uniform(-self.noise, self.noise)
            seconds += load + 0.001
            self.decider.costs.ended(name, self.now + seconds, chosen, {LOOKS[self.source]: load})
        if chosen.probed:  # beside the request, which does not wait for it
            nbytes = len(chosen.probed) * BYTES_PER_TOKEN
            taken = self.latency_s + nbytes / self.speed(self.asked)
            taken *= 1 + self.rng.uniform(-self.noise, self.noise)
            self.probed += taken
            self.decider.probes.end(name, self.now + taken, nbytes, taken)
        self.alone.append(self._compute(0, prompt, observe=False))
        self.ours.append(seconds + self._compute(chosen.tokens, prompt, observe=True))
        self.now += self.ours[-1] + 0.01
        self.asked += 1
        self.decisions.append(chosen.decisions[LOOKS[self.source]])
        return self.decisions[-1]

    def _compute(self, computed: int, prompt: int, observe: bool) -> float:
        total = 0.0
        while computed < prompt:
            tokens = min(STEP_TOKENS, prompt - computed)
            seconds = self.model.step(computed, tokens)
            seconds *= 1 + self.rng.uniform(-self.noise, self.noise) * observe
            if observe:
                attended = tokens * (computed + tokens / 2)
                self.decider.costs.step_ended(tokens, attended, seconds)
            total += seconds
            computed += tokens
        return total

    def ratio(self, start: int = 0) -> float:
        return sum(self.ours[start:]) / sum(self.alone[start:])
