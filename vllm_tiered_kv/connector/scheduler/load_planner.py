"""What a request loads instead of computing, and where each block of it comes from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.cost_model import between
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import Group, loadable_tokens, telling_group
from vllm_tiered_kv.connector.scheduler.hashed_blocks import ids_of
from vllm_tiered_kv.connector.scheduler.load_policy import LoadDecider
from vllm_tiered_kv.connector.scheduler.partial_tail import tail_of
from vllm_tiered_kv.connector.scheduler.remote_tier import LoadSplit, RemoteTier
from vllm_tiered_kv.connector.scheduler.request_state import Match, RequestState
from vllm_tiered_kv.connector.scheduler.step_load_policy import StepLoadPolicy
from vllm_tiered_kv.connector.scheduler.verification import Verification
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.core.transfer import GroupTransfer, LoadJob, int64_array, pick
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.metrics.recorder import Recorder

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

_CPU = Tier.CPU.value
_REMOTE = Tier.REMOTE.value
_STORE_WAIT_S = 1.0  # copies take milliseconds; past this something is wrong


class LoadPlanner:
    def __init__(
        self,
        groups: Sequence[Group],
        index: BlockIndex,
        ledger: TransferLedger,
        recorder: Recorder,
        step_policy: StepLoadPolicy,
        load_policy: LoadDecider,
    ) -> None:
        self.step_policy = step_policy
        self.load_policy = load_policy
        self._groups = groups
        self._alignment = math.lcm(*(group.block_size for group in groups))
        self._index = index
        self._ledger = ledger
        self._recorder = recorder
        self.remote: RemoteTier | None = None
        self.awaits_first_forward = False
        """The first forward would overwrite what is loaded ahead of it. The CPU tier is empty until
        then; daemons are not asked."""
        self._pool: BlockPool | None = None
        self.verification: Verification | None = None
        self.reuses_tails = False
        self._awaiting_recompute: set[str] = set()
        """Requests that wait to be computed after a load failed. vLLM keeps room for the whole of
        each of them whenever it admits a load beside the steps."""

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def begin(self, state: RequestState, request: Request) -> None:
        """A request has arrived: the daemons are asked ahead of the scheduler's question."""
        daemons = self._daemons
        if daemons is None:
            return
        limit = self.limit(request)
        # If the GPU has the last block it most likely has all: tails leave first. Where it does
        # not, the daemons are asked when that turns out.
        if not request.skip_reading_prefix_cache and not self._gpu_has_block_before(request, limit):
            state.keys.extend(request, request.num_tokens)
            self._ensure_tail(state)
            daemons.begin(state, limit)

    @property
    def _daemons(self) -> RemoteTier | None:
        """Those to be asked."""
        if self.remote is None or self.awaits_first_forward or not self.load_policy.may_load:
            return None
        return self.remote

    def step_planned(self, scheduled: Collection[str]) -> None:
        """The requests of a step are known; loads of later ones come behind its forward."""
        self.step_policy.step_planned(scheduled)
        if scheduled:
            self.awaits_first_forward = False

    def finished(self, request_id: str) -> None:
        self.step_policy.finished(request_id)
        self._awaiting_recompute.discard(request_id)

    def _gpu_has_block_before(self, request: Request, end: int) -> bool:
        """Whether vLLM's prefix cache has the blocks that end at this token of a request."""
        if self._pool is None:
            return False
        last = end // self._pool.hash_block_size - 1
        if not 0 <= last < len(request.block_hashes):
            return False
        groups = [group.group_id for group in self._groups]
        return self._pool.get_cached_block(request.block_hashes[last], groups) is not None

    def loadable(self, state: RequestState, request: Request, computed: int) -> int | None:
        """Tokens after `computed` that can be loaded; None if that is to be asked in the next step:
        a daemon has not answered, this step loads what the request would build on, stores that are
        about to end hold what follows, or others have to be let past."""
        if state.is_at_queue_head:
            # Where windows are computed they take more blocks than where they are loaded. vLLM
            # looks at nobody behind it until there are as many, and those behind it may hold them.
            # For this answer it is put back among those that hold nothing.
            state.is_at_queue_head = False
            self._awaiting_recompute.add(request.request_id)
            return None
        full = limit = end = self.limit(request)
        self._ensure_tail(state)
        tail = state.loadable_tail
        if tail is not None:
            limit, end = request.num_tokens - 1, len(tail.keys) * self._alignment
        has_all_full = computed >= full
        on_gpu = computed if has_all_full else 0
        again = self._computed_again(request, computed) if has_all_full else 0
        loadable = 0
        elsewhere = None
        is_usable = not state.load_failed and not state.lost_adapter
        if computed < end and is_usable and not request.skip_reading_prefix_cache:
            daemons = self._daemons
            if daemons is not None and not has_all_full:  # nobody waits for one just for a tail
                elsewhere = daemons.positions(state, computed, full)
                if elsewhere is None and self.load_policy.waits_for_daemons(state, computed):
                    return None
            loadable = self._find(state, computed, end, elsewhere)
            may_load = (
                self.load_policy.may_load and not has_all_full
            )  # nobody waits just for a tail
            if may_load and self._should_wait_for_stores(state, computed + loadable, end):
                return None
        if has_all_full and not loadable:
            state.match = Match(computed, 0, limit, on_gpu=on_gpu, computed_again=again)
            return 0
        choice = self.load_policy.choose(state, computed, loadable, elsewhere)
        if choice.tokens < loadable:
            # Where a shorter prefix ends, windows need other blocks.
            loadable = self._find(state, computed, computed + choice.tokens, elsewhere)
        verified = 0
        if loadable and self.verification is not None and self.verification.selects(state):
            verified, loadable = min(loadable, full - computed), 0
        ahead = (
            bool(loadable)
            and (self.remote is None or self.remote.is_resident(state))
            and self.step_policy.allows(request.request_id, self._bytes(loadable))
        )
        if (state.keeps_reservation or self._awaiting_recompute) and not ahead:
            # Tiers may still have it. But vLLM keeps what it reserved for the load that failed, and
            # does so again for a second one beside the steps: of a request that takes half of the
            # GPU's blocks that is more than there are, and it would wait for ever. So would another
            # request that comes before it by priority, or by having run already.
            loadable = 0
        if loadable and computed and not ahead and self.step_policy.has_planned:
            # What the GPU has of it may be what this very step loads. Should that fail, vLLM would
            # have room reserved for this one, too, or let others wait behind it.
            self.step_policy.reserve_next_step()
            return None
        loadable = min(loadable, limit - computed)  # of a tail all but the last token
        state.match = Match(computed, loadable, limit, ahead, choice, verified, on_gpu, again)
        return loadable

    def _should_wait_for_stores(self, state: RequestState, found: int, end: int) -> bool:
        """Whether the tier is about to hold the block after token `found`: copies take less than
        computing it again. An engine inside the caller's process has stopped stepping with its last
        output, and hears of what it stored in the steps that this makes it take."""
        if found >= end or not self._ledger.has_open_stores:
            return False
        for group, keys in zip(self._groups, state.loadable_keys, strict=True):
            if self._index.lookup(keys[found // group.block_size]) is Lookup.PENDING:
                now = time.monotonic()
                if state.store_wait_deadline is None:
                    state.store_wait_deadline = now + _STORE_WAIT_S
                return now < state.store_wait_deadline
        return False

    def _ensure_tail(self, state: RequestState) -> None:
        if self.reuses_tails and state.tail is None:
            state.tail = tail_of(state.request, state.keys, self._alignment)

    def _keeps_tail(self, state: RequestState, load: LoadSplit) -> bool:
        """Whether a tail that is loaded will be found again: here, or at a daemon, which will be
        asked for the blocks before it where those are not kept here either."""
        if self.remote is None or not self.remote.keep_copies:
            return True
        return bool(load.local) and load.local[-1] == len(state.loadable_keys[0]) - 1

    def _computed_again(self, request: Request, computed: int) -> int:
        """vLLM always computes the last token, even if it has the block that it fills."""
        end = request.num_tokens // self._alignment * self._alignment
        again = end > computed and self._gpu_has_block_before(request, end)
        return end - computed if again else 0

    def admit(
        self, state: RequestState, request: Request, blocks: KVCacheBlocks, tokens: int
    ) -> LoadJob | None:
        """The request has its blocks: what was only an answer becomes a plan, and is pinned."""
        self._awaiting_recompute.discard(request.request_id)
        match, state.match = state.match, None
        if match is None:
            return None
        state.on_gpu = match.on_gpu
        state.computed_again = match.computed_again
        covered = -(-tokens // self._alignment) * self._alignment  # more than `tokens`: a tail
        if match.verified and self.verification is not None:
            self.verification.begin(state, match.computed, match.verified)
        loads = [
            self._split(state, group, match.computed, covered, blocks) for group in self._groups
        ]
        self._count(match, tokens, loads)
        state.loaded_from_disk = _from_disk(match, tokens)
        if match.choice is not None:
            is_timed = not match.is_step_load
            name = request.request_id
            probed = self.load_policy.admitted(name, match.choice, covered, is_timed)
            if probed and self.remote is not None:
                first, stop = match.computed + probed.start, match.computed + probed.stop
                nbytes = self.load_policy.bytes_of(probed)
                group = telling_group(self._groups)
                self.remote.probe(state, group, range(first, stop), nbytes)
        lookup, state.remote = state.remote, None  # used up; who starts over asks anew
        if lookup is not None and not any(load.remote for load in loads):
            lookup.drop()
            lookup = None
        if not tokens:
            return None
        on_end = None if lookup is None else lookup.drop
        slots = self._open(state, request, loads, on_end)
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
            # All that the request goes on from was used, also the part the GPU still had.
            used = group.needed(0, match.computed + covered)
            self._index.touch(state.loadable_keys[group.group_id][used.start : used.stop])
        state.has_tail = covered > tokens and self._keeps_tail(state, loads[0])
        remote = tuple(transfer for load in loads for transfer in load.remote)
        if not match.is_step_load:
            return LoadJob(request.request_id, tuple(transfers), remote)
        self.step_policy.admitted(self._bytes(covered))
        job_id = self._ledger.to_step_load(request.request_id)
        return LoadJob(request.request_id, tuple(transfers), remote, job_id)

    def _find(
        self, state: RequestState, computed: int, limit: int, elsewhere: Sequence[range] | None
    ) -> int:
        return loadable_tokens(
            self._index,
            self._groups,
            state.loadable_keys,
            computed,
            limit,
            self._alignment,
            elsewhere,
        )

    def _bytes(self, tokens: int) -> int:
        return sum(tokens // group.block_size * group.block_bytes for group in self._groups)

    def limit(self, request: Request) -> int:
        """How far a load may reach: the last token is always computed, for its logits."""
        return (request.num_tokens - 1) // self._alignment * self._alignment

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
            # vLLM takes all of these blocks for loaded, and only these.
            before = span.start - 1
            assert not table[span.start].is_null, "vLLM dropped a block of the window"
            assert before < computed // group.block_size or table[before].is_null
        if self.remote is None:
            return LoadSplit(span, [])
        return self.remote.split(state, group, span, ids_of(pick(table, span)))

    def _open(
        self,
        state: RequestState,
        request: Request,
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
            request.request_id, keys, nbytes, remote_blocks, remote_bytes, on_end
        )

    def _count(self, match: Match, loaded: int, loads: Sequence[LoadSplit]) -> None:
        most = match.limit - match.computed
        held = max(loaded, min(match.choice.held, most) if match.choice is not None else 0)
        missed = max(0, most - held)
        # Groups agree on the tokens; where they came from is told by one of them.
        told = loads[self._groups.index(telling_group(self._groups))]
        blocks = len(told.local) + told.num_remote
        remote = loaded * told.num_remote // blocks if blocks else 0
        self._recorder.add(names.HIT_TOKENS, loaded - remote, _CPU)
        self._recorder.add(names.HIT_TOKENS, remote, _REMOTE)
        self._recorder.add(names.MISS_TOKENS, missed, _CPU)
        for span in between(loaded, held, match.choice.spans if match.choice is not None else ()):
            self._recorder.add(names.RECOMPUTED_TOKENS, span.tokens, span.tier.value)
        end = -(-match.limit // self._alignment) * self._alignment  # a tail is one of the blocks
        for group, load in zip(self._groups, loads, strict=True):
            self._recorder.add(names.HIT_BLOCKS, len(load.local), _CPU)
            self._recorder.add(names.HIT_BLOCKS, load.num_remote, _REMOTE)
            needed = group.needed(match.limit - missed, end) if missed else ()
            self._recorder.add(names.MISS_BLOCKS, len(needed), _CPU)


def _from_disk(match: Match, tokens: int) -> int:
    """Of the tokens that are loaded, those that a daemon has to read from a disk."""
    spans = match.choice.spans if match.choice is not None else ()
    share = sum(
        span.tokens * sum(span.shares.get(place, 0.0) for place in (Tier.SSD, Tier.BACKING))
        for span in between(0, tokens, spans)
    )
    return min(tokens, round(share))
