"""How fast a running server answers from each tier: prompts to ask, and who served an answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered_kv.api.openai_server import OpenAIServer, Sample
from vllm_tiered_kv.api.prompt_file import Prompt
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ReplayError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.remote.inquiry import Inquiry

COMPUTED, GPU = "computed", "gpu"
_CPU, _REMOTE = Tier.CPU.value, Tier.REMOTE.value
# vLLM's own counter: each prompt token once, by where it came from.
_SOURCES = "vllm:prompt_tokens_by_source_total"
_SOURCE_NAMES = {"local_compute": COMPUTED, "local_cache_hit": GPU}
_EXTERNAL = "external_kv_transfer"
_HITS = names.HIT_TOKENS.exposed_names[0]
_STORED = names.STORED_BLOCKS.exposed_names[0]
_DAEMON_HITS = "hit_blocks"
_POLL_S = 0.2
_COUNTED_S = 10.0  # an idle engine publishes its counters within a second or so
_QUIET_S = 1.5  # no block was stored for so long: all are
_STORED_S = 120.0
_MIN_SHARE = 0.1  # of the prompt, for a source to be named
_LENGTH_TOLERANCE = 0.01
_DRAWS = 6


@dataclass(frozen=True)
class Answer:
    """One answer of one token: how long it took, and where its prompt came from."""

    seconds: float
    prompt_tokens: int
    tokens: Mapping[str, int]  # computed, gpu, cpu, remote -> prompt tokens
    daemon_tiers: tuple[str, ...] = ()  # memory, ssd, backing: most blocks first

    @property
    def served_by(self) -> str:
        """The sources of at least a tenth of the prompt, the largest first."""
        whole = sum(self.tokens.values())
        if not whole:
            return "unknown"
        ordered = sorted(self.tokens.items(), key=lambda one: -one[1])
        large = [source for source, count in ordered if count >= _MIN_SHARE * whole]
        return "+".join(self._shown(source) for source in large)

    def _shown(self, source: str) -> str:
        if source == _REMOTE and self.daemon_tiers:
            return f"{source}({'+'.join(self.daemon_tiers)})"
        return source

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 4),
            "served_by": self.served_by,
            "prompt_tokens": self.prompt_tokens,
            "tokens": dict(self.tokens),
        }


@dataclass
class Asker:
    """Asks one server, which nobody else uses meanwhile, and reads its counters around each
    request. With a salt of its own nothing of earlier runs is found."""

    server: OpenAIServer
    model: str
    salt: str
    daemons: Sequence[Inquiry] = ()

    def ask(self, prompt: Prompt, tiers: Sequence[str] | None = None) -> Answer:
        """`tiers`: which ones the request may use; None for all."""
        controls = {} if tiers is None else {"tiers": list(tiers)}
        before, hits_before = self._samples(), self._daemon_hits()
        began = time.perf_counter()
        prompt_tokens = self.server.prefill(prompt, self.model, controls, self.salt)
        seconds = time.perf_counter() - began
        tokens = self._counted(before)
        hits = {tier: n - hits_before.get(tier, 0) for tier, n in self._daemon_hits().items()}
        served = sorted((tier for tier in hits if hits[tier]), key=lambda tier: -hits[tier])
        return Answer(seconds, prompt_tokens, tokens, tuple(served) if _REMOTE in tokens else ())

    def wait_until_stored(self) -> None:
        """Returns when blocks of earlier requests have reached the tiers."""
        deadline = time.monotonic() + _STORED_S
        stored, since = self._stored(), time.monotonic()
        while time.monotonic() < min(deadline, since + _QUIET_S):
            time.sleep(_POLL_S)
            now = self._stored()
            if now != stored:
                stored, since = now, time.monotonic()

    def _stored(self) -> float:
        return sum(sample.value for sample in self._samples() if sample.name == _STORED)

    def _counted(self, before: Sequence[Sample]) -> dict[str, int]:
        """Tokens by source since then. The connector's counters come after those of vLLM."""
        deadline = time.monotonic() + _COUNTED_S
        while True:
            counted = sources_between(before, self._samples())
            external = counted.pop(_EXTERNAL, 0)
            tiers = sum(counted.get(tier, 0) for tier in (_CPU, _REMOTE))
            if (counted and tiers >= external) or time.monotonic() > deadline:
                return counted
            time.sleep(_POLL_S)

    def _samples(self) -> list[Sample]:
        samples = self.server.samples()
        if samples is None:
            raise ReplayError(f"{self.server.url} has no /metrics, which tell who served an answer")
        return samples

    def _daemon_hits(self) -> dict[str, int]:
        hits: dict[str, int] = {}
        for daemon in self.daemons:
            for tier, count in daemon.stats().get(_DAEMON_HITS, {}).items():
                hits[tier] = hits.get(tier, 0) + int(count)
        return hits


def sources_between(before: Sequence[Sample], after: Sequence[Sample]) -> dict[str, int]:
    """Prompt tokens by source that were counted between two looks, without those that are 0."""

    def totals(samples: Sequence[Sample]) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in samples:
            if sample.name == _SOURCES:
                source = sample.labels.get("source", "")
                source = _SOURCE_NAMES.get(source, source)
            elif sample.name == _HITS:
                source = sample.labels.get("tier", "")
            else:
                continue
            found[source] = found.get(source, 0.0) + sample.value
        return found

    earlier, later = totals(before), totals(after)
    change = {source: int(count - earlier.get(source, 0)) for source, count in later.items()}
    return {source: count for source, count in change.items() if count > 0}


@dataclass
class Table:
    """Rows of a measurement, for people and programs."""

    rows: list[tuple[str, Answer]] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        first = self.rows[0][1].seconds
        width = max(len(name) for name, _ in self.rows)
        yield f"{'':{width}}  {'TTFT':>10}  {'':>8}  {'tokens':>8}  served by"
        for name, answer in self.rows:
            ratio = f"{first / answer.seconds:.1f} x"
            yield (
                f"{name:{width}}  {answer.seconds:8.3f} s  {ratio:>8}  "
                f"{answer.prompt_tokens:8}  {answer.served_by}"
            )


def speed(
    asker: Asker,
    prompt: Prompt,
    restarts: int,
    restart_timeout_s: float,
    say: Callable[[str], None],
) -> Table:
    """One prompt from each place in turn."""
    table = Table()

    def row(name: str, tiers: Sequence[str] | None = None) -> None:
        say(f"asking: {name}")
        table.rows.append((name, asker.ask(prompt, tiers)))
        asker.wait_until_stored()

    row("first")
    row("GPU")
    if asker.server.forget_gpu_cache():
        row("CPU tier", [_CPU])
        asker.server.forget_gpu_cache()
        row("daemon", [_REMOTE])
    else:
        say(
            "CPU tier and daemon are left out: the server cannot empty its GPU cache; start it with"
        )
        say("VLLM_SERVER_DEV_MODE=1 in its environment")
    for number in range(1, restarts + 1):
        say("restart the server now; waiting for it to end and to be healthy again")
        _wait_for_restart(asker.server, restart_timeout_s)
        row(f"after restart {number}")
        row("GPU")
    return table


def _wait_for_restart(server: OpenAIServer, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for healthy in (False, True):
        while server.is_healthy() is not healthy:
            if time.monotonic() > deadline:
                raise ReplayError(f"{server.url} was not restarted within {timeout_s:.0f} s")
            time.sleep(_POLL_S)


def stress(
    asker: Asker, prompts: Sequence[Prompt], on_row: Callable[[list[Answer]], None]
) -> list[list[Answer]]:
    """The triangle: in round n the first n prompts are asked, the last of them for the first time.
    Each round needs more room than the one before, so one tier after the other must serve."""
    rows = []
    for number in range(1, len(prompts) + 1):
        row = []
        for prompt in prompts[:number]:
            row.append(asker.ask(prompt))
            asker.wait_until_stored()
        rows.append(row)
        on_row(row)
    return rows


def make_text(
    server: OpenAIServer, model: str, words: Sequence[str], length: int, source: random.Random
) -> tuple[str, int]:
    """A text of about so many tokens, of words in random order, and how many it has."""
    count, max_tokens = server.count_tokens(" ".join(words[:1000]), model)
    if not count:
        raise ReplayError(f"the words have no tokens for {model}; choose others with --words")
    if length >= max_tokens:
        raise ReplayError(f"{model} takes {max_tokens} tokens; choose a --length below that")
    drawn = [source.choice(words) for _ in range(max(1, length * min(len(words), 1000) // count))]
    for _ in range(_DRAWS):
        text = " ".join(drawn)
        tokens, _ = server.count_tokens(text, model)
        if abs(tokens - length) <= max(1, _LENGTH_TOLERANCE * length):
            break
        wanted = max(1, len(drawn) * length // tokens)
        drawn = (drawn + [source.choice(words) for _ in range(wanted - len(drawn))])[:wanted]
    return text, tokens


def made_words(source: random.Random) -> list[str]:
    """Words that no model knows, so that texts of them share no prefix."""
    starts, vowels, ends = "bdfgklmnprstvz", "aeiou", "lmnrst"
    return [
        "".join(source.choice(letters) for letters in (starts, vowels, starts, vowels, ends))
        for _ in range(4000)
    ]
