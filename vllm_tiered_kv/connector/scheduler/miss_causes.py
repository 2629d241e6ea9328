"""Finds out why a request computes tokens, when vLLM admits it.

A prefix hit ends at its first missing block. Only this block's cause is looked for, and counts for
the tokens behind it, with two exceptions. Of blocks that were evicted, only those that the ghosts
know count as evicted: what a request adds to an evicted prefix was never stored. And with windows
or recurrent states, tokens that the tiers hold but cannot continue are apart from those behind.

A hit costs nothing per block; neither does a miss, except for evicted blocks, which are looked up
among the ghosts. If nothing of a prompt is held, its first block is looked up with the adapters and
salts of recent requests, some ten microseconds each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vllm_tiered_kv.cache.cost_model import between
from vllm_tiered_kv.cache.ghosts import FACTORS, Ghosts
from vllm_tiered_kv.cache.planner import Group, end_of_full_groups
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.scheduler.account import Account, Miss
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookup
from vllm_tiered_kv.connector.scheduler.request_state import Match, RequestState
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.names import LookupOutcome, MissCause

logger = logging.getLogger(__name__)

IsComputing = Callable[[str, Sequence[BlockKey], int], bool]
"""Whether a request other than the named one is computing the block at a position of these keys of
the representative group."""


class MissCauses:
    """Builds the account of each admitted request and counts its computed tokens by cause. The load
    planner calls it, in the scheduler's thread."""

    def __init__(
        self,
        tier: CpuTier,
        ghosts: Ghosts,
        key_maker: KeyMaker,
        may_load: bool,
        has_daemons: bool,
        is_computing: IsComputing | None = None,
    ) -> None:
        """`may_load`: False if `load_policy` forbids loads."""
        self._tier = tier
        self._groups = sorted(tier.groups, key=lambda group: group.window is not None)
        self._is_hybrid = self._groups[0].window is None and self._groups[-1].window is not None
        self._alignment = tier.alignment
        self._index = tier.index
        self._recorder = tier.recorder
        self._ghosts = ghosts
        self._key_maker = key_maker
        self._may_load = may_load
        self._has_daemons = has_daemons
        self._is_computing = is_computing or (lambda request_id, keys, position: False)

    def admitted(
        self, state: RequestState, match: Match, loaded: int, remote: int, may_query_daemons: bool
    ) -> None:
        """vLLM has admitted a request with `loaded` tokens from the tiers, `remote` of them from
        daemons. `may_query_daemons`: False if daemons may not be asked for this request now."""
        request = state.request
        reached = match.computed + loaded
        held = reached
        if match.choice is not None:
            held = max(reached, min(match.computed + match.choice.held, match.limit))
        missed = [
            Miss(self._why_not_loaded(match, loaded), held - reached),
            *self._missing(state, match.computed, held, match.limit - held, may_query_daemons),
            Miss(MissCause.CONTROL, match.reachable - max(held, match.limit)),
            Miss(MissCause.PARTIAL_BLOCK, request.num_tokens - max(held, match.reachable)),
        ]
        missed = [miss for miss in missed if miss.tokens > 0]
        account = Account(
            request.num_tokens, match.computed, _sources(match, loaded, remote), missed
        )
        public = account.without_secrets()
        for miss in public.missed:
            self._recorder.add(names.COMPUTED_TOKENS, miss.tokens, miss.cause.value)
        if state.account is None:
            state.account = public
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s", request.request_id, account.line())

    def load_failed(self, state: RequestState, is_step_load: bool) -> None:
        """A load of the request has failed, and its tokens are computed. After a step load, vLLM
        does not admit the request again."""
        if state.account is None or state.request.num_preemptions:
            return
        tokens = state.account.load_failed()
        if is_step_load:
            self._recorder.add(names.COMPUTED_TOKENS, tokens, MissCause.LOAD_FAILED.value)

    @staticmethod
    def _why_not_loaded(match: Match, loaded: int) -> MissCause:
        """Why tokens are computed that a tier holds."""
        if match.verified:
            return MissCause.VERIFICATION
        if match.loadable > loaded:
            return MissCause.OTHER_CONNECTOR
        if match.choice is not None and match.choice.tokens < match.choice.held:
            return MissCause.POLICY
        return MissCause.LOAD_FAILED  # vLLM still reserves blocks for a failed load

    def _missing(
        self, state: RequestState, computed: int, held: int, tokens: int, may_query_daemons: bool
    ) -> list[Miss]:
        """Why no tier offers the tokens after the first `held` ones, of which the GPU has the first
        `computed`."""
        if tokens <= 0:
            return []
        if state.lost_adapter:
            return [Miss(MissCause.ADAPTER_REPLACED, tokens)]
        if state.load.has_failed:
            return [Miss(MissCause.LOAD_FAILED, tokens)]
        if state.request.skip_reading_prefix_cache:
            return [Miss(MissCause.CONTROL, tokens)]
        unusable = self._end_of_tokens(state, held, held + tokens) - held
        if unusable > 0:
            rest = self._cause(
                state, computed, held + unusable, tokens - unusable, may_query_daemons
            )
            return [Miss(MissCause.INCOMPLETE, unusable), *rest]
        return self._cause(state, computed, held, tokens, may_query_daemons)

    def _end_of_tokens(self, state: RequestState, held: int, limit: int) -> int:
        """With windows or recurrent states: the end of the tokens whose blocks with full attention
        the tiers hold, although a hit ends after the first `held` ones."""
        if not self._is_hybrid:
            return held
        answer = state.remote.answer
        return end_of_full_groups(
            self._tier.held_for(state.control),
            self._tier.groups,
            state.loadable_keys,
            held,
            limit,
            self._alignment,
            answer.positions() if answer is not None else None,
        )

    def _cause(
        self, state: RequestState, computed: int, held: int, tokens: int, may_query_daemons: bool
    ) -> list[Miss]:
        """Why a block is missing after the first `held` tokens, for these tokens."""
        if tokens <= 0:
            return []
        found = self._first_missing(state, computed, held)
        if found is None:
            return [Miss(MissCause.INCOMPLETE, tokens)]
        group, position = found
        keys = state.loadable_keys[group.group_id]
        in_tier = self._index.lookup(keys[position])
        if in_tier is Lookup.HIT:
            return [Miss(MissCause.CONTROL, tokens, Tier.CPU)]
        if in_tier is Lookup.PENDING or self._is_computing(
            state.request.request_id, keys, position
        ):
            return [Miss(MissCause.PENDING, tokens)]
        if self._has_daemons:
            cause = self._why_not_looked_up(state, may_query_daemons)
            if cause is not None:
                return [Miss(cause, tokens, Tier.REMOTE)]
        ghost = self._ghosts.find(keys[position])
        if ghost is None:
            if self._is_hybrid and group.window is not None:
                return [Miss(MissCause.INCOMPLETE, tokens)]
            cause = MissCause.NEVER_STORED if position else self._held_otherwise(state, group)
            return [Miss(cause, tokens)]
        if ghost.reason is not None:
            dropped = Miss(MissCause.DROPPED, tokens, Tier.CPU, ghost.seconds_ago, ghost.reason)
            return [dropped]
        evicted = self._count_evicted(group, keys, position, held, tokens)
        return [
            Miss(
                MissCause.EVICTED,
                evicted,
                Tier.REMOTE if ghost.was_sent else Tier.CPU,
                ghost.seconds_ago,
            ),
            Miss(MissCause.NEVER_STORED, tokens - evicted),
        ]

    def _first_missing(
        self, state: RequestState, computed: int, held: int
    ) -> tuple[Group, int] | None:
        """The first block without which a hit cannot go on after the first `held` tokens. None if
        there is none within the next stretch: then the hit ends for another reason."""
        may_use_cpu = state.control.may_use(Tier.CPU)
        answer = state.remote.answer
        at_daemons = answer.positions() if answer is not None else None
        for group in self._groups:
            keys = state.loadable_keys[group.group_id]
            first = held if group.window is None else computed
            for position in group.needed(first, held + self._alignment):
                if position >= len(keys):
                    break
                if at_daemons is not None and position in at_daemons[group.group_id]:
                    continue
                if not (may_use_cpu and self._index.lookup(keys[position]) is Lookup.HIT):
                    return group, position
        return None

    def _held_otherwise(self, state: RequestState, group: Group) -> MissCause:
        """Whether the CPU tier holds the first block of the prompt with another adapter or salt."""
        found = set()
        # Always all of them, so that the time tells nothing about other salts.
        for other, has_same_salt in self._key_maker.under_other_scopes(
            state.request, state.keys, group.block_size
        ):
            keys = other.of_group[group.group_id]  # none if the prompt is shorter
            if keys and self._index.lookup(keys[0]) is not Lookup.MISS:
                found.add(has_same_salt)
        # The same salt first: the response tells this, and must not depend on other salts.
        if True in found:
            return MissCause.OTHER_ADAPTER
        return MissCause.OTHER_SALT if found else MissCause.NEVER_STORED

    def _why_not_looked_up(self, state: RequestState, may_query_daemons: bool) -> MissCause | None:
        """Why it is unknown whether daemons hold a block; None if they were asked and do not."""
        if not self._may_load:
            return MissCause.POLICY
        if not state.control.may_use(Tier.REMOTE):
            return MissCause.CONTROL
        if state.remote.has_failed:
            return MissCause.LOAD_FAILED
        if not may_query_daemons:
            return MissCause.UNAVAILABLE
        return _why_unanswered(state.remote.lookup)

    def _count_evicted(
        self, group: Group, keys: Sequence[BlockKey], position: int, held: int, tokens: int
    ) -> int:
        """How many of these missing tokens were evicted. Counts those that a larger tier would have
        held."""
        if group.window is not None:
            return tokens
        size = group.block_size
        distances = self._ghosts.evicted_run(keys, position, -(-(held + tokens) // size))
        for factor in FACTORS:
            extra = (factor - 1) * self._ghosts.capacity_bytes
            saved = next((n for n, far in enumerate(distances) if far > extra), len(distances))
            self._recorder.add(names.WOULD_HIT_TOKENS, min(tokens, saved * size), f"{factor}x")
        return min(tokens, len(distances) * size)


def _why_unanswered(lookup: RemoteLookup | None) -> MissCause | None:
    if lookup is None:
        return None
    answer = lookup.answer
    is_unknown = answer is not None and not answer.is_known
    if is_unknown or lookup.outcome is LookupOutcome.UNAVAILABLE:
        return MissCause.UNAVAILABLE
    is_late = lookup.outcome is LookupOutcome.TIMEOUT or lookup.is_pending
    if is_late or (answer is not None and answer.is_late):
        return MissCause.LOOKUP_TIMEOUT
    return None


def _sources(match: Match, loaded: int, remote: int) -> dict[Tier, int]:
    """The loaded tokens by the place that they are read from. A daemon tells how many blocks each
    of its tiers holds, but not which."""
    sources = {Tier.CPU: loaded - remote} if loaded > remote else {}
    if not remote:
        return sources
    amounts: dict[Tier, float] = {}
    for span in between(0, loaded, match.choice.spans if match.choice is not None else ()):
        if span.tier is Tier.REMOTE:
            for place, share in span.sources().items():
                amounts[place] = amounts.get(place, 0.0) + share * span.tokens
    total = sum(amounts.values())
    rest = remote
    for place in (Tier.SSD, Tier.BACKING):
        tokens = min(rest, round(remote * amounts.get(place, 0.0) / total)) if total else 0
        if tokens:
            sources[place] = tokens
            rest -= tokens
    if rest:
        sources[Tier.MEMORY] = rest
    return sources
