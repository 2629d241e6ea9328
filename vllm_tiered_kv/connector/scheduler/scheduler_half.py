"""The half of the connector that runs in vLLM's scheduler: keys, lookups, plans.

It does bookkeeping in memory only. It never waits for I/O; daemon lookups run in other threads.
These rules keep tokens right:

- Only confirmed tokens get a key: prompt tokens, and sampled tokens that the scheduler has seen.
  Drafts and the placeholders of asynchronous scheduling get none.
- A block is stored in the step whose forward fills it, or later, and read in place. The connector
  holds no references to GPU blocks: a step that overwrites a reallocated block waits until its
  store has read it. Blocks of an asynchronous load are held by vLLM until the request runs; vLLM
  does not reset its cache until then.
- A load is planned only for readable blocks, which stay pinned until the load is reported.
- A request whose load failed is offered no second asynchronous load.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.cache.planner import representative_group
from vllm_tiered_kv.config import Mode, TieredKVConfig
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.metadata import TieredKVMetadata, TieredKVWorkerMetadata
from vllm_tiered_kv.connector.scheduler.account import Account
from vllm_tiered_kv.connector.scheduler.compute_once import ComputeOnce, Verdict
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.early_loads import EarlyLoads
from vllm_tiered_kv.connector.scheduler.hashed_blocks import ids_of
from vllm_tiered_kv.connector.scheduler.invalid_load_recovery import InvalidLoadRecovery
from vllm_tiered_kv.connector.scheduler.kv_events import TierEvents
from vllm_tiered_kv.connector.scheduler.load_planner import LoadPlanner
from vllm_tiered_kv.connector.scheduler.prefetch import Prefetch
from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
from vllm_tiered_kv.connector.scheduler.request_control import (
    EXPLAIN,
    IGNORED,
    SECTION,
    ControlReader,
)
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.connector.scheduler.retention import Retention
from vllm_tiered_kv.connector.scheduler.stale_hash_guard import StaleHashGuard
from vllm_tiered_kv.connector.scheduler.store_planner import StorePlanner
from vllm_tiered_kv.connector.scheduler.verification import Verification
from vllm_tiered_kv.connector.stats import TieredKVStats
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import TieredKVError
from vllm_tiered_kv.metrics import names

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_CPU = Tier.CPU.value
_YIELD_S = 0.0001  # lets other threads run in a step that computes nothing
_MAX_LOGGED_REASONS = 1000
_REPORT_TIMEOUT_S = 60.0
"""Added to the time limit of a load from a daemon. Copies take milliseconds, and puts to a daemon
time out earlier."""


@dataclass(frozen=True)
class OptionalParts:
    """The parts that the assembly builds only for engines that need them."""

    remote: RemoteTier | None
    verification: Verification | None
    early_loads: EarlyLoads | None
    once: ComputeOnce | None
    prefetch: Prefetch | None
    events: TierEvents | None
    trace: Callable[[Request, Account], None] | None
    """Called with the account of each finished request."""


class SchedulerHalf:
    """Plans all loads and stores of an engine. The assembly builds it, and `TieredKVConnector`
    forwards vLLM's calls to it, all in the scheduler's thread."""

    def __init__(
        self,
        config: TieredKVConfig,
        engine: EngineFacts,
        key_maker: KeyMaker,
        tier: CpuTier,
        loads: LoadPlanner,
        stores: StorePlanner,
        retention: Retention,
        optional: OptionalParts,
    ) -> None:
        self._config = config
        self._engine = engine
        self._key_maker = key_maker
        self._tier = tier
        self._groups = tier.groups
        self._representative_group = representative_group(tier.groups).group_id
        self.index = tier.index
        self.ledger = tier.ledger
        self.recorder = tier.recorder
        self.loads = loads
        self.load_policy = loads.load_policy
        self.stores = stores
        self.retention = retention
        self.remote = optional.remote
        self.verification = optional.verification
        self.early_loads = optional.early_loads
        self.once = optional.once
        self.prefetch = optional.prefetch
        self._events = optional.events
        self._trace = optional.trace
        self._controls = ControlReader(tier.recorder)
        self._store_on_finish = not engine.steps_zero_blocks
        self._requests: dict[str, RequestState] = {}
        self._usable_bytes: dict[int, int] = {}  # by rank
        self._uncached: dict[str, Request] = {}  # requests that the cache ignores
        # Requests whose LoRA adapter vLLM may not have read yet: they have no first token.
        self._adapters_unread: dict[str, RequestState] = {}
        self._logged_reasons: set[str] = set()  # why requests are uncached, if logged already
        self._remote_failures: set[str] = set()  # loads in flight that failed at a daemon
        self._manager: KVCacheManager | None = None
        self._stale_hash_guard: StaleHashGuard | None = None
        # A MultiConnector offers ranks no handshake. So they report their block sizes in their
        # first step, and nothing is planned until all have: slots might not match.
        awaits_ranks = engine.is_inside_multi and config.mode is Mode.TIERED
        self._unreported_ranks = engine.num_ranks if awaits_ranks else 0
        self._must_query_ranks = awaits_ranks  # a step is needed to make them report
        self._identity = self.remote.identity if self.remote is not None else None
        self._next = TieredKVMetadata(identity=None if awaits_ranks else self._identity)
        self._unreported_s = 0.0  # idle time without a report while transfers are in flight
        self._last_asked = 0.0
        self.recorder.set(names.CAPACITY_BYTES, self.index.geometry.capacity_bytes, _CPU)

    # ---- arrival, lookup, admission -----------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """vLLM has built its block pool, before the first request arrives."""
        self._manager = manager
        if self._engine.has_priorities:
            self._stale_hash_guard = StaleHashGuard(manager, range(len(self._groups)))
        watch_new_blocks(manager.block_pool, self._on_blocks_allocated)
        self.stores.bind_kv_cache_manager(manager)
        if self._events is not None:
            self._events.bind_kv_cache_manager(manager)
        self.loads.bind_block_pool(manager.block_pool)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(group.block_bytes for group in self._groups)

    def on_new_request(self, request: Request) -> None:
        if self._unreported_ranks:
            return  # all ranks may have reported by the time it is admitted
        state = self._state(request)
        if state is not None:
            self.loads.begin(state)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that the tiers add to the GPU's prefix hit, and whether their load is
        asynchronous. No side effects on the CPU tier."""
        state = self._state(request)
        if state is None:
            return 0, False
        if num_computed_tokens < self.loads.limit(request):
            state.keys.extend(request, request.num_tokens)
        loadable = self.loads.loadable(state, num_computed_tokens)
        if loadable and self._has_lost_adapter(state):
            loadable = self.loads.loadable(state, num_computed_tokens)  # now 0
        if loadable is None or self._waits_for_others(state, num_computed_tokens + loadable):
            return None, False
        match = state.load.match
        return loadable, bool(loadable) and match is not None and not match.is_step_load

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has admitted the request and allocated its blocks."""
        if self._stale_hash_guard is not None:
            self._stale_hash_guard.admitted(request)
        state = self._requests.get(request.request_id)
        if state is not None:
            self.retention.admitted(state)
            match = state.load.match
            if match is not None and self.once is not None:
                self.once.admitted(
                    request.request_id,
                    self._shared_keys(state),
                    match.computed + num_external_tokens,
                    is_loading=bool(num_external_tokens) and not match.is_step_load,
                )
            job = self.loads.admit(state, blocks, num_external_tokens)
            if job is not None:
                self._next.loads.append(job)
                if self.early_loads is not None:
                    self.early_loads.planned(self._next, self.ledger.fence.newest)

    def loaded_from_disk(self, request: Request) -> int:
        """How many tokens of the load that a request was just admitted with come from a daemon's
        disk."""
        state = self._requests.get(request.request_id)
        return 0 if state is None else state.load.from_disk

    # ---- one step -----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TieredKVMetadata:
        """vLLM has planned a step: plans its stores and returns everything for the workers."""
        if self._stale_hash_guard is not None:
            self._stale_hash_guard.step_planned(scheduler_output)
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._requests:
                self.loads.preempted(self._requests[request_id])
                self.stores.preempted(self._requests[request_id])
                self._end_verification(self._requests[request_id])
            if self.once is not None:
                self.once.restarted(request_id)
        self.stores.mark_stale_blocks()
        self.retention.step()
        counts = scheduler_output.num_scheduled_tokens
        self.loads.step_planned(counts)
        if self.once is not None:
            self.once.step_planned(
                counts, lambda name: self._requests[name].request.num_computed_tokens + counts[name]
            )
        offered = scheduler_output.kv_connector_block_state
        for request_id, kept in offered.boundary_state_offloads.items() if offered else ():
            if request_id in self._requests:
                self.stores.states_kept(self._requests[request_id], kept)
        for request_id, scheduled in counts.items():
            self._plan_stores(request_id, scheduled)
        self.stores.store_unowned(self.stores.has_deferred and self._awaits_first_token(counts))
        self._next.stores_after = self.stores.take_jobs()
        if self.verification is not None:
            for request_id, scheduled in counts.items():
                self._plan_verification(self.verification, request_id, scheduled)
        if not self._requests:
            self.index.flush_recency()  # deferred until no request waits
        has_loads = bool(self._next.loads)
        self._next.measured_step = self.load_policy.step_planned(counts, self._requests, has_loads)
        if self._waits_for_threads() and not scheduler_output.total_num_scheduled_tokens:
            # The step computes nothing while lookups, puts or verifications run in threads. They
            # need the interpreter lock more than this loop, which only polls them.
            time.sleep(_YIELD_S)
        self._must_query_ranks = False
        if self.remote is not None and not self._unreported_ranks:
            self._next.identity = self._identity
            self._next.puts, self._next.probes = self.remote.take_jobs(counts)
            if self.prefetch is not None:
                self._next.fetches = self.prefetch.step(is_idle=not self._requests)
        evicted, nbytes = self.index.take_evicted()
        self.recorder.add(names.EVICTED_BLOCKS, evicted, _CPU)
        self.recorder.add(names.EVICTED_BYTES, nbytes, _CPU)
        self._next.wait_for_stores = self.ledger.fence.take()
        if self._next.has_transfers:
            self._unreported_s = 0.0
        metadata, self._next = self._next, TieredKVMetadata()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Processes what the workers reported with the output of a step."""
        if output.invalid_block_ids:
            # Before the reports, which make blocks readable and send them to daemons.
            self._recover_from_invalid_blocks(output.invalid_block_ids)
        self._check_adapters_just_read()  # before the reports too
        self.stores.mark_stale_blocks()
        metadata = output.kv_connector_worker_meta
        self.load_policy.output_received(getattr(metadata, "measured_step", None))
        if isinstance(metadata, TieredKVWorkerMetadata) and not metadata.was_processed:
            metadata.was_processed = True
            if metadata.has_reports:
                self._unreported_s = 0.0
            if self._unreported_ranks and metadata.block_bytes:
                # The connector has checked that the sizes are the same as ours.
                self._unreported_ranks -= len(metadata.block_bytes)
                self._next.identity = None if self._unreported_ranks else self._identity
            self.load_policy.record_load_times(metadata.load_seconds)
            self.load_policy.probes_ended(metadata.probed)
            if self.remote is not None:
                self.remote.update_mapped_arenas(metadata.ready_arenas)
            for job_id, reports in metadata.stores.items():
                readable = self.ledger.report_store(job_id, reports)
                if self.remote is not None:
                    self.remote.puts.offer(readable)
            for job_id, reports in metadata.puts.items():
                self.ledger.report_put(job_id, reports)
            for job_id, reports in metadata.fetches.items():
                self.ledger.report_fetch(job_id, reports)
            if self.verification is not None:
                for job_id, verdicts in metadata.verdicts.items():
                    self.verification.report(job_id, verdicts)
            if metadata.usable_bytes:
                self._usable_bytes.update(metadata.usable_bytes)
                self.index.limit(min(self._usable_bytes.values()))
            for job_id, ended in metadata.step_loads.items():
                failed_request = self.ledger.report_step_load(job_id, ended)
                if failed_request in self._requests:
                    state = self._requests[failed_request]
                    self.loads.load_failed(state, Tier.CPU, is_step_load=True)
            # A rank reports this when its own part ends; vLLM reports the load when all ranks end.
            self._remote_failures |= metadata.remote_failures
            self.retention.outputs_received()
        for request_id in output.failed_recving or ():  # loads of any connector
            if request_id in self._requests:
                self.loads.restart_after_failed_load(self._requests[request_id])
            if self.once is not None:
                self.once.restarted(request_id)
        for request_id in output.finished_recving or ():
            self._unreported_s = 0.0
            failed = None
            if request_id in output.failed_recving:
                failed = Tier.REMOTE if request_id in self._remote_failures else Tier.CPU
            self._remote_failures.discard(request_id)
            self.loads.load_ended(request_id, self._requests.get(request_id), failed)

    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping until the last stores are committed and sent. Deferred work
        does not keep the engine stepping while requests wait: a paused engine must become idle."""
        return bool(
            self._awaits_reports()
            or (
                not self._requests
                and (self.index.has_unflushed_recency or self.stores.has_deferred)
            )
            or self._next.stores_before
            or (self.remote is not None and self.remote.has_planned)
            or (self.prefetch is not None and self.prefetch.is_wanted(not self._requests))
            or self._must_query_ranks
            or self._next.identity  # workers connect to the daemons in the first step
        )

    def has_only_push_work(self) -> bool:
        """Whether the engine has nothing left to do but stores and puts."""
        is_idle = not (self._requests or self._uncached or self.ledger.has_open_loads)
        return is_idle and self.has_pending_push_work()

    def _awaits_reports(self) -> bool:
        """Whether transfers are in flight, loads included: nothing may write to a paused engine.
        Gives up after a timeout, so that lost reports do not keep it stepping forever."""
        if not self.ledger.has_open:
            return False
        now = time.monotonic()
        # At most a second per call counts: the process may have been stopped or run requests.
        self._unreported_s += min(now - self._last_asked, 1.0)
        self._last_asked = now
        if self._unreported_s < _REPORT_TIMEOUT_S + self._config.remote_load_timeout:
            return True
        count = self.ledger.give_up_reports()
        logger.warning(
            "workers sent no report for %.0f s about %d transfers of KV blocks; their blocks are "
            "dropped and their slots stay in use until a report arrives: check the workers' logs",
            self._unreported_s,
            count,
        )
        return False

    # ---- the end of a request -----------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """Drops the state of the request, and plans the stores of its last full blocks. Returns
        what its response says about the cache."""
        if self._stale_hash_guard is not None:
            self._stale_hash_guard.finished(request)
        self._uncached.pop(request.request_id, None)
        self.stores.remove_stale_request(request.request_id)
        state = self._requests.pop(request.request_id, None)
        self.loads.finished(request.request_id, state)
        if self.once is not None:
            self.once.finished(request.request_id)
        if state is None:
            return None
        self._end_verification(state)
        if self._trace is not None and state.account is not None:
            self._trace(request, state.account)
        if self._config.mode is Mode.TIERED:
            self._store_finished(state, block_ids)
            self.retention.finished(state)
        return _response(state)

    def _store_finished(self, state: RequestState, block_ids: tuple[list[int], ...]) -> None:
        request = state.request
        ready = state.storable_tokens(request.num_tokens - 1, self._config.store_decode)
        is_certain = self._store_on_finish and state.ended_by_itself
        if not is_certain:
            ready = min(ready, state.load.on_gpu)
        if not state.has_unplanned_blocks(self._groups, ready):
            return
        if self._was_all_on_gpu(state, ready) and self.stores.defer_finished(
            state, block_ids, ready
        ):
            return  # later: its client waits for the output of this step
        if not is_certain:
            return
        self._extend_keys(state, ready)
        self.stores.store_finished(state, block_ids, ready)
        self._next.stores_before += self.stores.take_jobs()

    def reset_cache(self) -> bool:
        """Drops all blocks of this engine and starts a new epoch of its keys. Other engines keep
        theirs.

        vLLM calls it when weights change in place: blocks computed before must never be found
        again.
        """
        self._key_maker.new_epoch(os.urandom(16))
        self.index.clear()
        self.retention.reset()
        if self._events is not None:
            self._events.reset()
        if self.remote is not None:
            self.remote.puts.reset()
        states = self._requests.values()
        self.stores.reset(states, self._uncached.values())
        if self.verification is not None:
            self.verification.void(states)
        if self.once is not None:
            self.once.forget_leaders()
        for state in states:
            state.keys = self._key_maker.renewed(state.request, state.keys)
            self.loads.reset(state)
        return True

    def shutdown(self) -> None:
        self._requests.clear()
        if self.once is not None:
            self.once.close()
        if self.prefetch is not None:
            self.prefetch.close()
        if self.remote is not None:
            self.remote.close()

    def take_events(self) -> list[KVCacheEvent]:
        """What has become of blocks of the tiers since the last call, if vLLM publishes events."""
        return self._events.take() if self._events is not None else []

    def stats(self) -> TieredKVStats | None:
        self.recorder.set(names.USED_BYTES, self.index.used_bytes, _CPU)
        self.recorder.set(names.PENDING_STORES, self.ledger.pending_store_blocks, _CPU)
        self.load_policy.record()
        self.retention.record()
        if self.remote is not None:
            self.remote.record(self.recorder)
        samples = self.recorder.drain()
        return TieredKVStats(data=samples) if samples else None

    # ---- inside -------------------------------------------------------------------------------

    def _state(self, request: Request) -> RequestState | None:
        """The state of a request, built on first use; None if the request is uncached."""
        state = self._requests.get(request.request_id)
        if state is not None or request.request_id in self._uncached:
            return state
        try:
            keys = self._key_maker.keys_for(request)
            if request.mm_features or request.prompt_embeds is not None:
                keys.extend(request, request.num_tokens)  # fails here or never
        except (TieredKVError, OSError, ValueError, TypeError) as reason:
            # For example, an adapter that cannot be read: the request runs without the cache.
            level = logging.DEBUG if str(reason) in self._logged_reasons else logging.WARNING
            logger.log(level, "request %s is not cached: %s", request.request_id, reason)
            if len(self._logged_reasons) < _MAX_LOGGED_REASONS:
                self._logged_reasons.add(str(reason))  # all requests of an adapter may share it
            self._uncached[request.request_id] = request
            self._detect_replaced_adapters(request.lora_request, None)
            return None
        self._detect_replaced_adapters(request.lora_request, keys.adapter)
        # A resumable session rewrites its own tokens between turns, so its keys would be wrong.
        if getattr(request, "resumable", False) or self._unreported_ranks:
            self._uncached[request.request_id] = request
            return None
        control, ignored = self._controls.read(request.kv_transfer_params)
        state = RequestState(request, keys, control, ignored)
        self._requests[request.request_id] = state
        return state

    def _detect_replaced_adapters(self, lora: LoRARequest | None, adapter: bytes | None) -> None:
        """Called for every new request with its LoRA adapter and the adapter's identity, None if it
        is unknown. vLLM may use these files from now on for all requests with the same adapter id,
        so requests whose adapter has another identity have lost it."""
        if lora is None:
            return
        for state in self._requests.values():
            own = state.request.lora_request
            has_same_id = own is not None and own.lora_int_id == lora.lora_int_id
            if has_same_id and (adapter is None or state.keys.adapter != adapter):
                state.lost_adapter = True

    def _waits_for_others(self, state: RequestState, had: int) -> bool:
        """Whether the request waits while another one computes what comes after `had` tokens. Not
        if a load of it failed: vLLM may still hold blocks for it."""
        request = state.request
        if (
            self.once is None
            or state.load.has_failed
            or state.load.keeps_reservation
            or state.lost_adapter
            or request.skip_reading_prefix_cache
        ):
            return False
        is_wanted = state.control.compute_once
        if not (self._config.compute_once if is_wanted is None else is_wanted):
            return False
        verdict = self.once.should_wait(
            request.request_id,
            self._shared_keys(state),
            had,
            self.loads.limit(request),
            state.control.sends_blocks,
        )
        if verdict is Verdict.LOOK_AGAIN:
            state.remote.drop_lookup()
        return verdict is not Verdict.GO

    def _shared_keys(self, state: RequestState) -> list[BlockKey]:
        return state.keys.of_group[self._representative_group]

    def _has_lost_adapter(self, state: RequestState) -> bool:
        """Whether the request has lost its adapter, checked before it loads or stores."""
        is_starting = not any(state.store.planned.values())
        if self._key_maker.has_lost_adapter(state.request, state.keys, is_starting):
            state.lost_adapter = True
        return state.lost_adapter

    def _awaits_first_token(self, scheduled: Collection[str]) -> bool:
        """Whether a client waits for a first token from this step, or from one in flight if this
        step computes nothing."""
        states = map(self._requests.get, scheduled or self._requests)
        return any(state is not None and not state.request.num_output_tokens for state in states)

    def _on_blocks_allocated(self, block_ids: list[int]) -> None:
        """vLLM has allocated GPU blocks, for a request or for another connector. The latter may
        pass them to a peer while a step is planned, and the peer may write them before our workers
        receive that step."""
        if self.ledger.fence.hand_out(block_ids) and self._engine.is_inside_multi:
            self.ledger.spoil_reads_of(block_ids)
            if self.verification is not None:
                self.verification.void(())

    def _was_all_on_gpu(self, state: RequestState, ready: int) -> bool:
        """Whether the GPU had all full blocks of these tokens before the request arrived. Their
        stores can then be deferred until no client waits for a first token. Not with recurrent
        layers: the state that was hit leaves the request's table after its first step."""
        hit = state.load.on_gpu + state.load.computed_again
        return (self._config.mode is Mode.TIERED and not self.stores.has_stale_blocks) and all(
            not group.is_recurrent and ready // group.block_size <= hit // group.block_size
            for group in self._groups
        )

    def _plan_stores(self, request_id: str, scheduled: int) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        computed = state.request.num_computed_tokens + scheduled
        if computed < state.store.idle_until:
            return
        ready = state.storable_tokens(computed, self._config.store_decode)
        has_new = state.has_unplanned_blocks(self._groups, ready)
        has_full = has_new and not self._was_all_on_gpu(state, ready)
        tail = state.tail_to_store(ready)
        if not has_full and tail is None:
            if not has_new:
                self.stores.nothing_new(state)
            return
        self._extend_keys(state, ready)
        if self._config.mode is Mode.HASH_ONLY:
            self.stores.skip(state, ready)
            return
        assert self._manager is not None, "vLLM did not bind its KV-cache manager"
        tables = self._manager.get_blocks(request_id).blocks
        if has_full:
            self.stores.store_running(state, tables, ready)
        if tail is not None:
            self.stores.store_tail(state, tail, tables[0])

    def _extend_keys(self, state: RequestState, ready: int) -> None:
        state.keys.extend(state.request, ready)
        request = state.request
        is_read = self._has_lost_adapter(state) or request.num_output_tokens
        if request.lora_request is not None and not is_read:
            self._adapters_unread[request.request_id] = state

    def _check_adapters_just_read(self) -> None:
        """vLLM reads an adapter's files after the step is planned. If the files have changed since,
        it is unknown which weights the step used, so all stores in flight are dropped."""
        for request_id, state in tuple(self._adapters_unread.items()):
            if self._key_maker.has_lost_adapter(state.request, state.keys, is_starting=True):
                state.lost_adapter = True
                self.ledger.spoil_stores()
            is_read = state.request.num_output_tokens or state.request.is_finished()
            if is_read or state.lost_adapter:
                del self._adapters_unread[request_id]

    def _plan_verification(
        self, verification: Verification, request_id: str, scheduled: int
    ) -> None:
        state = self._requests.get(request_id)
        if state is None or not state.verification.waiting:
            return
        if state.lost_adapter:  # its blocks differ from those in the tiers
            self._end_verification(state)
            return
        assert self._manager is not None, "vLLM did not bind its KV-cache manager"
        tables = self._manager.get_blocks(request_id).blocks
        ready = min(state.request.num_computed_tokens + scheduled, state.request.num_tokens)
        self._next.verifications += verification.plan(state, tables, ready)

    def _waits_for_threads(self) -> bool:
        if self.ledger.has_open_comparisons:
            return True
        if self.prefetch is not None and (self.prefetch.is_busy or self.ledger.open_fetches):
            return True
        return self.remote is not None and bool(self._requests or self.ledger.has_open_puts)

    def _end_verification(self, state: RequestState) -> None:
        if self.verification is not None:
            self.verification.end(state)

    def _recover_from_invalid_blocks(self, block_ids: set[int]) -> None:
        """Called if a load failed, ours or another connector's, after a step read its blocks."""
        assert self._manager is not None, "vLLM did not bind its KV-cache manager"
        cached, uncached = self._requests.values(), self._uncached.values()
        recovery = InvalidLoadRecovery(self._manager, self._groups, block_ids, cached, uncached)
        recovery.undo(self._tier, self.loads, self.stores, self.verification)
        if self.once is not None:
            self.once.forget_leaders()


def _response(state: RequestState) -> dict[str, Any] | None:
    """What the response of a finished request says about the cache."""
    fields: dict[str, Any] = {}
    if state.ignored_controls:
        fields[IGNORED] = state.ignored_controls
    if state.control.explain and state.account is not None:
        fields[EXPLAIN] = state.account.as_json()
    return {SECTION: fields} if fields else None


def watch_new_blocks(pool: BlockPool, on_allocated: Callable[[list[int]], None]) -> None:
    """Calls `on_allocated` with the ids of all blocks that this pool allocates from now on.

    All blocks come from `BlockPool.get_new_blocks`, whether a request, a load or another connector
    takes them. The scheduler output is no substitute: its list of new blocks includes prefix hits
    and lacks the blocks of other connectors.
    """
    allocate = pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        blocks = allocate(num_blocks)
        on_allocated(ids_of(blocks))
        return blocks

    pool.get_new_blocks = get_new_blocks
