"""Measures the tiers and the model while they work, and asks `cache.load_economics` what pays.

How long a load took is said by the workers (`connector.load_times`). How long a prefill takes is
seen here, from the times at which vLLM schedules steps and hands their outputs back:

- With asynchronous scheduling a step is planned while the one before it runs. It begins when it was
  planned or when the output of the one before has come, whichever is later.
- An output does not say which step it belongs to, and a step without a forward may have none.
  So a step that is worth measuring is given a number, which the workers send back with its output.
- Worth measuring are steps of which prompt tokens are the bulk, without loads in them. What few
  decodes share such a step adds little to it. Now and then one that only decodes a few tokens is
  measured too: it tells what a step costs that computes next to nothing.
- Stages of a pipeline overlap: there this measures the pace of steps, not how long one takes. The
  prefill of a prompt in several steps takes about as long as that.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.load_choice import Choice, Span, between, major_sources
from vllm_tiered_kv.cache.load_economics import LoadEconomics
from vllm_tiered_kv.cache.planner import Group, telling_group
from vllm_tiered_kv.config import LoadPolicy, TieredKVConfig
from vllm_tiered_kv.connector.request_state import RequestState
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Fetched
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

_PREFILL_SHARE = 0.8  # of a step's tokens, for it to tell how long a prefill takes
_FEW_DECODES = 32  # tokens of a step that tells what a step costs,
_DECODES_EVERY = 4  # one in this many
_LEAST_PREFILL = 128  # tokens of it: the end of a prompt that was found takes no time to speak of
_PATIENCE = 0.03  # of its prefill: what a request may wait for an answer that is worth nothing
_BLIND_PATIENCE_S = 0.003  # the same while nobody knows how long a prefill takes
_MOST_GONE_ON = 4  # requests that go on so; then prefills teach nothing
_HIT_RATE_WEIGHT = 0.1
_CPU_PREFILL = 5_000.0  # tokens per second: about what the fastest engines on CPUs compute
_TELL_S = 60.0  # between two lines about what is computed though it is held
_MOST_MEASURED = 16  # steps under way; one whose number never comes back is forgotten


@dataclass
class _Load:
    choice: Choice
    begun_at: float
    forwards: int  # steps with a forward that were planned before it
    seconds: dict[Tier, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    tokens: int  # of prompts; none: a step that only decodes
    attended: float
    planned_at: float


class LoadOrRecompute:
    def __init__(
        self,
        config: TieredKVConfig,
        groups: Sequence[Group],
        index: BlockIndex,
        recorder: Recorder,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
        computes_on_cpu: bool = False,
    ) -> None:
        """`step_tokens`: the most tokens vLLM computes in a step. `num_ranks`: that report."""
        self._policy = config.load_policy
        self._least_prefill = min(_LEAST_PREFILL, step_tokens // 8)
        self._group = telling_group(groups)
        self._index = index
        self._recorder = recorder
        self._clock = clock
        self._timeout_s = config.remote_load_timeout
        self._is_mapped = all(address.startswith("ipc://") for address in config.remote)
        self._bytes_per_token = _bytes_per_token(groups)
        self.economics = LoadEconomics(
            config.load_policy,
            self._bytes_per_token,
            math.lcm(*(group.block_size for group in groups)),
            step_tokens,
            config.remote_load_timeout,
            (Tier.CPU, Tier.MEMORY) if self._is_mapped else (Tier.CPU,),
            # A GPU may be faster than any disk; there a few prefills come first, which teach.
            _CPU_PREFILL if computes_on_cpu else math.inf,
        )
        self._lookup_s = config.remote_lookup_timeout
        self.answers: deque[tuple[int, int]] = deque()
        """Blocks that daemons were asked for and had, one pair for each answer."""
        self.read_speeds: Mapping[Tier, float] = {}
        """What daemons on this host say about their slower tiers, in bytes per second."""
        self._told_at = -math.inf
        self._untold = 0  # requests since then
        self._gone_on: set[str] = set()  # requests that went on without an answer, blindly
        self._hit_rate = 1.0
        self._usual_shares: Mapping[Tier, float] = {}
        self._num_ranks = num_ranks
        self._loads: dict[str, _Load] = {}
        self._rehearsed: tuple[str, list[Fetched]] = "", []  # by the ranks that have ended
        self._steps: dict[int, _Step] = {}
        self._next_step = 0
        self._forwards = 0
        self._output_at = 0.0

    # ---- a request ------------------------------------------------------------------------------

    @property
    def may_load(self) -> bool:
        """False: nothing is ever loaded, so that nobody has to wait or to be asked."""
        return self._policy is not LoadPolicy.NEVER

    def waits_for_daemons(self, state: RequestState, computed: int) -> bool:
        """Whether a request should go on waiting for what daemons have to say about it.

        For as long as an answer is expected to save, by what answers were worth lately. They are
        all counted, also those nobody has waited for.
        """
        lookup = state.remote
        tokens = state.request.num_tokens - computed
        if self._policy is not LoadPolicy.AUTO or lookup is None:
            return True
        waited_s = self._clock() - (lookup.deadline - self._lookup_s)
        alone_s = self.economics.recompute_seconds(computed, tokens)
        if alone_s is None:
            # Of daemons over a network nothing is loaded before a prefill was seen, if one ever is.
            name = state.request.request_id
            is_patient = self._is_mapped or self.economics.loads_blindly
            is_patient |= len(self._gone_on) >= _MOST_GONE_ON and name not in self._gone_on
            if is_patient or waited_s < _BLIND_PATIENCE_S:
                return True
            self._gone_on.add(name)
            return False
        while self.answers:
            asked, found = self.answers.popleft()
            self._hit_rate += _HIT_RATE_WEIGHT * (found / max(asked, 1) - self._hit_rate)
        now = self._clock()
        span = Span(Tier.REMOTE, tokens, self._usual_shares)
        saved_s = self._hit_rate * (alone_s - self.economics.seconds(now, tokens, [span]))
        return waited_s < max(saved_s, _PATIENCE * alone_s)

    def choose(
        self, state: RequestState, computed: int, held: int, elsewhere: Sequence[range] | None
    ) -> Choice:
        """How much to load of the `held` tokens after `computed`. Changes nothing."""
        spans = self._spans(state, computed, held, elsewhere)
        if self._is_mapped:
            for tier, rate in list(self.read_speeds.items()):
                self.economics.speeds[tier].told(rate)
        return self.economics.choose(self._clock(), computed, state.request.num_tokens, spans)

    def admitted(self, request_id: str, choice: Choice, tokens: int, is_timed: bool) -> range:
        """vLLM has taken the answer, or less of it. `is_timed`: the end of the load is told.
        Returns the tokens to be fetched for nobody, after those that are computed already."""
        if choice.tokens and not tokens:
            return range(0)  # vLLM did not take the offer
        if tokens != choice.tokens:
            choice = dataclasses.replace(choice, tokens=tokens)
        now = self._clock()
        self._usual_shares = next(
            (span.shares for span in choice.spans if span.tier is Tier.REMOTE), self._usual_shares
        )
        for tier, decision in choice.decisions.items():
            self._recorder.add(names.LOAD_DECISIONS, 1, tier.value, decision.value)
        if self._policy is LoadPolicy.AUTO and tokens < choice.held:
            self._tell_computed(request_id, now, choice)
        self.economics.settle(request_id, now, choice)
        if tokens and is_timed:
            self._loads[request_id] = _Load(choice, now, self._forwards)
        elif tokens:
            self.economics.ended(request_id, now, choice, {})
        return choice.rehearsed

    def _tell_computed(self, request_id: str, now: float, choice: Choice) -> None:
        """Whoever wonders why what is held was not loaded finds the reason in the log."""
        self._untold += 1
        if now < self._told_at + _TELL_S:
            return
        rest = between(choice.tokens, choice.held, choice.spans)
        places = sorted(place.value for place in major_sources(rest))
        tokens = choice.held - choice.tokens
        compute_s = self.economics.recompute_seconds(0, tokens)
        if not all(self.economics.knows_speed(place) for place in major_sources(rest)):
            why = "the speed of loads from there is not known yet"
        elif compute_s is None:
            why = "the speed of prefills is not known yet"
        else:
            load_s = self.economics.seconds(now, tokens, rest)
            why = f"loading would take about {load_s:.3f} s, computing {compute_s:.3f} s"
        logger.info(
            "request %s computes %d tokens that are cached (%s): %s (%d such requests since the "
            'last such line; "load_policy": "always" would load them)',
            request_id,
            tokens,
            ", ".join(places),
            why,
            self._untold,
        )
        self._told_at, self._untold = now, 0

    def bytes_of(self, tokens: range) -> int:
        """What so many tokens of a request are, without windows."""
        return round(len(tokens) * self._bytes_per_token)

    def rehearsed(self, ended: Mapping[str, Sequence[Fetched]]) -> None:
        """What ranks fetched for nobody has come; the slowest counts, and so does a failure."""
        for name, reports in ended.items():
            if name != self._rehearsed[0]:
                self._rehearsed = name, []
            of_ranks = self._rehearsed[1]
            of_ranks += reports
            if len(of_ranks) >= self._num_ranks:
                self._rehearsed = "", []  # a request that starts over may have another one
                slowest = min(of_ranks, key=lambda fetched: fetched.bytes_per_s)
                now = self._clock()
                self.economics.rehearsed(name, now, slowest.nbytes, slowest.seconds)

    def loads_took(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Ranks have said how long parts of loads took; the slowest rank counts."""
        for request_id, by_tier in seconds.items():
            load = self._loads.get(request_id)
            if load is None:
                continue
            for name, taken in by_tier.items():
                tier = Tier(name)
                load.seconds[tier] = max(load.seconds.get(tier, 0.0), taken)

    def load_ended(self, request_id: str, failed: Tier | None) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        now = self._clock()
        elapsed = now - load.begun_at
        if failed is None:
            seconds = load.seconds
            if seconds and self._forwards == load.forwards:
                self.economics.handover.observe(max(0.0, elapsed - max(seconds.values())))
        else:
            # One that was given up tells that the tier is slow, one that is gone tells nothing.
            is_late = failed is Tier.REMOTE and elapsed > self._timeout_s / 2
            seconds = {Tier.REMOTE: elapsed} if is_late else {}
        self.economics.ended(request_id, now, load.choice, seconds)

    # ---- a step ---------------------------------------------------------------------------------

    def step_planned(
        self, scheduled: Mapping[str, int], states: Mapping[str, RequestState], has_loads: bool
    ) -> int | None:
        """The number of a step that is worth measuring."""
        if not scheduled:
            return None
        self._forwards += 1
        if self._policy is not LoadPolicy.AUTO or has_loads:
            return None
        total = sum(scheduled.values())
        if total < 2 * len(scheduled):
            is_small = total <= _FEW_DECODES and self._forwards % _DECODES_EVERY == 0
            return self._measured(0, 0.0) if is_small else None
        tokens, attended = 0, 0.0
        for request_id, count in scheduled.items():
            state = states.get(request_id) if count > 1 else None
            if state is None:
                continue
            computed = state.request.num_computed_tokens
            if computed + 1 < state.request.num_tokens:
                tokens += count
                attended += count * (computed + count / 2)
        if tokens < max(_PREFILL_SHARE * total, self._least_prefill):
            return None
        return self._measured(tokens, attended)

    def _measured(self, tokens: int, attended: float) -> int:
        self._next_step += 1
        self._steps[self._next_step] = _Step(tokens, attended, self._clock())
        if len(self._steps) > _MOST_MEASURED:
            del self._steps[next(iter(self._steps))]
        return self._next_step

    def output_came(self, number: int | None) -> None:
        """vLLM hands back the output of a step; its number, if it has one."""
        now = self._clock()
        step = self._steps.pop(number, None) if number is not None else None
        if step is not None:
            seconds = now - max(step.planned_at, self._output_at)
            if step.tokens:
                self.economics.prefill.observe(step.tokens, step.attended, seconds)
            else:
                self.economics.prefill.observe_least(seconds)
        self._output_at = now

    def record(self) -> None:
        """Puts the estimates into the metrics."""
        for tier, speed in self.economics.speeds.items():
            recent = speed.recent_bytes_per_s
            if recent is not None:
                self._recorder.set(names.LOAD_SPEED, round(recent), tier.value)
        prefill = self.economics.prefill.tokens_per_s()
        if prefill is not None:
            self._recorder.set(names.PREFILL_SPEED, round(prefill))

    # ---- inside ---------------------------------------------------------------------------------

    def _spans(
        self, state: RequestState, computed: int, held: int, elsewhere: Sequence[range] | None
    ) -> list[Span]:
        answer = state.remote.answer if state.remote is not None else None
        remote = elsewhere[self._group.group_id] if elsewhere is not None else range(0)
        if not remote or answer is None:
            return [Span(Tier.CPU, held)]
        if self._group.window is not None:
            # Its blocks are those of the window alone, and stand for all tokens before them.
            parts = answer.spans[self._group.group_id]
            return [Span(Tier.REMOTE, held, parts[-1].shares())]
        size = self._group.block_size
        first, stop = computed // size, (computed + held) // size
        keys = state.sought[self._group.group_id]
        position = first + self._index.match_prefix(keys, first, stop)
        spans = [Span(Tier.CPU, (position - first) * size)]
        for part in answer.spans[self._group.group_id]:
            end = min(part.stop, stop)
            if end > position:
                spans.append(Span(Tier.REMOTE, (end - position) * size, part.shares()))
                position = end
        spans.append(Span(Tier.CPU, (stop - position) * size))
        return [span for span in spans if span.tokens]


def _bytes_per_token(groups: Sequence[Group]) -> float:
    """What a longer load adds. A window's blocks do not: they count as part of its latency."""
    full = [group for group in groups if group.window is None]
    return sum(group.block_bytes / group.block_size for group in full or groups)
