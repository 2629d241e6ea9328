"""Compute once: of the requests that share an uncached prefix, one computes it.

The first of them that vLLM admits is the *leader*. A *follower* asks vLLM's scheduler for its
prefix hit and finds less than what a leader is about to compute: it waits until the leader's blocks
are in vLLM's prefix cache, and then computes only its own tokens. It holds no blocks while it
waits.

vLLM alone does the same wherever a prompt takes whole steps, since it offers blocks to others in
the step that fills them. It does not where a prompt takes only a part of each step
(`long_prefill_token_threshold`, limits of encoders), nor for requests that load a shared prefix
beside the steps: all of them then compute what follows it.

A wait ends when the shared prefix is there, or when its leader is *lost*: it has ended, was
preempted or failed; it got no tokens in many steps; or it took longer than its prefill should. The
first of its followers that vLLM asks then computes and becomes the leader of the others. A request
follows a limited number of leaders, and none that would make it wait for much more than it saves.

With daemons, engines wait for each other in the same way. An engine that is about to compute a long
prefix *claims* its blocks at their daemon and extends the claim while it makes progress. An engine
that finds blocks claimed by another looks again, until the daemon has them, the claim ends or its
own deadline has passed. The daemon gives a claim that ends to one of the engines that ask.

This module reads no vLLM: the scheduler half passes keys and lengths.
"""

from __future__ import annotations

import bisect
import enum
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from vllm_tiered_kv.connector.scheduler.remote_claims import RemoteClaims
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import WaitOutcome
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.remote.store import ClaimResult

_SLACK_S = 1.0  # added to each deadline: steps of other requests, copies
_EXPECTED_FACTOR = 3.0  # other prefills share the steps with the leader's
_ASSUMED_RATE = 100.0  # tokens per second of an unmeasured prefill: a slow CPU
_MAX_IDLE_STEPS = 16  # steps that compute something, but nothing of the leader
_MAX_LEADERS = 3  # that a request follows one after the other
_MAX_DETOUR = 2  # how many tokens the leader may compute for each that a follower saves
_MIN_CLAIM_S = 0.05  # a shorter prefill is not worth the way over a daemon
_MAX_CLAIM_S = 60.0
_LOOK_AGAIN_S = 0.03  # between two looks at what another engine computes
_LOOK_AGAIN_EACH_S = 0.001  # added for each request that looks


class Verdict(enum.Enum):
    """What a request does that asks for its prefix hit."""

    GO = enum.auto()
    WAIT = enum.auto()
    LOOK_AGAIN = enum.auto()
    """Wait, and ask the daemons again what they hold."""


@dataclass(eq=False)
class _Claim:
    """Asked for, and perhaps granted."""

    keys: Sequence[BlockKey]  # up to the last block that may be loaded
    first: int  # block
    asked_at: float
    until: float
    answer: Future[ClaimResult]
    is_mine: bool = False


@dataclass(eq=False)
class _Leader:
    request_id: str
    keys: Sequence[BlockKey]
    end: int  # blocks of its prompt
    position: int  # tokens that it has loaded or planned to compute
    has_begun: bool  # False while it loads the tokens before `position`
    idle_steps: int = 0
    lost: WaitOutcome | None = None
    claim: _Claim | None = None


@dataclass
class _Wait:
    had: int  # tokens that were there when it began
    leader: _Leader
    shared: int  # tokens that it has in common with this leader
    deadline: float
    leaders: int = 1


class ComputeOnce:
    """Decides which requests wait for a prefix that another one computes. The scheduler half calls
    it, in the scheduler's thread."""

    def __init__(
        self,
        block_size: int,
        step_tokens: int,
        load_timeout_s: float,
        expected_s: Callable[[int, int], float | None],
        recorder: Recorder,
        hit_lag: int = 0,
        claims: RemoteClaims | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_size`: tokens for each key. `step_tokens`: the most that a step computes.
        `load_timeout_s`: the longest load. `expected_s`: estimates the seconds to compute tokens
        that follow others; None if unknown. `hit_lag`: blocks by which vLLM's hits end before what
        is computed."""
        self._block_size = block_size
        # Fewer tokens cost about as much as the step that would be spent on waiting.
        self._min_tokens = max(1, step_tokens // 256)
        self._load_timeout_s = load_timeout_s
        self._expected_s = expected_s
        self._recorder = recorder
        self._hit_lag = hit_lag
        self._claims = claims
        self._step_tokens = step_tokens
        self._clock = clock
        self._leaders: dict[str, _Leader] = {}  # in the order of their admission
        self._waits: dict[str, _Wait] = {}
        self._asked: dict[str, _Claim] = {}  # of requests that are not admitted yet
        self._not_asking: set[str] = set()  # requests that claim nothing and wait for no claim

    def should_wait(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        had: int,
        limit: int,
        sends_blocks: bool = True,
    ) -> Verdict:
        """What a request does that asks for its prefix hit: go on, or ask again in the next step.
        `had`: tokens that the GPU and the tiers have. `limit`: the longest hit it can use.
        `sends_blocks`: whether daemons will get what it computes; otherwise it claims nothing."""
        self._lose(request_id, WaitOutcome.LEADER_ENDED)  # it has lost its blocks, or it never led
        found = self._leader_of(keys, had, limit)
        while found is not None:
            if self._follow(request_id, *found, had):
                return Verdict.WAIT
            if found[0].lost is None:
                return Verdict.GO
            found = self._leader_of(keys, had, limit)  # the next one
        if self._claims is None or not sends_blocks or request_id in self._not_asking:
            return Verdict.GO
        return self._query_engines(self._claims, request_id, keys, had, limit)

    def admitted(
        self, request_id: str, keys: Sequence[BlockKey], had: int, is_loading: bool
    ) -> None:
        """vLLM has admitted a request that need not compute its first `had` tokens. `is_loading`:
        it first waits for a load of some of them."""
        self._not_asking.discard(request_id)
        # A follower's claim is not released: it covers what its leader in this engine computes.
        claim = self._asked.pop(request_id, None)
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._recorder.add(names.SHARED_PREFIX_TOKENS, max(0, had - wait.had))
            if had >= wait.shared - self._hit_lag * self._block_size:
                outcome = WaitOutcome.SERVED
            else:
                outcome = wait.leader.lost or WaitOutcome.NOT_FOUND
            self._recorder.add(names.SHARED_PREFIX_WAITS, 1, outcome.value)
        if len(keys) * self._block_size - had > self._min_tokens:
            leader = _Leader(request_id, keys, len(keys), had, not is_loading)
            leader.claim = claim if claim is not None and claim.is_mine else None
            self._leaders[request_id] = leader

    def is_computing(self, request_id: str, keys: Sequence[BlockKey], block: int) -> bool:
        """Whether a request other than this one is computing the block, or is about to."""
        return any(
            name != request_id and block < leader.end and leader.keys[block] == keys[block]
            for name, leader in self._leaders.items()
        )

    def step_planned(self, scheduled: Collection[str], position_of: Callable[[str], int]) -> None:
        """vLLM has planned a step with these requests. `position_of`: how many tokens of one are
        computed after it."""
        for request_id, leader in list(self._leaders.items()):
            if request_id in scheduled:
                leader.position = position_of(request_id)
                leader.has_begun, leader.idle_steps = True, 0
                is_done = leader.position // self._block_size >= leader.end
                if leader.claim is not None:
                    # Once more at the end: the last blocks are still on their way to the daemon.
                    self._extend(leader.claim, leader.position, is_done)
                if is_done:
                    del self._leaders[request_id]
            elif scheduled and leader.has_begun:
                leader.idle_steps += 1
                if leader.idle_steps > _MAX_IDLE_STEPS:
                    self._lose(request_id, WaitOutcome.STALLED)

    def restarted(self, request_id: str) -> None:
        """The request was preempted, or its load has failed."""
        self._lose(request_id, WaitOutcome.LEADER_ENDED)

    def finished(self, request_id: str) -> None:
        """The request has ended, wherever it was."""
        self._lose(request_id, WaitOutcome.LEADER_ENDED)
        self._forget_claim(request_id)
        if self._waits.pop(request_id, None) is not None:
            self._recorder.add(names.SHARED_PREFIX_WAITS, 1, WaitOutcome.ABORTED.value)

    def forget_leaders(self) -> None:
        """Blocks that leaders have computed may be gone, or keys mean other content now."""
        for request_id in list(self._leaders):
            self._lose(request_id, WaitOutcome.LEADER_ENDED)
        for request_id in list(self._asked):
            self._forget_claim(request_id)

    def close(self) -> None:
        if self._claims is not None:
            self._claims.close()

    def _lose(self, request_id: str, why: WaitOutcome) -> None:
        leader = self._leaders.pop(request_id, None)
        if leader is not None:
            leader.lost = why
            if leader.claim is not None:
                self._release(leader.claim)

    def _leader_of(
        self, keys: Sequence[BlockKey], had: int, limit: int
    ) -> tuple[_Leader, int] | None:
        """The first leader that has yet to compute the block after `had` tokens, and how many
        tokens the request shares with it. None if that is not worth a wait."""
        block, stop = had // self._block_size, min(len(keys), limit // self._block_size)
        if block >= stop:
            return None
        for leader in self._leaders.values():
            next_block = leader.position // self._block_size
            is_ahead = next_block <= block + self._hit_lag and block < leader.end
            if is_ahead and leader.keys[block] == keys[block]:
                shared = self._block_size * _shared(leader.keys, keys, block, min(leader.end, stop))
                saved = shared - had
                # What vLLM has planned for the leader in this very step is found already, but
                # `position` follows only when the step is complete.
                position = max(leader.position, min(had, leader.position + self._step_tokens))
                if saved > self._min_tokens and shared - position <= _MAX_DETOUR * saved:
                    return leader, shared
        return None

    def _follow(self, request_id: str, leader: _Leader, shared: int, had: int) -> bool:
        """Lets the request wait for this leader, or says that it should not. An overdue leader is
        lost."""
        now = self._clock()
        wait = self._waits.get(request_id)
        if wait is None:
            wait = _Wait(had, leader, shared, self._deadline(now, leader, shared))
            self._waits[request_id] = wait
        elif wait.leader is not leader:
            if wait.leaders >= _MAX_LEADERS:
                return False
            wait.leaders += 1
            wait.leader, wait.shared = leader, shared
            wait.deadline = self._deadline(now, leader, shared)
        if now < wait.deadline:
            return True
        self._lose(leader.request_id, WaitOutcome.DEADLINE)
        return False

    def _deadline(self, now: float, leader: _Leader, shared: int) -> float:
        load_s = 0.0 if leader.has_begun else self._load_timeout_s
        return now + load_s + self._longest_s(leader.position, shared - leader.position)

    def _longest_s(self, computed: int, tokens: int) -> float:
        """The time after which a prefill of these tokens is late."""
        return _SLACK_S + _EXPECTED_FACTOR * self._prefill_s(computed, tokens)

    def _prefill_s(self, computed: int, tokens: int) -> float:
        expected_s = self._expected_s(computed, tokens)
        return tokens / _ASSUMED_RATE if expected_s is None else expected_s

    # ---- other engines --------------------------------------------------------------------------

    def _query_engines(
        self,
        claims: RemoteClaims,
        request_id: str,
        keys: Sequence[BlockKey],
        had: int,
        limit: int,
    ) -> Verdict:
        """Claims what the request is about to compute, or lets it wait for another engine's claim.
        Called again and again, while the answer is on its way and while the request waits."""
        now = self._clock()
        asked = self._asked.get(request_id)
        if asked is not None and asked.is_mine:
            # Once its claim has ended it waits for room only, and must not hold up others again.
            return Verdict.GO if now < asked.until else self._stop_asking(request_id)
        if asked is None:
            block, stop = had // self._block_size, min(len(keys), limit // self._block_size)
            tokens = (stop - block) * self._block_size
            if tokens <= 0 or self._prefill_s(had, tokens) < _MIN_CLAIM_S:
                return self._stop_asking(request_id, had)
            ttl_s = self._claim_s(had, tokens)
            mine = keys[:stop]
            asked = _Claim(mine, block, now, now + ttl_s, claims.claim(mine, block, ttl_s))
            self._asked[request_id] = asked
        if not asked.answer.done():
            if now < asked.asked_at + claims.timeout_s:
                return Verdict.WAIT
            return self._stop_asking(request_id)
        if asked.answer.exception() is not None:
            return self._stop_asking(request_id)
        answer = asked.answer.result()
        wait = self._waits.get(request_id)
        asked.is_mine = answer.count > 0
        if asked.is_mine or not answer.others:
            if wait is not None and wait.leader.lost is None:
                wait.leader.lost = WaitOutcome.LEADER_ENDED
            return Verdict.GO
        shared = (asked.first + answer.others) * self._block_size
        if shared <= had:  # more has arrived since then
            del self._asked[request_id]
            return Verdict.WAIT
        if self._prefill_s(had, shared - had) < _MIN_CLAIM_S:
            return self._stop_asking(request_id, had)
        if wait is None or wait.leader.request_id:
            # A stand-in for the other engine's request.
            other = _Leader("", keys, asked.first + answer.others, had, True)
            deadline = now + self._longest_s(had, shared - had)
            leaders = wait.leaders + 1 if wait is not None else 1
            wait = _Wait(wait.had if wait is not None else had, other, shared, deadline, leaders)
            self._waits[request_id] = wait
        if now >= wait.deadline:
            wait.leader.lost = WaitOutcome.DEADLINE
            return self._stop_asking(request_id)
        if now < asked.asked_at + _LOOK_AGAIN_S + _LOOK_AGAIN_EACH_S * len(self._asked):
            return Verdict.WAIT
        del self._asked[request_id]
        return Verdict.LOOK_AGAIN

    def _stop_asking(self, request_id: str, had: int | None = None) -> Verdict:
        """Lets the request go. `had`: the tokens that it has, if they are all but a few."""
        wait = self._waits.get(request_id)
        if wait is not None and had is not None:
            wait.shared = min(wait.shared, had)
        self._forget_claim(request_id)
        self._not_asking.add(request_id)
        return Verdict.GO

    def _claim_s(self, computed: int, tokens: int) -> float:
        """How long a claim lasts unless it is extended: until the step after the next one is
        late."""
        return min(_MAX_CLAIM_S, self._longest_s(computed, min(tokens, 2 * self._step_tokens)))

    def _extend(self, claim: _Claim, position: int, is_done: bool) -> None:
        """Extends a claim whose time is half over."""
        now = self._clock()
        if self._claims is None or (now < (claim.asked_at + claim.until) / 2 and not is_done):
            return
        rest = max(0, len(claim.keys) * self._block_size - position)
        ttl_s = self._claim_s(position, rest)
        claim.asked_at, claim.until = now, now + ttl_s
        self._claims.claim(claim.keys, claim.first, ttl_s)

    def _forget_claim(self, request_id: str) -> None:
        self._not_asking.discard(request_id)
        claim = self._asked.pop(request_id, None)
        if claim is not None:
            self._release(claim)

    def _release(self, claim: _Claim) -> None:
        answer = claim.answer
        if answer.done() and (answer.exception() is not None or not answer.result().count):
            return
        if self._claims is not None and self._clock() < claim.until:
            self._claims.release(claim.keys, claim.first)


def _shared(first: Sequence[BlockKey], second: Sequence[BlockKey], start: int, stop: int) -> int:
    """How many blocks two sequences of keys share, known to share the block at `start`. A key
    stands for the whole prefix, so equal keys mean equal keys before them."""
    return bisect.bisect_left(
        range(stop), True, start + 1, stop, key=lambda block: first[block] != second[block]
    )
