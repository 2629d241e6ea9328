"""Feeds the cost model (`cache.cost_model`) with measurements and asks it what to load.

Workers report the duration of loads. This module measures the duration of prefills, from the times
at which vLLM plans steps and returns their outputs:

- With asynchronous scheduling vLLM plans a step while the previous one runs. A step starts when it
  is planned or when the previous output arrives, whichever is later.
- An output does not identify its step, and a step without a forward may have no output. So each
  measured step gets a number, which the workers return with its output.
- Only steps without loads are measured, and only if most of their tokens are prompt tokens. A few
  decodes add little. Some decode-only steps are measured too: they show the fixed cost of a step.
- Pipeline stages overlap. With a pipeline this measures the interval between steps, not their
  duration, which is about right for a prompt that is prefilled in several steps.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_tiered_kv.cache.background_probes import BackgroundProbes
from vllm_tiered_kv.cache.cost_model import Choice, CostModel, Span, between, major_places
from vllm_tiered_kv.cache.planner import Group, representative_group
from vllm_tiered_kv.config import LoadPolicy, TieredKVConfig
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import Fetched
from vllm_tiered_kv.metrics import names

logger = logging.getLogger(__name__)

_PREFILL_SHARE = 0.8  # minimum share of prompt tokens in a step that measures prefills
_MAX_WAIT_SHARE = 0.03  # a request always waits this share of its prefill time for daemons
_LOG_INTERVAL_S = 60.0  # between two log lines about cached tokens that are recomputed
_RECENT = 16
"""Number of recent daemon answers that count, and of measured steps that are remembered. One in so
many small steps is measured, because each number costs a message from the workers."""


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
    """Decides how much of a request is loaded, and how long it waits for daemon answers. The load
    planner and the scheduler half call it, in the scheduler's thread."""

    def __init__(
        self,
        config: TieredKVConfig,
        tier: CpuTier,
        engine: EngineFacts,
        lookups: RemoteLookups | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = config.load_policy
        self._group = representative_group(tier.groups)
        self._tier = tier
        self._recorder = tier.recorder
        self._clock = clock
        self._load_timeout_s = config.remote_load_timeout
        self._lookup_timeout_s = config.remote_lookup_timeout
        self._are_daemons_local = all(address.startswith("ipc://") for address in config.remote)
        self.costs = CostModel(
            config.load_policy,
            _bytes_per_token(tier.groups),
            tier.alignment,
            engine.step_tokens,
            config.remote_load_timeout,
            (Tier.CPU, Tier.MEMORY) if self._are_daemons_local else (Tier.CPU,),
            engine.computes_on_cpu,
        )
        self.probes = BackgroundProbes(self.costs)
        self._answers = lookups.answers if lookups is not None else deque()
        """One pair per new daemon answer: blocks asked for and blocks found."""
        self._recent_answers: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._read_speeds = lookups.read_speeds if lookups is not None else {}
        """Read speeds of their slower tiers that daemons on this host report, in bytes per
        second."""
        self._last_remote_shares: Mapping[Tier, float] = {}
        self._logged_at = -math.inf
        self._unlogged = 0  # requests that recompute cached tokens, since the last log line
        self._num_ranks = engine.num_ranks
        self._loads: dict[str, _Load] = {}
        self._probed: tuple[str, list[Fetched]] = "", []  # reports of ranks whose part has ended
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._next_step = 0
        self._forwards = 0
        self._output_at = 0.0

    # ---- a request ------------------------------------------------------------------------------

    @property
    def may_load(self) -> bool:
        """False if the policy forbids loads, so that no lookup and no wait is needed."""
        return self._policy is not LoadPolicy.NEVER

    def waits_for_daemons(self, state: RequestState, computed: int) -> bool:
        """Whether a request should keep waiting for its daemon lookup. It waits as long as the
        answer is expected to save, judged by the hit rate of recent answers."""
        lookup = state.remote.lookup
        tokens = state.request.num_tokens - computed
        compute_s = self.costs.compute_seconds(computed, tokens)
        if self._policy is not LoadPolicy.AUTO or lookup is None or compute_s is None:
            return True
        while self._answers:
            self._recent_answers.append(self._answers.popleft())
        asked = sum(asked for asked, _ in self._recent_answers)
        found = sum(found for _, found in self._recent_answers)
        now = self._clock()
        span = Span(Tier.REMOTE, tokens, self._last_remote_shares)
        saved_s = compute_s - self.costs.load_seconds(now, tokens, [span])
        worth_s = saved_s * (found / asked if asked else 1.0)
        waited_s = now - (lookup.deadline - self._lookup_timeout_s)
        return waited_s < max(worth_s, _MAX_WAIT_SHARE * compute_s)

    def choose(
        self, state: RequestState, computed: int, held: int, daemon_ranges: Sequence[range] | None
    ) -> Choice:
        """How many of the `held` tokens after `computed` to load. Has no side effects on requests,
        because vLLM may ask again."""
        if self._are_daemons_local:  # the daemon's read speed does not include a network
            for tier, rate in list(self._read_speeds.items()):
                self.costs.speeds[tier].announce(rate)
        spans = self._spans(state, computed, held, daemon_ranges)
        now = self._clock()
        choice = self.costs.choose(now, computed, spans)
        return self.probes.added(now, choice) if self._policy is LoadPolicy.AUTO else choice

    def admitted(self, request_id: str, choice: Choice, tokens: int, is_timed: bool) -> range:
        """vLLM has admitted the request with `tokens` loaded tokens, which may be fewer than
        offered. `is_timed`: `load_ended` will follow. Returns the tokens to probe, counted from the
        first token that is not computed yet."""
        if choice.tokens and not tokens:
            return range(0)  # vLLM declined the load
        if tokens != choice.tokens:
            choice = dataclasses.replace(choice, tokens=tokens)
        now = self._clock()
        self._last_remote_shares = next(
            (span.shares for span in choice.spans if span.tier is Tier.REMOTE),
            self._last_remote_shares,
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
        """Logs why cached tokens are recomputed, once per interval."""
        self._unlogged += 1
        if now < self._logged_at + _LOG_INTERVAL_S:
            return
        rest = between(choice.tokens, choice.held, choice.spans)
        places = major_places(rest)
        tokens = choice.held - choice.tokens
        if choice.measured:
            why = "they measure the prefill speed, which is not known yet"
        elif not all(map(self.costs.is_known, places)):
            why = "the load speed of this tier is not known yet"
        else:
            load_s = self.costs.load_seconds(now, tokens, rest)
            compute_s = self.costs.expected_compute_seconds(0, tokens)
            why = f"loading would take about {load_s:.3f} s, computing {compute_s:.3f} s"
        logger.info(
            "request %s recomputes %d cached tokens (%s): %s (%d such requests since the last "
            'message; set "load_policy": "always" to load them)',
            request_id,
            tokens,
            ", ".join(sorted(place.value for place in places)),
            why,
            self._unlogged,
        )
        self._logged_at, self._unlogged = now, 0

    def bytes_of(self, tokens: range) -> int:
        """The size of these tokens' blocks in groups with full attention."""
        return round(len(tokens) * self.costs.bytes_per_token)

    # ---- loads and probes -----------------------------------------------------------------------

    def probes_ended(self, ended: Mapping[str, Sequence[Fetched]]) -> None:
        """Records probes that ended. The slowest rank counts, a failed one included."""
        for name, reports in ended.items():
            of_ranks = [*(self._probed[1] if name == self._probed[0] else ()), *reports]
            self._probed = name, of_ranks
            if len(of_ranks) >= self._num_ranks:
                self._probed = "", []  # the same request may be probed again after a restart
                slowest = min(of_ranks, key=lambda fetched: fetched.bytes_per_s)
                self.probes.end(name, self._clock(), slowest.nbytes, slowest.seconds)

    def record_load_times(self, seconds: Mapping[str, Mapping[str, float]]) -> None:
        """Records how long ranks took for the parts of their loads. The slowest rank counts."""
        for request_id, by_tier in seconds.items():
            if request_id in self._loads:
                known = self._loads[request_id].seconds
                for name, taken in by_tier.items():
                    known[Tier(name)] = max(known.get(Tier(name), 0.0), taken)

    def load_ended(self, request_id: str, failed: Tier | None) -> None:
        """Records an asynchronous load that has ended; `failed` is the tier that failed, if any."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        now = self._clock()
        elapsed = now - load.begun_at
        # A load that timed out shows that the tier hangs. A load that was refused shows nothing.
        has_hung = failed is Tier.REMOTE and elapsed > self._load_timeout_s / 2
        failure = {Tier.REMOTE: elapsed} if has_hung else {}
        seconds = load.seconds if failed is None else failure
        self.costs.ended(request_id, now, load.choice, seconds, has_hung)

    # ---- a step ---------------------------------------------------------------------------------

    def step_planned(
        self, scheduled: Mapping[str, int], states: Mapping[str, RequestState], has_loads: bool
    ) -> int | None:
        """Returns the number of this step if it is measured, otherwise None."""
        if not scheduled or self._policy is not LoadPolicy.AUTO or has_loads:
            return None
        self._forwards += 1
        total = sum(scheduled.values())
        is_small = self.costs.prefill.is_small(total)
        if is_small and self._forwards % _RECENT and not self.costs.prefill.needs_small_steps():
            return None
        tokens, attended = 0, 0.0
        for request_id, count in scheduled.items():
            state = states.get(request_id) if count > 1 else None
            if state is not None:
                computed = state.request.num_computed_tokens
                if computed + 1 < state.request.num_tokens:
                    tokens += count
                    attended += count * (computed + count / 2)
        if is_small:
            tokens = total
        elif tokens < _PREFILL_SHARE * total:
            return None
        self._next_step += 1
        self._steps[self._next_step] = _Step(tokens, attended, self._clock())
        if len(self._steps) > _RECENT:
            self._steps.popitem(last=False)
        return self._next_step

    def output_received(self, number: int | None) -> None:
        """vLLM has returned the output of a step; `number` is None if it is not measured."""
        now = self._clock()
        step = self._steps.pop(number, None) if number is not None else None
        if step is not None:
            seconds = now - max(step.planned_at, self._output_at)
            self.costs.step_ended(step.tokens, step.attended, seconds)
        self._output_at = now

    def record(self) -> None:
        """Writes the speed estimates to the metrics."""
        for tier, speed in self.costs.speeds.items():
            recent = speed.recent_bytes_per_s
            if recent is not None:
                self._recorder.set(names.LOAD_SPEED, round(recent), tier.value)
        prefill = self.costs.prefill.tokens_per_s()
        if prefill is not None:
            self._recorder.set(names.PREFILL_SPEED, round(prefill))

    def _spans(
        self, state: RequestState, computed: int, held: int, daemon_ranges: Sequence[range] | None
    ) -> list[Span]:
        """The held tokens in order, split by the tier that they would be loaded from."""
        answer = state.remote.answer
        remote = daemon_ranges[self._group.group_id] if daemon_ranges is not None else range(0)
        if not remote or answer is None:
            return [Span(Tier.CPU, held)]
        if self._group.window is not None:
            # Only the window's blocks are loaded. They represent all tokens before them.
            parts = answer.spans[self._group.group_id]
            return [Span(Tier.REMOTE, held, parts[-1].shares())]
        size = self._group.block_size
        first, stop = computed // size, (computed + held) // size
        keys = state.loadable_keys[self._group.group_id]
        held_here = self._tier.held_for(state.control)
        position = first + held_here.match_prefix(keys, first, stop)
        spans = [Span(Tier.CPU, (position - first) * size)]
        for part in answer.spans[self._group.group_id]:
            end = min(part.stop, stop)
            if end > position:
                spans.append(Span(Tier.REMOTE, (end - position) * size, part.shares()))
                position = end
        spans.append(Span(Tier.CPU, (stop - position) * size))
        return [span for span in spans if span.tokens]


def _bytes_per_token(groups: Sequence[Group]) -> float:
    """The bytes that each further token adds to a load. Windows have a fixed size, so their blocks
    count as latency. So does the single state of recurrent layers, also if there are no others."""
    full = [group for group in groups if group.window is None]
    windows = [group for group in groups if not group.is_recurrent]
    return sum(group.block_bytes / group.block_size for group in full or windows) or 1.0
