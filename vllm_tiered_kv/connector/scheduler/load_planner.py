"""Decides what a request loads instead of computing, and from which tier each block comes.

A *step load* runs in the step that computes the request: the forward waits for it. An
*asynchronous load* runs beside the steps: vLLM schedules the request after the load has ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.cost_model import between
from vllm_tiered_kv.cache.planner import (
    Group,
    end_of_full_groups,
    loadable_tokens,
    representative_group,
)
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.hashed_blocks import ids_of
from vllm_tiered_kv.connector.scheduler.load_policy import LoadDecider
from vllm_tiered_kv.connector.scheduler.miss_causes import MissCauses
from vllm_tiered_kv.connector.scheduler.partial_tail import tail_of
from vllm_tiered_kv.connector.scheduler.remote_tier import LoadSplit, RemoteTier
from vllm_tiered_kv.connector.scheduler.request_state import LoadState, Match, RequestState
from vllm_tiered_kv.connector.scheduler.step_load_policy import StepLoadPolicy
from vllm_tiered_kv.connector.scheduler.verification import Verification
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, LoadJob, int64_array, pick
from vllm_tiered_kv.metrics import names

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

_CPU = Tier.CPU.value
_REMOTE = Tier.REMOTE.value
_STORE_WAIT_S = 1.0  # copies take milliseconds; a longer one has a problem


class LoadPlanner:
    """Answers vLLM's lookups and turns admitted answers into load jobs. The scheduler half calls
    it, in the scheduler's thread."""

    def __init__(
        self,
        tier: CpuTier,
        step_policy: StepLoadPolicy,
        load_policy: LoadDecider,
        remote: RemoteTier | None,
        verification: Verification | None,
        reuses_tails: bool,
        engine: EngineFacts,
        misses: MissCauses,
    ) -> None:
        self.step_policy = step_policy
        self.load_policy = load_policy
        self._groups = tier.groups
        self._alignment = tier.alignment
        self._has_states = any(group.is_recurrent for group in tier.groups) and any(
            group.window is None for group in tier.groups
        )
        self._tier = tier
        self._index = tier.index
        self._ledger = tier.ledger
        self._recorder = tier.recorder
        self._remote = remote
        # Daemons are not asked until then. The CPU tier is still empty.
        self._awaits_first_forward = engine.first_forward_clears
        self._engine = engine
        self._misses = misses
        self._pool: BlockPool | None = None
        self._verification = verification
        self._reuses_tails = reuses_tails
        self._awaiting_recompute: set[str] = set()
        """Requests that wait to be computed after a failed load. Whenever vLLM admits an
        asynchronous load, it reserves blocks for the full length of each of them."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def begin(self, state: RequestState) -> None:
        """Starts the daemon lookup of a new request, before vLLM asks for its prefix hit."""
        daemons, request = self._daemons_for(state), state.request
        if daemons is None:
            return
        limit = self._load_end(state, 0, self.limit(request))
        # If the GPU has the last block it most likely has all, because vLLM evicts tails first. If
        # it does not, the daemons are asked when vLLM asks for the prefix hit.
        if not request.skip_reading_prefix_cache and not self._gpu_has_block_before(request, limit):
            state.keys.extend(request, request.num_tokens)
            self._ensure_tail(state)
            daemons.begin(state, limit)

    def _daemons_for(self, state: RequestState) -> RemoteTier | None:
        """The remote tier, if it may be asked now, and for this request."""
        if self._remote is None or self._awaits_first_forward or not self.load_policy.may_load:
            return None
        control = state.control
        return self._remote if control.load and control.may_use(Tier.REMOTE) else None

    def _load_end(self, state: RequestState, computed: int, end: int) -> int:
        """The end of what the request lets the cache load."""
        wanted = state.control.load_end(computed, self._alignment)
        return end if wanted is None else min(end, wanted)

    def step_planned(self, scheduled: Collection[str]) -> None:
        """vLLM has planned a step with these requests. Loads admitted from now on belong to a later
        step."""
        self.step_policy.step_planned(scheduled)
        if scheduled:
            self._awaits_first_forward = False

    def finished(self, request_id: str, state: RequestState | None) -> None:
        self.step_policy.finished(request_id)
        self._awaiting_recompute.discard(request_id)
        if state is not None:
            state.remote.drop_lookup()

    def preempted(self, state: RequestState) -> None:
        """The request has lost its blocks and starts over."""
        self.forget_blocks(state)
        state.load.keeps_reservation = state.load.is_at_queue_head = False
        state.remote.forget()

    def forget_blocks(self, state: RequestState) -> None:
        """The GPU or the tier may lack blocks now that they held when vLLM admitted the request."""
        state.load.on_gpu = state.load.computed_again = 0
        state.load.keeps_tail = False

    def reset(self, state: RequestState) -> None:
        """The request has other keys now. What it knows of failures stays."""
        state.load = LoadState(
            has_failed=state.load.has_failed,
            keeps_reservation=state.load.keeps_reservation,
            is_at_queue_head=state.load.is_at_queue_head,
        )
        state.remote.forget()

    def restart_after_failed_load(self, state: RequestState) -> None:
        """An asynchronous load has failed, ours or another connector's, and vLLM computes the whole
        request."""
        state.load.keeps_reservation = state.load.is_at_queue_head = True

    def load_ended(self, request_id: str, state: RequestState | None, failed: Tier | None) -> None:
        """An asynchronous load has ended on all ranks; `failed` is the tier that failed, if any."""
        if not self._ledger.is_loading(request_id):
            return  # another connector's load (MultiConnector)
        self._ledger.close_load(request_id, failed)
        self.load_policy.load_ended(request_id, failed)
        if state is not None and failed is not None:
            self.load_failed(state, failed)

    def load_failed(self, state: RequestState, tier: Tier, is_step_load: bool = False) -> None:
        """A load has failed at this tier, which is not asked again for the request."""
        state.load.keeps_tail = False
        self._misses.load_failed(state, is_step_load)
        state.load.has_failed |= tier is Tier.CPU
        state.remote.load_failed(tier)

    def _gpu_has_block_before(self, request: Request, end: int) -> bool:
        """Whether vLLM's prefix cache has the blocks of all groups that end at token `end`."""
        if self._pool is None:
            return False
        last = end // self._pool.hash_block_size - 1
        if not 0 <= last < len(request.block_hashes):
            return False
        groups = [group.group_id for group in self._groups]
        return self._pool.get_cached_block(request.block_hashes[last], groups) is not None

    def loadable(self, state: RequestState, computed: int) -> int | None:
        """Tokens after `computed` that can be loaded. None makes vLLM ask again in the next step:
        a daemon has not answered yet, this step loads the prefix that the request builds on, stores
        in flight will soon hold the next blocks, or the request must leave the queue's head."""
        request = state.request
        if state.load.is_at_queue_head:
            # Computed windows need more blocks than loaded ones. vLLM considers no request behind
            # this one until enough blocks are free, and requests behind it may hold them. After
            # None, vLLM moves it back among the requests that hold no blocks.
            state.load.is_at_queue_head = False
            self._awaiting_recompute.add(request.request_id)
            return None
        full = limit = end = self.limit(request)
        self._ensure_tail(state)
        tail = state.loadable_tail
        if tail is not None:
            limit, end = request.num_tokens - 1, len(tail.keys) * self._alignment
        has_all_full = computed >= full
        reachable = limit
        limit, end = (self._load_end(state, computed, one) for one in (limit, end))
        on_gpu = computed if has_all_full else 0
        computed_again = self._computed_again(request, computed) if has_all_full else 0
        loadable = 0
        daemon_ranges = None
        is_usable = not state.load.has_failed and not state.lost_adapter
        if computed < end and is_usable and not request.skip_reading_prefix_cache:
            daemons = self._daemons_for(state)
            if daemons is not None and not has_all_full:  # a tail alone is not worth a lookup
                daemon_ranges = daemons.positions(state, computed, min(full, end))
                if daemon_ranges is None and self.load_policy.waits_for_daemons(state, computed):
                    return None
            loadable = self._find(state, computed, end, daemon_ranges)
            # A tail alone is not worth a wait either.
            may_load = self.load_policy.may_load and not has_all_full
            if may_load and self._waits_for_stores(state, computed + loadable, end):
                return None
            if self._has_states:
                self._request_state(state, computed, computed + loadable, end, daemon_ranges)
        if has_all_full and not loadable:
            state.load.match = Match(
                computed,
                0,
                limit,
                on_gpu=on_gpu,
                computed_again=computed_again,
                reachable=reachable,
            )
            return 0
        choice = self.load_policy.choose(state, computed, loadable, daemon_ranges)
        if choice.measured:
            shorter = self._find(state, computed, computed + choice.tokens, daemon_ranges)
            if shorter < choice.tokens:  # no window or state ends there; load all
                loaded = choice.tokens + choice.measured
                choice = dataclasses.replace(choice, tokens=loaded, measured=0)
        if choice.tokens < loadable:
            # Windows need other blocks at the end of a shorter prefix.
            loadable = self._find(state, computed, computed + choice.tokens, daemon_ranges)
        verified = 0
        if loadable and self._verification is not None and self._verification.selects(state):
            verified, loadable = min(loadable, full - computed), 0
        is_step_load = (
            bool(loadable)
            and (self._remote is None or self._remote.is_resident(state))
            and self.step_policy.allows(request.request_id, self._bytes(loadable))
        )
        if self._awaiting_recompute and not is_step_load:
            # The tiers may still hold the prefix. But vLLM keeps the blocks that it reserved for
            # the failed load, and reserves them once more for a second asynchronous load. For a
            # request that needs half of the GPU's blocks this is more than the GPU has, and the
            # request would wait forever. So would a request that precedes it by priority or because
            # it ran before.
            loadable = 0
        if loadable and computed and not is_step_load and self.step_policy.has_planned:
            # The GPU's part of the prefix may be a step load of this very step. If that load
            # failed, vLLM would hold a reservation for this request too, or block others behind it.
            self.step_policy.forbid_in_next_step()
            return None
        loadable = min(loadable, limit - computed)  # all but the last token of a tail
        state.load.match = Match(
            computed,
            loadable,
            limit,
            is_step_load,
            choice,
            verified,
            on_gpu,
            computed_again,
            reachable,
        )
        return loadable

    def _waits_for_stores(self, state: RequestState, found: int, end: int) -> bool:
        """Whether a store in flight will soon hold the block after token `found`: waiting for a
        copy is cheaper than computing the block. This matters most for an engine inside the
        caller's process. It stops stepping with its last output, and receives its store reports
        only in the steps that this wait causes."""
        if found >= end or not self._ledger.has_open_stores:
            return False
        if not state.control.may_use(Tier.CPU):
            return False
        for group, keys in zip(self._groups, state.loadable_keys, strict=True):
            first = found // group.block_size
            # The next recurrent state may be several blocks away.
            stop = end // group.block_size if group.is_recurrent else first + 1
            if any(self._index.lookup(key) is Lookup.PENDING for key in keys[first:stop]):
                now = time.monotonic()
                if state.load.store_wait_deadline is None:
                    state.load.store_wait_deadline = now + _STORE_WAIT_S
                return now < state.load.store_wait_deadline
        return False

    def _request_state(
        self,
        state: RequestState,
        computed: int,
        found: int,
        limit: int,
        daemon_ranges: Sequence[range] | None,
    ) -> None:
        """Lets vLLM keep the recurrent state where a prefix ends that the tiers hold without it, so
        that the next request with this prefix finds it. vLLM keeps states at few boundaries, and
        does the same by itself if its own cache holds such a prefix."""
        shared = end_of_full_groups(
            self._tier.held_for(state.control),
            self._groups,
            state.loadable_keys,
            computed,
            limit,
            self._alignment,
            daemon_ranges,
        )
        # vLLM's own cache, which may hold the blocks too by then, finds a block less with EAGLE.
        shared -= self._alignment * self._engine.drops_last_block
        request = state.request
        if shared > max(found, request.shared_prefix_boundary):
            request.shared_prefix_boundary = shared

    def _ensure_tail(self, state: RequestState) -> None:
        """Computes the tail of the prompt once, if tails are reused."""
        if self._reuses_tails and state.load.tail is None:
            state.load.tail = tail_of(state.request, state.keys, self._alignment)

    def _keeps_tail(self, state: RequestState, load: LoadSplit) -> bool:
        """Whether a later request finds the loaded tail again without another store: the CPU tier
        holds it, or a daemon does that later requests ask anyway."""
        if self._remote is None or not self._remote.keep_copies:
            return True
        return bool(load.local) and load.local[-1] == len(state.loadable_keys[0]) - 1

    def _computed_again(self, request: Request, computed: int) -> int:
        """Tokens that vLLM computes although the GPU has them. vLLM always computes the last token,
        and with it the block that it fills."""
        end = request.num_tokens // self._alignment * self._alignment
        has_block = end > computed and self._gpu_has_block_before(request, end)
        return end - computed if has_block else 0

    def admit(self, state: RequestState, blocks: KVCacheBlocks, tokens: int) -> LoadJob | None:
        """vLLM has admitted the request and allocated its blocks: pins what was offered and returns
        the load job."""
        request_id = state.request.request_id
        self._awaiting_recompute.discard(request_id)
        match, state.load.match = state.load.match, None
        if match is None:
            return None
        state.load.on_gpu = match.on_gpu
        state.load.computed_again = match.computed_again
        covered = -(-tokens // self._alignment) * self._alignment  # rounded up for a tail
        if match.verified and self._verification is not None:
            self._verification.begin(state, match.computed, match.verified)
        loads = [
            self._split(state, group, match.computed, covered, blocks) for group in self._groups
        ]
        remote_tokens = self._count(match, tokens, loads)
        may_query_daemons = self._daemons_for(state) is not None
        self._misses.admitted(state, match, tokens, remote_tokens, may_query_daemons)
        state.load.from_disk = _from_disk(match, tokens)
        if match.choice is not None:
            is_timed = not match.is_step_load
            probed = self.load_policy.admitted(request_id, match.choice, covered, is_timed)
            if probed and self._remote is not None:
                first, stop = match.computed + probed.start, match.computed + probed.stop
                nbytes = self.load_policy.bytes_of(probed)
                group = representative_group(self._groups)
                self._remote.probe(state, group, range(first, stop), nbytes)
        lookup = state.remote.take_lookup()  # a restarted request looks up again
        if lookup is not None and not any(load.remote for load in loads):
            lookup.drop()
            lookup = None
        if not tokens:
            return None
        slots = self._open(state, loads, None if lookup is None else lookup.drop)
        taken = 0
        transfers: list[GroupTransfer] = []
        for group, load in zip(self._groups, loads, strict=True):
            table = blocks.blocks[group.group_id]
            if load.local:
                transfers.append(
                    GroupTransfer(
                        group.group_id,
                        int64_array(ids_of(pick(table, load.local))),
                        int64_array(slots[taken : taken + len(load.local)]),
                    )
                )
                taken += len(load.local)
            # The whole prefix counts as used, including the part that the GPU had.
            used = group.needed(0, match.computed + covered)
            self._index.touch(state.loadable_keys[group.group_id][used.start : used.stop])
        state.load.keeps_tail = covered > tokens and self._keeps_tail(state, loads[0])
        remote = tuple(transfer for load in loads for transfer in load.remote)
        if not match.is_step_load:
            return LoadJob(request_id, tuple(transfers), remote)
        self.step_policy.admitted(self._bytes(covered))
        job_id = self._ledger.to_step_load(request_id)
        return LoadJob(request_id, tuple(transfers), remote, job_id)

    def _find(
        self, state: RequestState, computed: int, limit: int, daemon_ranges: Sequence[range] | None
    ) -> int:
        return loadable_tokens(
            self._tier.held_for(state.control),
            self._groups,
            state.loadable_keys,
            computed,
            limit,
            self._alignment,
            daemon_ranges,
        )

    def _bytes(self, tokens: int) -> int:
        return sum(tokens // group.block_size * group.block_bytes for group in self._groups)

    def limit(self, request: Request) -> int:
        """The maximum end of a load in full blocks. The last token is always computed, for its
        logits."""
        blocks = min(
            (request.num_tokens - 1) // self._alignment - self._engine.drops_last_block,
            (request.num_tokens - self._engine.draft_lookahead) // self._alignment,
        )
        return max(0, blocks * self._alignment)

    def _split(
        self,
        state: RequestState,
        group: Group,
        computed: int,
        loaded: int,
        blocks: KVCacheBlocks,
    ) -> LoadSplit:
        span = group.needed(computed, computed + loaded)
        table = blocks.blocks[group.group_id]
        if span and group.window is not None:
            # vLLM assumes that exactly these blocks are loaded.
            before = span.start - 1
            assert not table[span.start].is_null, "vLLM dropped a block of the window"
            assert before < computed // group.block_size or table[before].is_null
        if self._remote is None:
            return LoadSplit(span, [])
        return self._remote.split(state, group, span, ids_of(pick(table, span)))

    def _open(
        self,
        state: RequestState,
        loads: Sequence[LoadSplit],
        on_end: Callable[[], None] | None,
    ) -> list[int]:
        keys: list[BlockKey] = []
        nbytes = remote_blocks = remote_bytes = 0
        for group, load in zip(self._groups, loads, strict=True):
            keys += pick(state.loadable_keys[group.group_id], load.local)
            nbytes += len(load.local) * group.block_bytes
            remote_blocks += load.num_remote
            remote_bytes += load.num_remote * group.block_bytes
        return self._ledger.open_load(
            state.request.request_id, keys, nbytes, remote_blocks, remote_bytes, on_end
        )

    def _count(self, match: Match, loaded: int, loads: Sequence[LoadSplit]) -> int:
        """Counts the tokens of a request that vLLM admitted. Returns those from daemons."""
        loadable = match.limit - match.computed
        held = max(loaded, min(match.choice.held, loadable) if match.choice is not None else 0)
        missed = max(0, loadable - held)
        # All groups load the same tokens, so one group's split between tiers represents all.
        representative = loads[self._groups.index(representative_group(self._groups))]
        blocks = len(representative.local) + representative.num_remote
        remote = loaded * representative.num_remote // blocks if blocks else 0
        self._recorder.add(names.HIT_TOKENS, loaded - remote, _CPU)
        self._recorder.add(names.HIT_TOKENS, remote, _REMOTE)
        costs = self.load_policy.costs
        saved_s = costs.compute_seconds(match.computed, loaded) if loaded else None
        if saved_s is not None:
            self._recorder.add(names.SAVED_SECONDS, saved_s * (loaded - remote) / loaded, _CPU)
            self._recorder.add(names.SAVED_SECONDS, saved_s * remote / loaded, _REMOTE)
        self._recorder.add(names.MISS_TOKENS, missed, _CPU)
        for span in between(loaded, held, match.choice.spans if match.choice is not None else ()):
            self._recorder.add(names.RECOMPUTED_TOKENS, span.tokens, span.tier.value)
        end = -(-match.limit // self._alignment) * self._alignment  # includes the tail's block
        for group, load in zip(self._groups, loads, strict=True):
            self._recorder.add(names.HIT_BLOCKS, len(load.local), _CPU)
            self._recorder.add(names.HIT_BLOCKS, load.num_remote, _REMOTE)
            needed = group.needed(match.limit - missed, end) if missed else ()
            self._recorder.add(names.MISS_BLOCKS, len(needed), _CPU)
        return remote


def _from_disk(match: Match, tokens: int) -> int:
    """How many of the loaded tokens a daemon reads from its SSD or its backing store."""
    spans = match.choice.spans if match.choice is not None else ()
    share = sum(
        span.tokens * sum(span.shares.get(place, 0.0) for place in (Tier.SSD, Tier.BACKING))
        for span in between(0, tokens, spans)
    )
    return min(tokens, round(share))
