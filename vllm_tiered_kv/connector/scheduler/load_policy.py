"""Measures tiers and model while they work, and asks `cache.cost_model` what to load.

Workers report how long a load took (`connector.load_times`). How long a prefill takes is measured
here, from the times at which vLLM schedules steps and hands their outputs back:

- With asynchronous scheduling vLLM plans a step while the one before it runs. A step begins when it
  was planned or when the output of the one before has come, whichever is later.
- An output does not say which step it belongs to, and a step without a forward may have none.
  So a step that is measured gets a number, which the workers send back with its output.
- Only steps without loads are measured, if prompt tokens are the bulk of them. A few decodes add
  little. Now and then a step that only decodes is measured too: it shows what every step costs.
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

from vllm_tiered_kv.cache.background_probes import BackgroundProbes
from vllm_tiered_kv.cache.cost_model import Choice, CostModel, Span, between, major_places
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.planner import Group, telling_group
from vllm_tiered_kv.config import LoadPolicy, TieredKVConfig
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Fetched
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

_PREFILL_SHARE = 0.8  # of a step's tokens: with more decodes it does not measure a prefill
_MAX_WAIT_SHARE = 0.03  # of its prefill, a request waits for any answer: within the goal of 1.05
_LOG_INTERVAL_S = 60.0  # between two log lines about cached tokens that are computed
_RECENT = 16  # answers that count, and steps whose numbers are remembered; one in so many small
# steps is measured, as a number costs a message back


@dataclass
class _Load:
    choice: Choice
    begun_at: float
    seconds: dict[Tier, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    tokens: int
    attended: float
    planned_at: float


class LoadDecider:
    """Says how much of a request is loaded, and how long it waits for daemons to answer. The
    scheduler half creates it, reports to it and asks it, all in the scheduler's thread."""

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
        self._group = telling_group(groups)
        self._index = index
        self._recorder = recorder
        self._clock = clock
        self._load_timeout_s = config.remote_load_timeout
        self._lookup_timeout_s = config.remote_lookup_timeout
        self._are_daemons_local = all(address.startswith("ipc://") for address in config.remote)
        self.costs = CostModel(
            config.load_policy,
            _bytes_per_token(groups),
            math.lcm(*(group.block_size for group in groups)),
            step_tokens,
            config.remote_load_timeout,
            (Tier.CPU, Tier.MEMORY) if self._are_daemons_local else (Tier.CPU,),
            computes_on_cpu,
        )
        self.probes = BackgroundProbes(self.costs)
        self.answers: deque[tuple[int, int]] = deque()
        """Blocks that daemons were asked for and had, one pair for each new answer."""
        self._recent_answers: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self.read_speeds: Mapping[Tier, float] = {}
        """What daemons on this host announce of their slower tiers, in bytes per second."""
        self._last_remote_shares: Mapping[Tier, float] = {}
        self._logged_at = -math.inf
        self._unlogged = 0  # requests since then
        self._num_ranks = num_ranks
        self._loads: dict[str, _Load] = {}
        self._probed: tuple[str, list[Fetched]] = "", []  # by the ranks that have ended
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
        """Whether a request should go on waiting for what daemons have to say about it: for as long
        as an answer is expected to save, by what the last answers were worth."""
        lookup = state.remote
        tokens = state.request.num_tokens - computed
        compute_s = self.costs.compute_seconds(computed, tokens)
        if self._policy is not LoadPolicy.AUTO or lookup is None or compute_s is None:
            return True
        while self.answers:
            self._recent_answers.append(self.answers.popleft())
        asked = sum(asked for asked, _ in self._recent_answers)
        found = sum(found for _, found in self._recent_answers)
        now = self._clock()
        span = Span(Tier.REMOTE, tokens, self._last_remote_shares)
        saved_s = compute_s - self.costs.load_seconds(now, tokens, [span])
        worth_s = saved_s * (found / asked if asked else 1.0)
        waited_s = now - (lookup.deadline - self._lookup_timeout_s)
        return waited_s < max(worth_s, _MAX_WAIT_SHARE * compute_s)

    def choose(
        self, state: RequestState, computed: int, held: int, elsewhere: Sequence[range] | None
    ) -> Choice:
        """How much to load of the `held` tokens after `computed`. Changes nothing."""
        if self._are_daemons_local:  # over a network it would say nothing about the way
            for tier, rate in list(self.read_speeds.items()):
                self.costs.speeds[tier].announce(rate)
        spans = self._spans(state, computed, held, elsewhere)
        now = self._clock()
        choice = self.costs.choose(now, computed, spans)
        return self.probes.added(now, choice) if self._policy is LoadPolicy.AUTO else choice

    def admitted(self, request_id: str, choice: Choice, tokens: int, is_timed: bool) -> range:
        """vLLM has taken the answer, or less of it. `is_timed`: `load_ended` will follow. Returns
        the tokens to be probed, counted from those that are computed already."""
        if choice.tokens and not tokens:
            return range(0)  # vLLM did not take the offer
        if tokens != choice.tokens:
            choice = dataclasses.replace(choice, tokens=tokens)
        now = self._clock()
        self._last_remote_shares = next(
            (span.shares for span in choice.spans if span.tier is Tier.REMOTE), self._last_remote_shares
        )
        for tier, decision in choice.decisions.items():
            self._recorder.add(names.LOAD_DECISIONS, 1, tier.value, decision.value)
        if self._policy is LoadPolicy.AUTO and tokens < choice.held:
            self._log_recompute(request_id, now, choice)
        self.costs.settle(request_id, now, choice)
        self.probes.begin(request_id, now, choice)
        if tokens and is_timed:
            self._loads[request_id] = _Load(choice, now)
        elif tokens:
            self.costs.ended(request_id, now, choice, {})
        return choice.probed

    def _log_recompute(self, request_id: str, now: float, choice: Choice) -> None:
        """Whoever wonders why what is held was not loaded finds the reason in the log."""
        self._unlogged += 1
        if now < self._logged_at + _LOG_INTERVAL_S:
            return
        rest = between(choice.tokens, choice.held, choice.spans)
        places = major_places(rest)
        tokens = choice.held - choice.tokens
        compute_s = self.costs.compute_seconds(0, tokens)
        if not all(map(self.costs.is_known, places)):
            why = "the speed of loads from there is not known yet"
        elif compute_s is None:
            why = "the speed of prefills is not known yet"
        else:
            load_s = self.costs.load_seconds(now, tokens, rest)
            why = f"loading would take about {load_s:.3f} s, computing {compute_s:.3f} s"
        logger.info(
            "request %s computes %d tokens that are cached (%s): %s (%d such requests since the "
            'last such line; "load_policy": "always" would load them)',
            request_id,
            tokens,
            ", ".join(sorted(place.value for place in places)),
            why,
            self._unlogged,
        )
        self._logged_at, self._unlogged = now, 0

    def bytes_of(self, tokens: range) -> int:
        """What so many tokens of a request are, without windows."""
        return round(len(tokens) * self.costs.bytes_per_token)

    # ---- loads and probes -----------------------------------------------------------------------

    def probes_ended(self, ended: Mapping[str, Sequence[Fetched]]) -> None:
        """What ranks probed has come; the slowest rank counts, and so does one that failed."""
        for name, reports in ended.items():
            of_ranks = [*(self._probed[1] if name == self._probed[0] else ()), *reports]
            self._probed = name, of_ranks
            if len(of_ranks) >= self._num_ranks:
                self._probed = "", []  # a request that starts over may have another one
                slowest = min(of_ranks, key=lambda fetched: fetched.bytes_per_s)
                self.probes.end(name, self._clock(), slowest.nbytes, slowest.seconds)

    def record_load_times(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Ranks have said how long parts of loads took; the slowest rank counts."""
        for request_id, by_tier in seconds.items():
            if request_id in self._loads:
                known = self._loads[request_id].seconds
                for name, taken in by_tier.items():
                    known[Tier(name)] = max(known.get(Tier(name), 0.0), taken)

    def load_ended(self, request_id: str, failed: Tier | None) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        now = self._clock()
        elapsed = now - load.begun_at
        # A load that was given up shows that the tier hangs, one that was refused shows nothing.
        has_hung = failed is Tier.REMOTE and elapsed > self._load_timeout_s / 2
        failure = {Tier.REMOTE: elapsed} if has_hung else {}
        seconds = load.seconds if failed is None else failure
        self.costs.ended(request_id, now, load.choice, seconds, has_hung)

    # ---- a step ---------------------------------------------------------------------------------

    def step_planned(
        self, scheduled: Mapping[str, int], states: Mapping[str, RequestState], has_loads: bool
    ) -> int | None:
        """The number of a step that is measured."""
        if not scheduled or self._policy is not LoadPolicy.AUTO or has_loads:
            return None
        self._forwards += 1
        tokens, attended = 0, 0.0
        for request_id, count in scheduled.items():
            state = states.get(request_id) if count > 1 else None
            if state is not None:
                computed = state.request.num_computed_tokens
                if computed + 1 < state.request.num_tokens:
                    tokens += count
                    attended += count * (computed + count / 2)
        total = sum(scheduled.values())
        if self.costs.prefill.is_small(total):
            if self._forwards % _RECENT:
                return None
            tokens = total
        elif tokens < _PREFILL_SHARE * total:
            return None
        self._next_step += 1
        self._steps[self._next_step] = _Step(tokens, attended, self._clock())
        if len(self._steps) > _RECENT:
            del self._steps[next(iter(self._steps))]
        return self._next_step

    def output_received(self, number: int | None) -> None:
        """vLLM hands back the output of a step; its number, if it has one."""
        now = self._clock()
        step = self._steps.pop(number, None) if number is not None else None
        if step is not None:
            seconds = now - max(step.planned_at, self._output_at)
            self.costs.step_ended(step.tokens, step.attended, seconds)
        self._output_at = now

    def record(self) -> None:
        """Puts the estimates into the metrics."""
        for tier, speed in self.costs.speeds.items():
            recent = speed.recent_bytes_per_s
            if recent is not None:
                self._recorder.set(names.LOAD_SPEED, round(recent), tier.value)
        prefill = self.costs.prefill.tokens_per_s()
        if prefill is not None:
            self._recorder.set(names.PREFILL_SPEED, round(prefill))

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
        keys = state.loadable_keys[self._group.group_id]
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
