"""Where the blocks of a prompt lie, and how much of it is loaded: plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision

MINOR = 0.1  # a part of a load this small decides nothing


@dataclass(frozen=True)
class Span:
    """A run of tokens whose blocks lie in one place."""

    tier: Tier  # CPU or REMOTE
    tokens: int
    shares: Mapping[Tier, float] = field(default_factory=dict)
    """Of a daemon's: which part lies in its memory, on its SSD, and behind it."""

    def sources(self) -> Mapping[Tier, float]:
        if self.tier is Tier.REMOTE:
            return self.shares or {Tier.MEMORY: 1.0}
        return {self.tier: 1.0}


@dataclass(frozen=True)
class Choice:
    """How many of the tokens that tiers hold are loaded, and why."""

    tokens: int
    held: int
    decisions: Mapping[Tier, Decision] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    is_blind: bool = False
    """Computing was chosen only because nobody knows how long it takes."""
    rehearsed: range = range(0)
    """Tokens that tiers hold and that are fetched for nobody, while the request computes them."""
    rehearsed_place: Tier | None = None
    """What they tell about."""


def between(start: int, stop: int, spans: Sequence[Span]) -> list[Span]:
    """The parts of the spans that lie in these tokens."""
    parts: list[Span] = []
    begin = 0
    for span in spans:
        tokens = min(stop, begin + span.tokens) - max(start, begin)
        if tokens > 0:
            parts.append(dataclasses.replace(span, tokens=tokens))
        begin += span.tokens
    return parts


def tokens_of(tier: Tier, tokens: int, spans: Sequence[Span]) -> int:
    return sum(span.tokens for span in between(0, tokens, spans) if span.tier is tier)


def length_class(spans: Sequence[Span], tier: Tier) -> int:
    """Decisions differ by length; a length is about as long as another within a power of two."""
    return sum(span.tokens for span in spans if span.tier is tier).bit_length()


def major_sources(spans: Sequence[Span]) -> set[Tier]:
    """Where these spans lie, but for places that hold next to nothing of them."""
    total = sum(span.tokens for span in spans)
    amounts: dict[Tier, float] = {}
    for span in spans:
        for source, share in span.sources().items():
            amounts[source] = amounts.get(source, 0.0) + share * span.tokens
    return {source for source, amount in amounts.items() if amount >= MINOR * total}
