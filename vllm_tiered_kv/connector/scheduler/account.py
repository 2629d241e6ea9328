"""The account of a request: where its prompt tokens came from, and why the others were computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import DropReason, MissCause


@dataclass(frozen=True)
class Miss:
    """Consecutive tokens that were computed for one reason."""

    cause: MissCause
    tokens: int
    tier: Tier | None = None  # that evicted, dropped or holds them
    seconds_ago: float | None = None  # since they were evicted or dropped
    reason: DropReason | None = None  # why they were dropped

    def as_json(self) -> dict[str, Any]:
        known: dict[str, Any] = {"cause": self.cause.value, "tokens": self.tokens}
        if self.tier is not None:
            known["tier"] = self.tier.value
        if self.seconds_ago is not None:
            known["seconds_ago"] = round(self.seconds_ago, 1)
        if self.reason is not None:
            known["reason"] = self.reason.value
        return known


@dataclass
class Account:
    """Where the prompt tokens of a request came from, when it was first admitted. `MissCauses`
    builds it. The log shows all of it; response, trace and metrics show `without_secrets`."""

    prompt_tokens: int
    gpu: int
    loaded: Mapping[Tier, int]
    """Tokens by their source: the CPU tier, or a daemon's memory, SSD or backing store."""
    missed: list[Miss] = field(default_factory=list)  # in the order of the prompt

    @property
    def computed(self) -> int:
        return sum(miss.tokens for miss in self.missed)

    def without_secrets(self) -> Account:
        """The account without what users must not learn: that others, who have another salt, asked
        the same. vLLM serves the metrics to everybody who reaches the port of its API."""
        never_stored = MissCause.NEVER_STORED
        missed = [
            replace(miss, cause=never_stored) if miss.cause is MissCause.OTHER_SALT else miss
            for miss in self.missed
        ]
        return replace(self, missed=missed)

    def load_failed(self) -> int:
        """The load of this account has failed, so its tokens are computed; returns how many."""
        tokens = sum(self.loaded.values())
        if tokens:
            self.loaded = {}
            self.missed.insert(0, Miss(MissCause.LOAD_FAILED, tokens))
        return tokens

    def as_json(self) -> dict[str, Any]:
        sources = (Tier.CPU, Tier.MEMORY, Tier.SSD, Tier.BACKING)
        return {
            "prompt_tokens": self.prompt_tokens,
            "gpu": self.gpu,
            **{tier.value: self.loaded.get(tier, 0) for tier in sources},
            "computed": self.computed,
            "missed": [miss.as_json() for miss in self.missed],
        }

    def line(self) -> str:
        """One line for the log."""
        sources = {"gpu": self.gpu, **{tier.value: n for tier, n in self.loaded.items()}}
        held = [f"{tokens} {name}" for name, tokens in sources.items() if tokens]
        missed = [f"{miss.tokens} computed ({miss.cause.value})" for miss in self.missed]
        return f"{self.prompt_tokens} prompt tokens: {', '.join([*held, *missed])}"
