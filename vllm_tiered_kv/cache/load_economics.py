"""Load or recompute: what of a prompt is fetched from slower tiers, and what is computed again.

A tier that is slower than the model makes a hit slower than a miss. What a load would take is
estimated from the loads before it (`cache.speed_estimates`), and so is what computing would take;
only what is expected to be faster is loaded. The blocks of a prompt lie in runs, one tier after the
other along the chain, and only a prefix of them can be loaded. Within a run the answer is all or
nothing: each byte takes as long as the one before it, while computing gets slower along the prompt,
so if it does not pay to load up to the end of a run, it pays even less to stop inside it.

Three things keep this from going wrong:

- Changing one's mind takes a margin, so that two alike speeds do not make decisions flap.
- A tier that is found too slow is tried again now and then, with a piece so small that its request
  hardly notices (`_PROBE_LOSS`). A tier nobody has used yet is met in the same way.
- The CPU tier, and a daemon's memory that is mapped, are trusted: they are not loaded from only
  when enough loads and prefills of that size were seen to be sure.

No clock, no counters, no blocks: times and lengths in, a number of tokens out. `choose` changes
nothing, since vLLM may ask many times before it admits a request; `settle` is called when it does.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.cache.speed_estimates import Backlog, LoadSpeed, PrefillSpeed, Typical
from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier

_GO_ON = 0.95  # a tier in use is left when loading takes more than this share of computing
_RETURN = 0.8  # a tier that was left is used again from here on
_PROBE_LOSS = 0.03  # what a probe may add to a prefill
_CAUTIOUS_LOSS = 0.045  # the same, of one that is estimated with caution
_PROBE_TIME = 0.1  # what a probe may take altogether: its speed may not be what it was
_PROBE_UNMET_BYTES = 2 << 20  # a probe of a tier that was never met
_PROBE_BLIND_S = 0.01  # what one may take where prefills teach nothing
_PROBE_EVERY = 16  # requests between two probes, doubled whenever nothing has changed
_PROBE_EVERY_MOST = 128
_PROBE_AFTER_S = 30.0  # or this long after the last one
_FORGET_S = 60.0  # where any probe seems too dear, what the smallest may cost doubles in this time
_REACH = 8  # a load that is larger than this many times any seen before is guessed
_LARGER = 1.5  # by how much a further probe has to be larger to tell more
_LEARNT = 3  # samples before an unknown tier is judged
_MINOR = 0.1  # a part of a load this small decides nothing
_SURE = 8  # samples before a trusted tier is distrusted
_BLIND_LIMIT = 4  # prefills that should have taught us something and did not

_ASSUMED = {
    # Latency in seconds, bytes per second.
    Tier.CPU: (0.0005, 10e9),
    Tier.MEMORY: (0.001, 1e9),
    Tier.SSD: (0.002, 0.5e9),
    Tier.BACKING: (0.01, 0.2e9),
}
_ASSUMED_MAPPED = (0.001, 10e9)


class Decision(str, enum.Enum):
    """What became of the blocks of a request that one tier held. The value is the metric label."""

    LOAD = "load"
    SHORTEN = "shorten"  # only the part nearer to the head
    PROBE = "probe"  # a small piece, to learn how fast the tier is
    RECOMPUTE = "recompute"


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


@dataclass
class _Probing:
    """When a tier is tried again."""

    every: int = _PROBE_EVERY
    since: int = _PROBE_EVERY  # requests that could have carried a probe
    heard_at: float | None = None  # when a load of this tier last ended
    name: str | None = None  # the probe under way
    expected_s: float = 0.0


class LoadEconomics:
    def __init__(
        self,
        policy: LoadPolicy,
        bytes_per_token: float,
        alignment: int,
        step_tokens: int,
        longest_load_s: float,
        trusted: Collection[Tier] = (Tier.CPU,),
    ) -> None:
        """`alignment`: loads end at multiples of this many tokens. `longest_load_s`: a load from a
        daemon that takes longer is given up."""
        self._policy = policy
        self._bytes_per_token = bytes_per_token
        self._alignment = alignment
        self._longest_load_s = longest_load_s
        self._trusted = frozenset(trusted)
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
        self._probing = {tier: _Probing() for tier in self._backlogs}
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
        probe = self._probe(now, computed, prompt, loaded, spans)
        choice = self._choice(loaded + probe, spans, loaded if probe else None)
        return dataclasses.replace(choice, is_blind=is_blind)

    @property
    def loads_blindly(self) -> bool:
        """Whether prefills have taught nothing for so long that tiers are used without."""
        return self._blind >= _BLIND_LIMIT

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
            if all(source in self._trusted and not self._is_sure(source) for source in amounts):
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
            key = tier, _size(choice.spans, tier)
            probing = self._probing[tier]
            if decision is Decision.LOAD:
                self._left.discard(key)
                continue
            self._left.add(key)
            probing.since += 1
            if probing.heard_at is None:
                probing.heard_at = now
            amounts = self._amounts(choice.tokens, choice.spans).get(tier, {})
            if decision is Decision.PROBE and amounts:  # vLLM may have taken less, or nothing
                probing.name, probing.since = name, 0
                probing.expected_s = self._service_s(amounts)

    def ended(
        self, name: str, now: float, choice: Choice, seconds: Mapping[Tier, float] | None
    ) -> None:
        """The load of an admitted request is over; how long each tier worked on it, or None if it
        failed. A tier whose time is not known is left out."""
        for tier, amounts in self._amounts(choice.tokens, choice.spans).items():
            self._backlogs[tier].end(name, now)
            taken = (seconds or {}).get(tier)
            probing = self._probing[tier]
            probing.heard_at = now
            if probing.name == name:
                probing.name = None
                is_news = taken is not None and taken < probing.expected_s / 2
                # Surprisingly fast: the next request may find out whether that is so.
                probing.since = _PROBE_EVERY_MOST if is_news else probing.since
                probing.every = (
                    _PROBE_EVERY if is_news else min(2 * probing.every, _PROBE_EVERY_MOST)
                )
            if taken is not None:
                self._learn(amounts, taken)

    def _learn(self, amounts: Mapping[Tier, float], taken: float) -> None:
        """A load from several places of a daemon teaches about one of them: one that is not known
        yet, or else the one that took longest."""

        def weight(source: Tier) -> tuple[bool, float]:
            is_major = amounts[source] >= _MINOR * sum(amounts.values())
            is_wanted = is_major and self.speeds[source].count < _LEARNT
            return is_wanted, self.speeds[source].seconds(amounts[source])

        taught = max(amounts, key=weight)
        total = sum(amounts.values())
        others = sum(
            # What is only assumed of a place must not make another look fast.
            self.speeds[source].seconds(nbytes)
            if self.speeds[source].count >= _LEARNT
            else taken * nbytes / total
            for source, nbytes in amounts.items()
            if source is not taught
        )
        self.speeds[taught].observe(amounts[taught], max(taken - others, taken / 10))

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
        new = _between(loaded, end, spans)
        sources = _major_sources(new)
        if all(source in self._trusted and not self._is_sure(source) for source in sources):
            return True
        if any(source not in self._trusted and not self._is_learnt(source) for source in sources):
            return False
        if not self.prefill.knows(end - loaded):
            # Computing is what teaches how long it takes. Should it not, load as one would
            # without all this.
            return sources <= self._trusted or self.loads_blindly
        load_s = self.seconds(now, end, spans)
        if any(span.tier is Tier.REMOTE for span in new) and load_s > self._longest_load_s:
            return False
        was_left = any((span.tier, _size(spans, span.tier)) in self._left for span in new)
        margin = _RETURN if was_left else _GO_ON
        saved_s = self.prefill.seconds(computed + loaded, end - loaded)
        if any(
            self.speeds[source].largest * _REACH < nbytes
            and self.speeds[source].cautious_seconds(nbytes) > saved_s
            for amounts in self._amounts(end, spans).values()
            for source, nbytes in amounts.items()
            if source not in self._trusted
        ):
            return False  # a guess, and it might be wrong
        return load_s - self.seconds(now, loaded, spans) <= margin * saved_s

    def _probe(
        self, now: float, computed: int, prompt: int, loaded: int, spans: Sequence[Span]
    ) -> int:
        """Tokens to load beyond `loaded` only to learn how fast their tier is; mostly none."""
        rest = _between(loaded, sum(span.tokens for span in spans), spans)
        if not rest:
            return 0
        tier, sources = rest[0].tier, _major_sources(rest[:1])
        probing = self._probing[tier]
        if probing.name is not None or len(self._backlogs[tier]):
            return 0  # its time would not be its own
        is_known = all(self._is_learnt(source) for source in sources)
        silence = 0.0 if probing.heard_at is None else now - probing.heard_at
        is_due = probing.since >= probing.every or silence >= _PROBE_AFTER_S
        budget = self.prefill.seconds(computed, prompt - computed)
        knows = self.prefill.knows(prompt - computed)
        start = computed + loaded
        tokens = self._aligned(start, rest[0].tokens)
        least_bytes = 0.0
        has_to_grow = tokens > 0 and is_known and not is_due
        if has_to_grow:
            least_bytes = self._bytes_to_learn_from(self._amounts(tokens, rest)[tier])
        if not knows and not self.loads_blindly:
            return 0  # this request's prefill may tell what it may cost
        while tokens > 0:
            amounts = self._amounts(tokens, rest)[tier]
            if sum(amounts.values()) < least_bytes:
                return 0
            smaller = self._aligned(start, tokens * 3 // 4)
            loss_s = self.handover.value - self.prefill.seconds(start, tokens)
            if is_known and not has_to_grow and knows:
                probe_s = self._service_s(amounts)
                most_loss_s = _PROBE_LOSS * budget
                is_safe = True
            else:
                probe_s = self._cautious_service_s(amounts)
                most_loss_s = _CAUTIOUS_LOSS * budget if knows else _PROBE_BLIND_S
                # Of a tier that was never met a little, or the least there is.
                is_met = all(self.speeds[source].count for source in amounts)
                is_safe = is_met or sum(amounts.values()) <= _PROBE_UNMET_BYTES or not smaller
            if smaller:
                most_s = _PROBE_TIME * budget if knows else _PROBE_BLIND_S
                is_short = self.handover.value + probe_s <= most_s
            else:
                is_short = True
                most_loss_s *= 2 ** min(silence / _FORGET_S, 60.0)
            if is_short and is_safe and loss_s + probe_s <= most_loss_s:
                return tokens
            tokens = smaller
        return 0

    def _bytes_to_learn_from(self, amounts: Mapping[Tier, float]) -> float:
        """How large a probe between two that are due has to be. Small loads cannot tell a latency
        from a bandwidth: where all that was seen is small beside what is held, each further one has
        to be larger than any before. More than there are where nothing is to be learnt."""
        total = sum(amounts.values())
        met = [
            self.speeds[source].largest
            for source, nbytes in amounts.items()
            if nbytes >= _MINOR * total and self.speeds[source].count
        ]
        largest = min(met, default=total)
        return _LARGER * largest if largest * _REACH < total else 2 * total

    def _choice(
        self, tokens: int, spans: Sequence[Span], before_probe: int | None = None
    ) -> Choice:
        held = sum(span.tokens for span in spans)
        decisions: dict[Tier, Decision] = {}
        for tier in dict.fromkeys(span.tier for span in spans):
            of_tier = sum(span.tokens for span in spans if span.tier is tier)
            taken = _tokens_of(tier, tokens, spans)
            if before_probe is not None and taken > _tokens_of(tier, before_probe, spans):
                decisions[tier] = Decision.PROBE
            elif taken == of_tier:
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
        for span in _between(0, tokens, spans):
            nbytes = span.tokens * self._bytes_per_token
            of_tier = amounts.setdefault(span.tier, {})
            for source, share in span.sources().items():
                of_tier[source] = of_tier.get(source, 0.0) + share * nbytes
        return amounts

    def _service_s(self, amounts: Mapping[Tier, float]) -> float:
        return sum(self.speeds[source].seconds(nbytes) for source, nbytes in amounts.items())

    def _cautious_service_s(self, amounts: Mapping[Tier, float]) -> float:
        return sum(
            self.speeds[source].cautious_seconds(nbytes) for source, nbytes in amounts.items()
        )

    def _is_learnt(self, source: Tier) -> bool:
        return self.speeds[source].count >= _LEARNT or source in self._trusted

    def _is_sure(self, source: Tier) -> bool:
        return self.speeds[source].count >= _SURE


def _between(start: int, stop: int, spans: Sequence[Span]) -> list[Span]:
    """The parts of the spans that lie in these tokens."""
    parts: list[Span] = []
    begin = 0
    for span in spans:
        tokens = min(stop, begin + span.tokens) - max(start, begin)
        if tokens > 0:
            parts.append(dataclasses.replace(span, tokens=tokens))
        begin += span.tokens
    return parts


def _tokens_of(tier: Tier, tokens: int, spans: Sequence[Span]) -> int:
    return sum(span.tokens for span in _between(0, tokens, spans) if span.tier is tier)


def _size(spans: Sequence[Span], tier: Tier) -> int:
    """Decisions differ by length; a length is about as long as another within a power of two."""
    return sum(span.tokens for span in spans if span.tier is tier).bit_length()


def _major_sources(spans: Sequence[Span]) -> set[Tier]:
    """Where these spans lie, but for places that hold next to nothing of them."""
    total = sum(span.tokens for span in spans)
    amounts: dict[Tier, float] = {}
    for span in spans:
        for source, share in span.sources().items():
            amounts[source] = amounts.get(source, 0.0) + share * span.tokens
    return {source for source, amount in amounts.items() if amount >= _MINOR * total}
