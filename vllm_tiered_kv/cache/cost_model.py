"""Load or recompute: what loading and computing cost, and which of the two a prompt gets.

A tier that is slower than the model makes a hit slower than a miss. `TierSpeed` and `PrefillRate`
estimate both from medians of the last few measurements, and `CostModel` loads what it expects to be
faster. The blocks of a prompt lie in spans, one tier after the other, and a load takes a prefix of
them. A span is loaded whole or not at all: every byte of it costs the same, while tokens cost more
along the prompt, so a load that does not pay to the end of a span pays less to the middle.

Memory of this host, the CPU tier and a mapped daemon's, is trusted: it is always loaded from. Its
copies run at the speed of the bus. A busy engine sees them take long because they wait for its
steps, and computing instead would make it busier still.

Nothing here reads a clock: times and lengths go in, a number of tokens comes out.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.config import LoadPolicy
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics.names import Decision

_WINDOW = 5  # samples of a median: two outliers do not count, three show that something changed
ENOUGH = _WINDOW // 2 + 1  # samples that prove something: one may be a compilation
_MARGIN = 0.9  # of computing, a load may take: estimates are off by some percent, computing is not
_MINOR = 0.1  # a share of a load this small decides nothing
_ASSUMED_RATE = 0.5e9  # bytes per second of a tier that said nothing: a slow SSD or network
_ASSUMED_PREFILL = 5_000.0  # tokens per second: about what the fastest CPUs compute
_FEW = 256  # a step of this fraction of the largest shows what every step costs
_COMPARABLE = 4  # steps smaller by a larger factor leave a GPU idle and say nothing about full ones


@dataclass(frozen=True)
class Span:
    """A run of tokens whose blocks lie in one tier."""

    tier: Tier  # CPU or REMOTE
    tokens: int
    shares: Mapping[Tier, float] = field(default_factory=dict)
    """Of a daemon's: the part in its memory, on its SSD, and in its backing store."""

    def sources(self) -> Mapping[Tier, float]:
        if self.tier is Tier.REMOTE:
            return self.shares or {Tier.MEMORY: 1.0}
        return {self.tier: 1.0}


@dataclass(frozen=True)
class Choice:
    """How many of the tokens that tiers hold, in these spans, are loaded."""

    tokens: int
    spans: tuple[Span, ...] = ()
    probed: range = range(0)
    """Of the held tokens, those that are fetched in the background to measure a tier."""
    probed_place: Tier | None = None

    @property
    def held(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def decisions(self) -> dict[Tier, Decision]:
        """What becomes of the blocks that each tier holds."""
        decisions: dict[Tier, Decision] = {}
        loaded = between(0, self.tokens, self.spans)
        for tier in dict.fromkeys(span.tier for span in self.spans):
            held = sum(span.tokens for span in self.spans if span.tier is tier)
            taken = sum(span.tokens for span in loaded if span.tier is tier)
            is_probed = self.probed and tier is Tier.REMOTE
            rest = Decision.PROBE if is_probed else Decision.RECOMPUTE
            partly = Decision.SHORTEN if taken else rest
            decisions[tier] = Decision.LOAD if taken == held else partly
        return decisions


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


def major_places(spans: Sequence[Span]) -> set[Tier]:
    """Where these spans lie, but for places that hold next to nothing of them."""
    total = sum(span.tokens for span in spans)
    amounts: dict[Tier, float] = {}
    for span in spans:
        for place, share in span.sources().items():
            amounts[place] = amounts.get(place, 0.0) + share * span.tokens
    return {place for place, amount in amounts.items() if amount >= _MINOR * total}


class TierSpeed:
    """Seconds that a tier takes for a number of bytes, latency + bytes / bandwidth. Both are
    medians over the last loads and probes; until there are any, what the tier announces counts."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._latency_s, self._s_per_byte = 0.0, 1.0 / _ASSUMED_RATE
        self.is_announced = False

    def announce(self, bytes_per_s: float) -> None:
        self.is_announced = True
        if not self._samples:
            self._s_per_byte = 1.0 / bytes_per_s

    @property
    def count(self) -> int:
        return len(self._samples)

    @property
    def recent_bytes_per_s(self) -> float | None:
        """Of the last few loads as they were, latency included."""
        if not self._samples:
            return None
        return sum(size for size, _ in self._samples) / sum(taken for _, taken in self._samples)

    def observe(self, nbytes: float, seconds: float, has_hung: bool = False) -> None:
        """`has_hung`: a load timed out. What the tier did before no longer counts."""
        if nbytes <= 0 or seconds <= 0:
            return
        if has_hung:
            self._samples.clear()
        self._samples.append((nbytes, seconds))
        pairs = itertools.combinations(sorted(self._samples), 2)
        slopes = [
            (longer - shorter) / (larger - smaller)
            for (smaller, shorter), (larger, longer) in pairs
            if larger >= 2 * smaller  # others differ by chance
        ]
        slope = statistics.median(slopes) if slopes else 0.0
        if slope <= 0:
            slope = statistics.median(taken / size for size, taken in self._samples)
        rests = (taken - slope * size for size, taken in self._samples)
        self._latency_s, self._s_per_byte = max(0.0, statistics.median(rests)), slope

    def seconds(self, nbytes: float) -> float:
        return self._latency_s + self._s_per_byte * nbytes if nbytes > 0 else 0.0

    def bytes_within(self, seconds: float) -> float:
        return max(0.0, seconds - self._latency_s) / self._s_per_byte


class PrefillRate:
    """Seconds to compute tokens of a prompt: a cost of each step, and one of each token that grows
    with the length of the prompt before it. Both are medians over the last steps, of the latter for
    each power of two of that length."""

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens`: the most tokens that a step computes."""
        self._step_tokens = step_tokens
        self._small_steps: deque[float] = deque(maxlen=_WINDOW)
        self._by_length: dict[int, deque[tuple[int, float]]] = {}
        self._largest = 0
        self._count = 0
        self._step_s = 0.0
        self._token_s: dict[int, float] = {}

    def observe(self, tokens: int, attended: float, seconds: float) -> None:
        """A step computed `tokens`; `attended` is the number before each of them, summed up."""
        if tokens <= 0 or seconds <= 0:
            return
        before = attended / tokens
        if self.is_small(tokens):
            self._small_steps.append(seconds)
        elif _COMPARABLE * tokens >= min(before + tokens / 2, self._step_tokens):
            samples = self._by_length.setdefault(int(before).bit_length(), deque(maxlen=_WINDOW))
            samples.append((tokens, seconds))
            self._largest = max(self._largest, tokens)
            self._count += 1
        # Here and not when it is asked for: then a request waits for the answer.
        self._estimate()

    def is_small(self, tokens: int) -> bool:
        """Whether a step of so many tokens takes no longer than an empty one would."""
        return tokens <= max(1, self._step_tokens // _FEW)

    def knows(self, tokens: int) -> bool:
        """Whether steps of about the size that this many tokens take were seen."""
        is_seen = _COMPARABLE * self._largest >= min(tokens, self._step_tokens)
        return self._count >= ENOUGH and is_seen

    def seconds(self, computed: int, tokens: float) -> float:
        """To compute tokens that follow `computed` others."""
        if tokens <= 0 or not self._token_s:
            return 0.0
        total = self._step_s * tokens / self._step_tokens
        position, end = float(computed), computed + tokens
        while position < end:
            length = int(position).bit_length()
            stop = min(end, 2.0**length)
            nearest = min(self._token_s, key=lambda known: abs(known - length))
            total += (stop - position) * self._token_s[nearest]
            position = stop
        return total

    def tokens_per_s(self) -> float | None:
        """At the beginning of a prompt."""
        seconds = self.seconds(0, self._step_tokens)
        return self._step_tokens / seconds if seconds > 0 else None

    def _estimate(self) -> None:
        if self._small_steps:
            self._step_s = statistics.median(self._small_steps)
        else:
            # Steps of one size do not tell a cost of each step from one of each token. The former
            # is believed: a prefill that looks too cheap is computed, and measured once more.
            samples = itertools.chain.from_iterable(self._by_length.values())
            self._step_s = min((taken for _, taken in samples), default=0.0)
        self._token_s = {
            length: statistics.median(
                max(taken - self._step_s, taken / 10) / tokens for tokens, taken in samples
            )
            for length, samples in self._by_length.items()
        }


class CostModel:
    """Decides how much of a prompt is loaded. `connector.load_policy.LoadDecider` feeds it with
    measurements and asks it, in the scheduler's thread. `choose` changes nothing, since vLLM may
    ask many times before it admits a request; `settle` is called when it does."""

    def __init__(
        self,
        policy: LoadPolicy,
        bytes_per_token: float,
        alignment: int,
        step_tokens: int,
        longest_load_s: float,
        trusted: Collection[Tier] = (Tier.CPU,),
        computes_on_cpu: bool = False,
    ) -> None:
        """`alignment`: loads end at multiples of this many tokens. `longest_load_s`: a load from a
        daemon that takes longer is given up."""
        self._policy = policy
        self.bytes_per_token = bytes_per_token
        self._alignment = alignment
        self._longest_load_s = longest_load_s
        self.trusted = frozenset(trusted)
        self._computes_on_cpu = computes_on_cpu
        self.prefill = PrefillRate(step_tokens)
        places = (Tier.CPU, Tier.MEMORY, Tier.SSD, Tier.BACKING)
        self.speeds: dict[Tier, TierSpeed] = {place: TierSpeed() for place in places}
        self.loads: dict[str, float] = {}
        """Loads from slower tiers under way, and how long each is expected to take."""
        self.measured_at = float("-inf")  # when the last of them ended
        self._head_since = 0.0  # since when the first of them is being served
        self._blind = 0  # requests since a prefill taught something

    # ---- before a load --------------------------------------------------------------------------

    def choose(self, now: float, computed: int, spans: Sequence[Span]) -> Choice:
        """What to load of a prompt of which the GPU has `computed` tokens and tiers hold the
        `spans` that follow."""
        spans = tuple(span for span in spans if span.tokens > 0)
        held = sum(span.tokens for span in spans)
        if self._policy is not LoadPolicy.AUTO:
            return Choice(0 if self._policy is LoadPolicy.NEVER else held, spans)
        loaded = end = 0
        for number, span in enumerate(spans, 1):
            end += span.tokens
            stop = max(0, end - (computed + end) % self._alignment)
            if stop > loaded and self._pays(now, computed, loaded, stop, spans[:number]):
                loaded = stop
        return Choice(loaded, spans)

    def compute_seconds(self, computed: int, tokens: int) -> float | None:
        """None as long as no such prefill was seen."""
        known = self.prefill.knows(tokens)
        return self.prefill.seconds(computed, tokens) if known else None

    def load_seconds(self, now: float, tokens: int, spans: Sequence[Span]) -> float:
        """How long the first `tokens` of what tiers hold take to load, behind loads under way.
        Memory of this host counts as nothing."""
        service_s = self._service_s(tokens, spans)
        return self._waiting_s(now) + service_s if service_s else 0.0

    def is_known(self, place: Tier) -> bool:
        """Whether loads from there are judged by a speed that was measured or announced."""
        speed = self.speeds[place]
        return bool(speed.count) or speed.is_announced or place in self.trusted

    def _pays(
        self, now: float, computed: int, loaded: int, end: int, spans: Sequence[Span]
    ) -> bool:
        """Whether to load up to `end` rather than only up to `loaded`."""
        places = major_places(between(loaded, end, spans))
        if places <= self.trusted:
            return True
        load_s = self.load_seconds(now, end, spans)
        if load_s > self._longest_load_s:
            return False
        saved_s = self.compute_seconds(computed + loaded, end - loaded)
        if saved_s is None:
            # The first load is the probe: it measures a tier whose speed is at best announced. The
            # next requests compute, which measures the model; if that fails, all load. A CPU is
            # slower than assumed, so that nothing has to be computed to find out.
            if not self._computes_on_cpu and 0 < self._blind <= ENOUGH:
                return False
            saved_s = (end - loaded) / _ASSUMED_PREFILL
        elif not all(map(self.is_known, places)):
            return False  # the background probe measures it
        return load_s - self.load_seconds(now, loaded, spans) <= _MARGIN * saved_s

    # ---- a load and its end ---------------------------------------------------------------------

    def settle(self, name: str, now: float, choice: Choice) -> None:
        """The request was admitted with this choice; if it loads anything, `ended` will follow."""
        if self._policy is not LoadPolicy.AUTO:
            return
        if not major_places(choice.spans) <= self.trusted:
            self._blind += not self.prefill.knows(choice.held)
        service_s = self._service_s(choice.tokens, choice.spans)
        if service_s:
            self._head_since = self._head_since if self.loads else now
            self.loads[name] = service_s

    def ended(
        self,
        name: str,
        now: float,
        choice: Choice,
        seconds: Mapping[Tier, float],
        has_hung: bool = False,
    ) -> None:
        """The load of an admitted request is over; how long each tier worked on it, as far as that
        is known. `has_hung`: it was given up after that time."""
        if self.loads.pop(name, None) is not None:
            self._head_since = self.measured_at = now
        for tier, taken in seconds.items():
            # A daemon does not say how long each of its places took: the time is divided by what
            # was expected of them. Mapped memory takes next to none of it.
            amounts = self._amounts(choice.tokens, choice.spans, tier)
            least = _MINOR * sum(amounts.values())
            major = {place: nbytes for place, nbytes in amounts.items() if nbytes >= least}
            slower = {place: nbytes for place, nbytes in major.items() if place not in self.trusted}
            taught = slower or major
            expected = {place: self.speeds[place].seconds(taught[place]) for place in taught}
            total = sum(expected.values())
            for place, nbytes in taught.items():
                self.speeds[place].observe(nbytes, taken * expected[place] / total, has_hung)

    def step_ended(self, tokens: int, attended: float, seconds: float) -> None:
        """A step was computed, as at `PrefillRate.observe`."""
        self.prefill.observe(tokens, attended, seconds)
        if not self.prefill.is_small(tokens):
            self._blind = min(self._blind, 1)

    def _waiting_s(self, now: float) -> float:
        """Until a load that is asked for now would begin, first come, first served. A load that is
        late is expected to take as long again as it is late: the tier is stuck."""
        if not self.loads:
            return 0.0
        head_s = next(iter(self.loads.values()))
        return sum(self.loads.values()) - head_s + abs(head_s - (now - self._head_since))

    def _amounts(
        self, tokens: int, spans: Sequence[Span], tier: Tier | None = None
    ) -> dict[Tier, float]:
        """Bytes of the first `tokens` by their places, of one tier or all."""
        amounts: dict[Tier, float] = {}
        for span in between(0, tokens, spans):
            if tier in (None, span.tier):
                for place, share in span.sources().items():
                    nbytes = share * span.tokens * self.bytes_per_token
                    amounts[place] = amounts.get(place, 0.0) + nbytes
        return amounts

    def _service_s(self, tokens: int, spans: Sequence[Span]) -> float:
        """What slower tiers need for the first `tokens` if they do nothing else."""
        amounts = self._amounts(tokens, spans).items()
        slower = ((place, nbytes) for place, nbytes in amounts if place not in self.trusted)
        return sum(self.speeds[place].seconds(nbytes) for place, nbytes in slower)
