"""Load or recompute: estimates the cost of both and decides how much of a prompt to load.

If a tier is slower than the model, a hit takes longer than a miss. `TierSpeed` and `PrefillRate`
estimate the costs of loading and computing from medians of the last few measurements, and
`CostModel` loads what it expects to be faster. The cached blocks of a prompt form consecutive
spans, each in one tier, and a load takes a prefix of them. A span is loaded completely or not at
all: each of its bytes costs the same to load, while later tokens cost more to compute, so that a
load that does not pay to the end of a span pays even less to its middle.

Memory on this host (the CPU tier and a mapped daemon's memory) is trusted: blocks in it are always
loaded. Its copies run at bus speed. If they seem slow, they wait for the steps of a busy engine,
and computing instead would make it even busier.

While the prefill speed is not known, the end of a hit is computed, which measures it.

The module reads no clock: callers pass times and lengths.
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

_WINDOW = 5  # samples per median: it ignores two outliers, and follows a change after three samples
ENOUGH = _WINDOW // 2 + 1  # samples needed to trust a median: a single one may be a compilation
_MARGIN = 0.9  # largest load time as a share of compute time: load times are less certain
_MINOR = 0.1  # a place with a smaller share of a load is ignored
_ASSUMED_RATE = 0.5e9  # bytes per second of a tier without measurements: a slow SSD or network
_ASSUMED_PREFILL = 5_000.0  # tokens per second: about what the fastest CPUs compute
_SMALL_FRACTION = 256  # a step of 1/256 of the largest costs about as much as an empty step
_COMPARABLE = 4  # steps smaller than a quarter leave the GPU idle and say nothing about full steps


@dataclass(frozen=True)
class Span:
    """A run of tokens whose blocks are in one tier."""

    tier: Tier  # CPU or REMOTE
    tokens: int
    shares: Mapping[Tier, float] = field(default_factory=dict)
    """For REMOTE: the shares in the daemon's memory, on its SSD, and in its backing store."""

    def sources(self) -> Mapping[Tier, float]:
        """Returns the share of each place: the CPU tier, or one of the daemon's tiers."""
        if self.tier is Tier.REMOTE:
            return self.shares or {Tier.MEMORY: 1.0}
        return {self.tier: 1.0}


@dataclass(frozen=True)
class Choice:
    """The decision for a prompt: how many of the cached tokens, in these spans, are loaded."""

    tokens: int
    spans: tuple[Span, ...] = ()
    probed: range = range(0)
    """The cached tokens whose blocks a background probe fetches to measure a tier."""
    probed_place: Tier | None = None
    measured: int = 0
    """How many cached tokens after `tokens` are computed to measure the prefill speed."""

    @property
    def held(self) -> int:
        """The number of cached tokens."""
        return sum(span.tokens for span in self.spans)

    @property
    def decisions(self) -> dict[Tier, Decision]:
        """The decision for the blocks of each tier, for metrics."""
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
    """Returns the parts of the spans between these tokens."""
    parts: list[Span] = []
    begin = 0
    for span in spans:
        tokens = min(stop, begin + span.tokens) - max(start, begin)
        if tokens > 0:
            parts.append(dataclasses.replace(span, tokens=tokens))
        begin += span.tokens
    return parts


def major_places(spans: Sequence[Span]) -> set[Tier]:
    """Returns the places of these spans, without those with a minor share."""
    total = sum(span.tokens for span in spans)
    amounts: dict[Tier, float] = {}
    for span in spans:
        for place, share in span.sources().items():
            amounts[place] = amounts.get(place, 0.0) + share * span.tokens
    return {place for place, amount in amounts.items() if amount >= _MINOR * total}


class TierSpeed:
    """Estimates the time of a load from one place as latency + bytes / bandwidth. Both are medians
    over the last loads and probes; before the first one, the announced bandwidth counts."""

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
        """Bandwidth of the last few loads, latency included."""
        if not self._samples:
            return None
        return sum(size for size, _ in self._samples) / sum(taken for _, taken in self._samples)

    def observe(self, nbytes: float, seconds: float, has_hung: bool = False) -> None:
        """Adds a measurement. `has_hung`: the load timed out; earlier samples are discarded."""
        if nbytes <= 0 or seconds <= 0:
            return
        if has_hung:
            self._samples.clear()
        self._samples.append((nbytes, seconds))
        pairs = itertools.combinations(sorted(self._samples), 2)
        slopes = [
            (longer - shorter) / (larger - smaller)
            for (smaller, shorter), (larger, longer) in pairs
            if larger >= 2 * smaller  # closer sizes give a slope of noise
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
    """Estimates the time to compute tokens of a prompt as a cost per step and a cost per token that
    grows with the tokens before it. Both are medians over the last steps; the cost per token has
    one for each power of two of the tokens before."""

    def __init__(self, step_tokens: int) -> None:
        """`step_tokens`: the most tokens that a step computes."""
        self._step_tokens = step_tokens
        self._small_steps: deque[float] = deque(maxlen=_WINDOW)
        self._by_length: dict[int, deque[tuple[int, float]]] = {}
        self._largest = 0
        self._start: float | None = None  # the first position at which tokens were measured
        self._count = 0
        self._step_s = 0.0
        self._token_s: dict[int, float] = {}
        self._tokens_per_s: float | None = None

    def observe(self, tokens: int, attended: float, seconds: float) -> bool:
        """Adds a step that computed `tokens`; `attended` sums up the tokens before each of them.
        Returns whether more is known now: steps like earlier ones only make it more exact."""
        if tokens <= 0 or seconds <= 0:
            return False
        before = attended / tokens
        known = self._facts()
        if self.is_small(tokens):
            self._small_steps.append(seconds)
        elif _COMPARABLE * tokens >= min(before + tokens / 2, self._step_tokens):
            samples = self._by_length.setdefault(int(before).bit_length(), deque(maxlen=_WINDOW))
            samples.append((tokens, seconds))
            self._largest = max(self._largest, tokens)
            start = max(0.0, before - tokens / 2)
            self._start = start if self._start is None else min(self._start, start)
            self._count += 1
        # Here and not in `seconds`, for which a request waits.
        self._estimate()
        return self._facts() != known

    def _facts(self) -> tuple[int, int, float | None]:
        """What `knows` depends on."""
        return min(self._count, ENOUGH), self._largest, self._start

    def is_small(self, tokens: int) -> bool:
        """Whether a step of this many tokens costs about as much as an empty one."""
        return tokens <= max(1, self._step_tokens // _SMALL_FRACTION)

    def needs_small_steps(self) -> bool:
        return len(self._small_steps) < ENOUGH

    def comparable(self, end: int) -> int:
        """The fewest tokens before `end` that measure the model if one step computes them."""
        return -(-min(end, self._step_tokens) // _COMPARABLE)

    def knows(self, computed: int, tokens: int) -> bool:
        """Whether enough steps were measured, including one comparable to this many tokens and one
        that is not beyond their end."""
        is_seen = self._largest >= self.comparable(tokens)
        is_before = self._start is not None and self._start <= computed + tokens
        return self._count >= ENOUGH and is_seen and is_before

    def seconds(self, computed: int, tokens: float) -> float:
        """Estimates the time to compute tokens that follow `computed` others."""
        if tokens <= 0 or not self._token_s:
            return 0.0
        total = self._step_s * tokens / self._step_tokens
        position, end = float(computed), computed + tokens
        while position < end:
            length = int(position).bit_length()
            stop = min(end, 2.0**length)
            if self._start and position < self._start:
                stop = min(stop, self._start)
            nearest = min(self._token_s, key=lambda known: abs(known - length))
            token_s = self._token_s[nearest]
            if self._start and stop <= self._start:
                # Nothing so near to the start was measured. Between a cost that is the same
                # everywhere and one that grows with the position, assume the mean.
                token_s *= 0.5 + 0.25 * (position + stop) / self._start
            total += (stop - position) * token_s
            position = stop
        return total

    def tokens_per_s(self) -> float | None:
        """The rate at the start of a prompt; None if it is unknown."""
        return self._tokens_per_s

    def _estimate(self) -> None:
        if self._small_steps:
            self._step_s = statistics.median(self._small_steps)
        else:
            # Steps of one size do not separate the cost per step from the cost per token. Assume
            # the cost per step: a prefill that then looks too cheap is computed and measured again.
            samples = itertools.chain.from_iterable(self._by_length.values())
            self._step_s = min((taken for _, taken in samples), default=0.0)
        self._token_s = {
            length: statistics.median(
                max(taken - self._step_s, taken / 10) / tokens for tokens, taken in samples
            )
            for length, samples in self._by_length.items()
        }
        seconds = self.seconds(0, self._step_tokens)
        self._tokens_per_s = self._step_tokens / seconds if seconds > 0 else None


class CostModel:
    """Decides how much of a prompt to load. `connector.scheduler.load_policy.LoadDecider` calls it
    in the scheduler's thread, with measurements and for decisions. `choose` has no side effects,
    since vLLM may ask many times before it admits a request; `settle` follows the admission."""

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
        """`alignment`: loads end at multiples of this many tokens. `longest_load_s`: the timeout of
        loads from a daemon. `trusted`: places from which blocks are always loaded."""
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
        """Loads in flight from slower tiers, with the expected seconds of each."""
        self.measured_at = float("-inf")  # when the last of them ended
        self._head_since = 0.0  # when the tier started with the first of them
        self._tails = 0  # computed to measure the model, since a step last told more of it

    # ---- before a load --------------------------------------------------------------------------

    def choose(self, now: float, computed: int, spans: Sequence[Span]) -> Choice:
        """Decides how much to load of a prompt with `computed` tokens on the GPU, followed by the
        cached `spans`."""
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
        tail = self._measuring_tail(computed, loaded, spans)
        return Choice(loaded - tail, spans, measured=tail)

    def compute_seconds(self, computed: int, tokens: int) -> float | None:
        """Estimates the time to compute tokens; None while no comparable prefill was measured."""
        known = self.prefill.knows(computed, tokens)
        return self.prefill.seconds(computed, tokens) if known else None

    def expected_compute_seconds(self, computed: int, tokens: int) -> float:
        """The same, or what is assumed before. A first measurement may be too long, because it
        includes a compilation, but it is not too short."""
        known_s = self.compute_seconds(computed, tokens)
        if known_s is not None:
            return known_s
        assumed_s = tokens / _ASSUMED_PREFILL
        seen_s = 0.0 if self._computes_on_cpu else self.prefill.seconds(computed, tokens)
        return min(assumed_s, seen_s) if seen_s else assumed_s

    def load_seconds(self, now: float, tokens: int, spans: Sequence[Span]) -> float:
        """Estimates the time to load the first `tokens` of the spans, behind loads in flight.
        Trusted memory counts as free."""
        service_s = self._service_s(tokens, spans)
        return self._waiting_s(now) + service_s if service_s else 0.0

    def is_known(self, place: Tier) -> bool:
        """Whether the speed of a place is measured, announced or trusted."""
        speed = self.speeds[place]
        return bool(speed.count) or speed.is_announced or place in self.trusted

    def _pays(
        self, now: float, computed: int, loaded: int, end: int, spans: Sequence[Span]
    ) -> bool:
        """Whether to load up to `end` rather than up to `loaded`."""
        places = major_places(between(loaded, end, spans))
        if places <= self.trusted:
            return True
        load_s = self.load_seconds(now, end, spans)
        if load_s > self._longest_load_s:
            return False
        is_model_known = self.prefill.knows(computed + loaded, end - loaded)
        if is_model_known and not all(map(self.is_known, places)):
            return False  # a background probe measures the place
        saved_s = self.expected_compute_seconds(computed + loaded, end - loaded)
        return load_s - self.load_seconds(now, loaded, spans) <= _MARGIN * saved_s

    def _measuring_tail(self, computed: int, loaded: int, spans: Sequence[Span]) -> int:
        """How many of the tokens to load are computed instead, because the prefill speed is not
        known: the last ones, as few as measure it, and none if too many of these gave no
        measurement. A model on a CPU is slower than assumed, so that there is nothing to measure.
        """
        end = computed + loaded
        if self._computes_on_cpu or self._tails >= ENOUGH or self.prefill.knows(computed, loaded):
            return 0
        least = self.prefill.comparable(end)
        tail = -(-least // self._alignment) * self._alignment
        parts = between(loaded - tail, loaded, spans)
        if any(major_places([part]) <= self.trusted for part in parts):
            return 0
        return tail if 2 * tail <= loaded and not self.prefill.is_small(tail) else 0

    # ---- a load and its end ---------------------------------------------------------------------

    def settle(self, name: str, now: float, choice: Choice) -> None:
        """The request was admitted with this choice; if it loads anything, `ended` follows."""
        if self._policy is not LoadPolicy.AUTO:
            return
        self._tails += bool(choice.measured)
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
        """The load of an admitted request has ended. `seconds`: how long each tier worked on it, as
        far as that is known. `has_hung`: it timed out after that time."""
        if self.loads.pop(name, None) is not None:
            self._head_since = self.measured_at = now
        for tier, taken in seconds.items():
            # A daemon does not report the time of each of its places, so divide the time in
            # proportion to their estimates. Mapped memory takes almost none of it.
            amounts = self._amounts(choice.tokens, choice.spans, tier)
            least = _MINOR * sum(amounts.values())
            major = {place: nbytes for place, nbytes in amounts.items() if nbytes >= least}
            slower = {place: nbytes for place, nbytes in major.items() if place not in self.trusted}
            measured = slower or major
            expected = {place: self.speeds[place].seconds(measured[place]) for place in measured}
            total = sum(expected.values())
            for place, nbytes in measured.items():
                self.speeds[place].observe(nbytes, taken * expected[place] / total, has_hung)

    def step_ended(self, tokens: int, attended: float, seconds: float) -> None:
        """A step was computed; see `PrefillRate.observe`."""
        if self.prefill.observe(tokens, attended, seconds):
            self._tails = 0

    def _waiting_s(self, now: float) -> float:
        """Estimates the wait before a new load starts; loads are served in order. A late load is
        expected to need as much time again as it is late, because its tier is stuck."""
        if not self.loads:
            return 0.0
        head_s = next(iter(self.loads.values()))
        return sum(self.loads.values()) - head_s + abs(head_s - (now - self._head_since))

    def _amounts(
        self, tokens: int, spans: Sequence[Span], tier: Tier | None = None
    ) -> dict[Tier, float]:
        """Returns the bytes of the first `tokens` by place, of one tier or of all."""
        amounts: dict[Tier, float] = {}
        for span in between(0, tokens, spans):
            if tier in (None, span.tier):
                for place, share in span.sources().items():
                    nbytes = share * span.tokens * self.bytes_per_token
                    amounts[place] = amounts.get(place, 0.0) + nbytes
        return amounts

    def _service_s(self, tokens: int, spans: Sequence[Span]) -> float:
        """Estimates the time of slower tiers for the first `tokens`, without other loads."""
        amounts = self._amounts(tokens, spans).items()
        slower = ((place, nbytes) for place, nbytes in amounts if place not in self.trusted)
        return sum(self.speeds[place].seconds(nbytes) for place, nbytes in slower)
