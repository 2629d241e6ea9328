"""A model, a tier and an engine that take as long as they are told to, on a clock of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_kv.cache.load_choice import Span
from vllm_tiered_kv.cache.load_economics import LoadEconomics
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision

BLOCK = 16
BYTES_PER_TOKEN = 57344  # of a 7B model with grouped heads
STEP_TOKENS = 8192
LOOKS = {Tier.CPU: Tier.CPU, Tier.SSD: Tier.REMOTE, Tier.MEMORY: Tier.REMOTE}


def economics(policy: LoadPolicy = LoadPolicy.AUTO, **settings: Any) -> LoadEconomics:
    return LoadEconomics(policy, BYTES_PER_TOKEN, BLOCK, STEP_TOKENS, 5.0, **settings)


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
    economics: LoadEconomics = field(default_factory=economics)
    model: Model = field(default_factory=Model)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 1000.0
    asked: int = 0
    rehearsed: float = 0.0  # seconds spent for nobody
    ours: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def ask(self, prompt: int, held: int) -> Decision:
        chosen = self.economics.choose(self.now, 0, prompt, [span(self.source, held)])
        name = f"r{self.asked}"
        self.economics.settle(name, self.now, chosen)
        seconds = 0.0
        if chosen.tokens:
            nbytes = chosen.tokens * BYTES_PER_TOKEN
            load = self.latency_s + nbytes / self.speed(self.asked)
            load *= 1 + self.rng.uniform(-self.noise, self.noise)
            seconds += load + 0.001
            self.economics.ended(name, self.now + seconds, chosen, {LOOKS[self.source]: load})
        if chosen.rehearsed:  # beside the request, which does not wait for it
            nbytes = len(chosen.rehearsed) * BYTES_PER_TOKEN
            taken = self.latency_s + nbytes / self.speed(self.asked)
            taken *= 1 + self.rng.uniform(-self.noise, self.noise)
            self.rehearsed += taken
            self.economics.rehearsed(name, self.now + taken, nbytes, taken)
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
                self.economics.prefill.observe(tokens, attended, seconds)
            total += seconds
            computed += tokens
        return total

    def ratio(self, start: int = 0) -> float:
        return sum(self.ours[start:]) / sum(self.alone[start:])


# ---- estimates ----------------------------------------------------------------------------------
