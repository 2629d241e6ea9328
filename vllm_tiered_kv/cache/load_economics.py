"""Load or recompute: what of a prompt is fetched from slower tiers, and what is computed again.

A tier that is slower than the model makes a hit slower than a miss. What a load would take is
estimated from the loads before it (`cache.speed_estimates`), and so is what computing would take;
only what is expected to be faster is loaded. The blocks of a prompt lie in runs, one tier after the
other along the chain, and only a prefix of them can be loaded. Within a run the answer is all or
nothing: each byte takes as long as the one before it, while computing gets slower along the prompt,
so if it does not pay to load up to the end of a run, it pays even less to stop inside it.

Three things keep this from going wrong:

- Changing one's mind takes a margin, so that two alike speeds do not make decisions flap.
- Memory of this host, the CPU tier and a daemon's that is mapped, is always loaded from: it is
  trusted. Its copies are as fast as the bus. What a busy engine sees of them is mostly the steps
  they waited for, and one that computes instead is busier still.
- Other tiers are rehearsed: while a request computes what such a tier holds, a piece of it is
  fetched for nobody, large enough to tell what a load would take. That is how a tier is met that
  nobody has used yet, and how one that was too slow is tried again.

No clock, no counters, no blocks: times and lengths in, a number of tokens out. `choose` changes
nothing, since vLLM may ask many times before it admits a request; `settle` is called when it does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from vllm_tiered_kv.cache.load_choice import (
    MINOR,
    Choice,
    Span,
    between,
    length_class,
    major_sources,
    tokens_of,
)
from vllm_tiered_kv.cache.rehearsals import LEARNT, REACH, Rehearsals
from vllm_tiered_kv.cache.speed_estimates import Backlog, LoadSpeed, PrefillSpeed, Typical
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision

_GO_ON = 0.95  # a tier in use is left when loading takes more than this share of computing
_RETURN = 0.8  # a tier that was left is used again from here on
_BLIND_LIMIT = 4  # prefills that should have taught us something and did not

_ASSUMED = {
    # Latency in seconds, bytes per second.
    Tier.CPU: (0.0005, 10e9),
    Tier.MEMORY: (0.001, 1e9),
    Tier.SSD: (0.002, 0.5e9),
    Tier.BACKING: (0.01, 0.2e9),
}
_ASSUMED_MAPPED = (0.001, 10e9)


class LoadEconomics:
    def __init__(
        self,
        policy: LoadPolicy,
        bytes_per_token: float,
        alignment: int,
        step_tokens: int,
        longest_load_s: float,
        trusted: Collection[Tier] = (Tier.CPU,),
        prefill_at_most: float = math.inf,
    ) -> None:
        """`alignment`: loads end at multiples of this many tokens. `longest_load_s`: a load from a
        daemon that takes longer is given up. `prefill_at_most`: tokens per second that no engine of
        this kind exceeds; it stands for the speed of prefills until some were seen."""
        self._policy = policy
        self._bytes_per_token = bytes_per_token
        self._alignment = alignment
        self._longest_load_s = longest_load_s
        self._trusted = frozenset(trusted)
        self._prefill_at_most = prefill_at_most
        self.prefill = PrefillSpeed(step_tokens)
        self.handover = Typical(0.001)
        """Seconds from the end of a load to the step that uses it, on an idle engine."""
        self.speeds = {
            tier: LoadSpeed(
                *(_ASSUMED_MAPPED if tier in self._trusted and tier is not Tier.CPU else assumed)
            )
            for tier, assumed in _ASSUMED.items()
        }
        self._backlogs = {Tier.CPU: Backlog(), Tier.REMOTE: Backlog()}
        self._rehearsals = Rehearsals(self.speeds, bytes_per_token)
        self._left: set[tuple[Tier, int]] = set()  # tiers found too slow, by length of the prompt
        self._blind = 0

    # ---- before a load --------------------------------------------------------------------------

    def choose(self, now: float, computed: int, prompt: int, spans: Sequence[Span]) -> Choice:
        """What to load of a prompt of which the GPU has `computed` tokens and tiers hold the
        `spans` that follow."""
        spans = tuple(span for span in spans if span.tokens > 0)
        held = sum(span.tokens for span in spans)
        if self._policy is LoadPolicy.ALWAYS or not held:
            return self._choice(held, spans)
        if self._policy is LoadPolicy.NEVER:
            return self._choice(0, spans)
        loaded = 0
        end = 0
        for number, span in enumerate(spans, 1):
            end += span.tokens
            stop = self._aligned(computed, end)
            if self._pays(now, computed, loaded, stop, spans[:number]):
                loaded = stop
        knows = self.prefill.knows(held) and self.prefill.knows(prompt - computed)
        is_blind = loaded < held and not knows
        choice = dataclasses.replace(self._choice(loaded, spans), is_blind=is_blind)
        piece = self._rehearsed(now, loaded, spans)
        if piece is None:
            return choice
        decisions = choice.decisions
        if decisions[Tier.REMOTE] is Decision.RECOMPUTE:
            decisions = {**decisions, Tier.REMOTE: Decision.PROBE}
        return dataclasses.replace(
            choice, decisions=decisions, rehearsed=piece[0], rehearsed_place=piece[1]
        )

    @property
    def loads_blindly(self) -> bool:
        """Whether prefills have taught nothing for so long that tiers are used without."""
        return self._blind >= _BLIND_LIMIT

    def knows_speed(self, source: Tier) -> bool:
        """Whether loads from there are judged by their speed."""
        return self._is_learnt(source)

    def recompute_seconds(self, computed: int, tokens: int) -> float | None:
        """None as long as nobody knows."""
        if not self.prefill.knows(tokens):
            return None
        return self.prefill.seconds(computed, tokens)

    def seconds(self, now: float, tokens: int, spans: Sequence[Span]) -> float:
        """How long the first `tokens` of what tiers hold would take to load from now on. The CPU
        tier and the daemons work side by side."""
        longest, counts = 0.0, False
        for tier, amounts in self._amounts(tokens, spans).items():
            if amounts.keys() <= self._trusted:
                continue
            counts = True
            waiting = self._backlogs[tier].seconds(now)
            longest = max(longest, waiting + self._service_s(amounts))
        return longest + (self.handover.value if counts else 0.0)

    # ---- a load and its end ---------------------------------------------------------------------

    def settle(self, name: str, now: float, choice: Choice) -> None:
        """The request was admitted with this choice; if it loads anything, `ended` will follow."""
        if self._policy is not LoadPolicy.AUTO:
            return
        self._blind = self._blind + 1 if choice.is_blind else self._blind
        for tier, amounts in self._amounts(choice.tokens, choice.spans).items():
            self._backlogs[tier].begin(name, self._service_s(amounts), now)
        for tier, decision in choice.decisions.items():
            key = tier, length_class(choice.spans, tier)
            if decision is Decision.LOAD:
                self._left.discard(key)
            else:
                self._left.add(key)
        if choice.decisions.get(Tier.REMOTE, Decision.LOAD) is not Decision.LOAD:
            self._rehearsals.pace.since += 1
        if choice.rehearsed_place is not None:
            self._rehearsals.begin(name, now, len(choice.rehearsed), choice.rehearsed_place)

    def ended(
        self, name: str, now: float, choice: Choice, seconds: Mapping[Tier, float] | None
    ) -> None:
        """The load of an admitted request is over; how long each tier worked on it, or None if it
        failed. A tier whose time is not known is left out."""
        for tier, amounts in self._amounts(choice.tokens, choice.spans).items():
            self._backlogs[tier].end(name, now)
            taken = (seconds or {}).get(tier)
            if tier is Tier.REMOTE:
                self._rehearsals.pace.heard_at = now
            if taken is not None:
                self._learn(amounts, taken)

    def rehearsed(self, name: str, now: float, nbytes: float, seconds: float) -> None:
        """What was to be fetched for nobody has come, as at `Rehearsals.end`."""
        self._rehearsals.end(name, now, nbytes, seconds)

    def _learn(self, amounts: Mapping[Tier, float], taken: float) -> None:
        """A load from several places of a daemon teaches about one of them: one that is not known
        yet, or else the one that took longest."""

        def weight(source: Tier) -> tuple[bool, float]:
            is_major = amounts[source] >= MINOR * sum(amounts.values())
            is_wanted = is_major and self.speeds[source].count < LEARNT
            return is_wanted, self.speeds[source].seconds(amounts[source])

        taught = max(amounts, key=weight)
        total = sum(amounts.values())
        others = sum(
            # What is only assumed of a place must not make another look fast.
            self.speeds[source].seconds(nbytes)
            if self.speeds[source].count >= LEARNT
            else taken * nbytes / total
            for source, nbytes in amounts.items()
            if source is not taught
        )
        # Where others are taken for slower than they are, this one must not look like magic.
        least = taken * amounts[taught] / total / 2
        self.speeds[taught].observe(amounts[taught], max(taken - others, least))

    # ---- inside ---------------------------------------------------------------------------------

    def _pays(
        self,
        now: float,
        computed: int,
        loaded: int,
        end: int,
        spans: Sequence[Span],
    ) -> bool:
        """Whether to load up to `end` rather than only up to `loaded`."""
        if end <= loaded:
            return False
        new = between(loaded, end, spans)
        sources = major_sources(new)
        if sources <= self._trusted:
            return True
        if any(source not in self._trusted and not self._is_learnt(source) for source in sources):
            return False
        knows = self.prefill.knows(end - loaded)
        if not knows and self.loads_blindly:
            # Computing is what teaches how long it takes. Should it not, load as one would
            # without all this.
            return True
        load_s = self.seconds(now, end, spans)
        if any(span.tier is Tier.REMOTE for span in new) and load_s > self._longest_load_s:
            return False
        was_left = any((span.tier, length_class(spans, span.tier)) in self._left for span in new)
        is_certain = knows and not any(self._is_hearsay(source) for source in sources)
        margin = _GO_ON if is_certain and not was_left else _RETURN
        saved_s = (
            self.prefill.seconds(computed + loaded, end - loaded)
            if knows
            else (end - loaded) / self._prefill_at_most
        )
        if any(
            self.speeds[source].largest * REACH < nbytes
            and self.speeds[source].cautious_seconds(nbytes) > saved_s
            for amounts in self._amounts(end, spans).values()
            for source, nbytes in amounts.items()
            if source not in self._trusted
        ):
            return False  # a guess, and it might be wrong
        return load_s - self.seconds(now, loaded, spans) <= margin * saved_s

    def _rehearsed(
        self, now: float, loaded: int, spans: Sequence[Span]
    ) -> tuple[range, Tier] | None:
        """Tokens beyond `loaded` to fetch for nobody, and what they tell about; mostly none."""
        start = loaded
        for part in between(loaded, sum(span.tokens for span in spans), spans):
            places = major_sources([part]) - self._trusted
            if places:
                piece = self._rehearsals.piece(now, part, places)
                if piece is None or len(self._backlogs[part.tier]):
                    return None  # loads come first
                tokens, place = piece
                return range(start + tokens.start, start + tokens.stop), place
            start += part.tokens
        return None

    def _choice(self, tokens: int, spans: Sequence[Span]) -> Choice:
        held = sum(span.tokens for span in spans)
        decisions: dict[Tier, Decision] = {}
        for tier in dict.fromkeys(span.tier for span in spans):
            of_tier = sum(span.tokens for span in spans if span.tier is tier)
            taken = tokens_of(tier, tokens, spans)
            if taken == of_tier:
                decisions[tier] = Decision.LOAD
            else:
                decisions[tier] = Decision.SHORTEN if taken else Decision.RECOMPUTE
        return Choice(tokens, held, decisions, tuple(spans))

    def _aligned(self, computed: int, tokens: int) -> int:
        """The most tokens, of these, after which a load may end."""
        return max(0, tokens - (computed + tokens) % self._alignment)

    def _amounts(self, tokens: int, spans: Sequence[Span]) -> dict[Tier, dict[Tier, float]]:
        """Bytes of the first `tokens`, by the tier that serves them and where they lie there."""
        amounts: dict[Tier, dict[Tier, float]] = {}
        for span in between(0, tokens, spans):
            nbytes = span.tokens * self._bytes_per_token
            of_tier = amounts.setdefault(span.tier, {})
            for source, share in span.sources().items():
                of_tier[source] = of_tier.get(source, 0.0) + share * nbytes
        return amounts

    def _service_s(self, amounts: Mapping[Tier, float]) -> float:
        return sum(self.speeds[source].seconds(nbytes) for source, nbytes in amounts.items())

    def _is_learnt(self, source: Tier) -> bool:
        speed = self.speeds[source]
        return speed.count >= LEARNT or speed.is_told or source in self._trusted

    def _is_hearsay(self, source: Tier) -> bool:
        """Whether nobody has loaded from there yet: all that is known is what the tier says."""
        return self.speeds[source].is_told and not self.speeds[source].count
