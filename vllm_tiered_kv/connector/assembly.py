"""Builds the scheduler half and the worker half from vLLM's configuration, bottom-up: every part
is complete when it is built. What vLLM tells later, it tells the halves by a call.

Each half computes the arena's geometry from its own view of the block sizes. A handshake at start
checks that all views agree; where vLLM shows the scheduler too little, that of the workers counts.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_tiered_kv.cache.ghosts import Ghosts
from vllm_tiered_kv.cache.index import BlockIndex
from vllm_tiered_kv.cache.ledger import TransferLedger
from vllm_tiered_kv.cache.planner import groups_of, representative_group
from vllm_tiered_kv.config import Mode, StorePolicy, TieredKVConfig
from vllm_tiered_kv.connector.identity.model_fingerprint import (
    changed_since_start,
    fingerprint,
    why_weights_are_unknown,
)
from vllm_tiered_kv.connector.identity.model_settings import adapter_settings, draft_lookahead
from vllm_tiered_kv.connector.identity.request_keys import KeyMaker
from vllm_tiered_kv.connector.identity.shard import (
    Holding,
    distinct_tags,
    holding_of,
    ranks_of_stage,
    replicas_of,
    shards_per_rank,
)
from vllm_tiered_kv.connector.same_process import find_worker
from vllm_tiered_kv.connector.scheduler import early_loads, kv_events
from vllm_tiered_kv.connector.scheduler.compute_once import ComputeOnce
from vllm_tiered_kv.connector.scheduler.cpu_tier import CpuTier, EngineFacts
from vllm_tiered_kv.connector.scheduler.lazy_store import LazyStore
from vllm_tiered_kv.connector.scheduler.load_planner import LoadPlanner
from vllm_tiered_kv.connector.scheduler.load_policy import LoadDecider
from vllm_tiered_kv.connector.scheduler.miss_causes import MissCauses
from vllm_tiered_kv.connector.scheduler.prefetch import Prefetch
from vllm_tiered_kv.connector.scheduler.remote_claims import RemoteClaims
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.remote_puts import RemotePuts
from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
from vllm_tiered_kv.connector.scheduler.retention import Pins, Retention
from vllm_tiered_kv.connector.scheduler.scheduler_half import OptionalParts, SchedulerHalf
from vllm_tiered_kv.connector.scheduler.step_load_policy import StepLoadPolicy
from vllm_tiered_kv.connector.scheduler.store_planner import StorePlanner
from vllm_tiered_kv.connector.scheduler.verification import Verification
from vllm_tiered_kv.connector.tracing import account_tracer
from vllm_tiered_kv.connector.worker.kv_layout import (
    chunked_groups,
    first_forward_clears,
    group_block_bytes,
    group_block_sizes,
    group_windows,
    recurrent_groups,
)
from vllm_tiered_kv.connector.worker.number_formats import is_draft_layer
from vllm_tiered_kv.connector.worker.remote_io import open_cluster
from vllm_tiered_kv.connector.worker.worker_half import StepFacts, WorkerHalf
from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.store import NAMESPACE_BYTES
from vllm_tiered_kv.device.arena import memory_limit
from vllm_tiered_kv.device.replica_arena import Replicas, share_memory
from vllm_tiered_kv.errors import ConfigError, TieredKVError
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.options import format_size
from vllm_tiered_kv.remote.address import EngineIdentity, engine_name
from vllm_tiered_kv.remote.block_server import BlockServer
from vllm_tiered_kv.remote.placement import ServerGroup

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

_RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=120)
"""How long the first rank waits for the others before all of them fail. vLLM builds the connectors
of all ranks at the same time."""


def make_scheduler_half(
    config: TieredKVConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    is_inside_multi: bool = False,
    block_bytes: Sequence[int] | None = None,
) -> SchedulerHalf:
    """`block_bytes`: per group, if `kv_cache_config` does not tell."""
    windows = group_windows(kv_cache_config)
    if config.reuse_partial_tail and (len(windows) > 1 or windows[0] is not None):
        raise ConfigError(
            "reuse_partial_tail",
            "needs a model with full attention in all layers; remove it for this model",
        )
    lookahead = draft_lookahead(vllm_config)
    if config.reuse_partial_tail and lookahead:
        raise ConfigError(
            "reuse_partial_tail",
            "is not possible with EAGLE or MTP, whose layers read the token after the tail; "
            "remove one of both",
        )
    speculative = vllm_config.speculative_config
    engine = EngineFacts(
        num_ranks=vllm_config.parallel_config.world_size,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        computes_on_cpu=vllm_config.device_config.device_type == "cpu",
        steps_zero_blocks=kv_cache_config.needs_kv_cache_zeroing,
        first_forward_clears=first_forward_clears(kv_cache_config),
        has_priorities=vllm_config.scheduler_config.policy == "priority",
        is_inside_multi=is_inside_multi,
        draft_lookahead=lookahead,
        drops_last_block=speculative is not None and speculative.use_eagle_block_drop(),
    )
    block_sizes = group_block_sizes(kv_cache_config, vllm_config.parallel_config)
    lazy = _lazy_store(config, vllm_config, block_sizes)
    shards = shards_per_rank(config.portable_shards, vllm_config, kv_cache_config)
    namespace = fingerprint(
        vllm_config, kv_cache_config, config.namespace, config.portable_shards
    ).namespace()
    model = str(vllm_config.model_config.model)
    # Daemons use this form of the namespace in logs, listings and quotas.
    logger.info("namespace %s: model %s", namespace[:NAMESPACE_BYTES].hex(), model)
    key_maker = _key_maker(config, vllm_config, namespace, block_sizes)

    block_bytes = block_bytes or group_block_bytes(kv_cache_config)
    geometry = arena_geometry(config, vllm_config, kv_cache_config, block_bytes)
    recorder = Recorder()
    events = None
    if kv_events.are_enabled(vllm_config) and config.mode is Mode.TIERED:
        slots = geometry.capacity_bytes // min(geometry.slot_bytes)
        events = kv_events.TierEvents(kv_cache_config.num_blocks, 4 * slots, bool(config.remote))
    ghosts = Ghosts(geometry.capacity_bytes, min(geometry.slot_bytes))
    index = BlockIndex(
        geometry,
        config.eviction.value,
        events.evicted if events is not None else None,
        ghosts=ghosts,
        on_removed=events.removed if events is not None else None,
    )
    states, chunked = recurrent_groups(kv_cache_config), chunked_groups(kv_cache_config)
    groups = groups_of(block_sizes, block_bytes, windows, geometry, states, chunked)
    pins = Pins(groups, index, config.pin_share)
    subscribers = _subscribers(index, pins, events)
    ledger = TransferLedger(index, recorder, engine.num_ranks, ghosts, *subscribers)
    tier = CpuTier(groups, index, ledger, recorder)

    remote = lookups = claims = verification = None
    if config.remote and config.mode is Mode.TIERED:
        identity = EngineIdentity(
            namespace,
            tuple(nbytes // shards for nbytes in block_bytes),
            str(kv_cache_config.kv_cache_layout),
            engine_name(model),
        )
        replicas = replicas_of(kv_cache_config, vllm_config.parallel_config)
        cluster = open_cluster(config, identity)
        on_missing = events.missing if events is not None else None
        remote, lookups = _remote_tier(
            config, cluster, tier, vllm_config, replicas, shards, on_missing
        )
        claims = RemoteClaims(cluster, config.remote_lookup_timeout)
    if config.verify_fraction:
        delete = lookups.delete if lookups is not None else None
        verification = Verification(config.verify_fraction, tier, delete)
    load_policy = LoadDecider(config, tier, engine, lookups)
    once = _compute_once(config, vllm_config, tier, engine, load_policy, claims)
    misses = MissCauses(
        tier,
        ghosts,
        key_maker,
        load_policy.may_load,
        remote is not None,
        once.is_computing if once is not None else None,
    )
    loads = LoadPlanner(
        tier,
        StepLoadPolicy(config.step_loads, groups, ledger),
        load_policy,
        remote,
        verification,
        reuses_tails=config.reuse_partial_tail and config.mode is Mode.TIERED,
        engine=engine,
        misses=misses,
    )
    # vLLM 0.31 has no such field. The bound block pool's value replaces this one later.
    hash_block_size = getattr(kv_cache_config, "hash_block_size", None) or min(block_sizes)
    if not vllm_config.cache_config.enable_prefix_caching:
        hash_block_size = None
    stores = StorePlanner(tier, lazy, hash_block_size, remote is not None, events)
    early = None
    if early_loads.is_possible(vllm_config, engine.steps_zero_blocks):
        early = early_loads.EarlyLoads(partial(find_worker, vllm_config), recorder)
    prefetch = pin = None
    if remote is not None and lookups is not None:
        prefetch = Prefetch(tier, lookups, config.pin_share, into_cpu=remote.keep_copies)
        pin = lookups.pin
    retention = Retention(tier, pins, pin, prefetch)
    optional = OptionalParts(
        remote, verification, early, once, prefetch, events, account_tracer(vllm_config)
    )
    return SchedulerHalf(config, engine, key_maker, tier, loads, stores, retention, optional)


_OnSlots = Callable[[Sequence[int]], None]


def _subscribers(
    index: BlockIndex, pins: Pins, events: kv_events.TierEvents | None
) -> tuple[list[_OnSlots], _OnSlots | None]:
    """Whom the ledger tells of committed blocks, and of blocks that were sent to a daemon."""
    if events is None:
        return [pins.committed], None

    def told(tell: Callable[[list[BlockKey]], None]) -> _OnSlots:
        return lambda slots: tell([BlockKey(key) for key, _ in index.blocks_in(slots)])

    return [told(events.committed), pins.committed], told(events.sent)


def _compute_once(
    config: TieredKVConfig,
    vllm_config: VllmConfig,
    tier: CpuTier,
    engine: EngineFacts,
    load_policy: LoadDecider,
    claims: RemoteClaims | None,
) -> ComputeOnce | None:
    """Followers take blocks from vLLM's prefix cache. Without it there is nothing to wait for."""
    if not vllm_config.cache_config.enable_prefix_caching or config.mode is not Mode.TIERED:
        if config.compute_once and config.mode is Mode.TIERED:
            raise ConfigError(
                "compute_once", "needs vLLM's prefix caching; enable it or remove the option"
            )
        return None
    return ComputeOnce(
        representative_group(tier.groups).block_size,
        engine.step_tokens,
        config.remote_load_timeout,
        load_policy.costs.compute_seconds,
        tier.recorder,
        int(engine.drops_last_block),
        claims,
    )


def _remote_tier(
    config: TieredKVConfig,
    cluster: ServerGroup[BlockServer],
    tier: CpuTier,
    vllm_config: VllmConfig,
    replicas: int,
    shards: int,
    on_missing: Callable[[Sequence[BlockKey]], None] | None,
) -> tuple[RemoteTier, RemoteLookups]:
    """The daemons as the tier behind the CPU tier."""
    parallel = vllm_config.parallel_config
    lookups = RemoteLookups(
        cluster,
        # A daemon holds a block if it holds all its shards.
        distinct_tags(parallel, replicas, shards),
        config.remote_lookup_timeout,
        config.remote_load_timeout,
        tier.recorder,
        shards,
    )
    lookups.greet()
    # Replicas that cannot share memory have only their part of the arena each.
    capacity = tier.index.geometry.capacity_bytes // replicas
    puts = RemotePuts(cluster, tier, min(config.remote_queue, capacity // 2))
    # A daemon on this host is as near as the CPU tier and holds one copy for all engines.
    keep_copies = not all(address.startswith("ipc://") for address in config.remote)
    remote = RemoteTier(
        cluster, lookups, puts, tier, keep_copies, parallel.world_size, shards, on_missing
    )
    return remote, lookups


def _key_maker(
    config: TieredKVConfig, vllm_config: VllmConfig, namespace: bytes, block_sizes: list[int]
) -> KeyMaker:
    key_maker = KeyMaker(
        namespace,
        block_sizes,
        _media_have_hashes(vllm_config),
        adapter_settings(vllm_config.lora_config),
        draft_lookahead(vllm_config),
    )
    unknown = why_weights_are_unknown(vllm_config)
    if unknown is not None:
        key_maker.new_epoch(os.urandom(16))
        logger.warning(
            "with %s, the weights may differ from the model's files: this engine shares its cache "
            "with no other engine and does not reuse it after a restart; call "
            "reset_prefix_cache(reset_connector=True) after each change of weights",
            unknown,
        )
    changed = changed_since_start(vllm_config)
    if changed is not None:
        key_maker.new_epoch(os.urandom(16))
        if config.remote:
            logger.warning(
                "%s has changed while this engine started, so the engine may have loaded other "
                "files: it shares its cache with no other engine and does not reuse it after a "
                "restart; restart it to share again",
                changed,
            )
    return key_maker


def _media_have_hashes(vllm_config: VllmConfig) -> bool:
    """vLLM hashes media for its processor cache and its prefix cache, and not if both are off."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    has_cache = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return has_cache or bool(vllm_config.cache_config.enable_prefix_caching)


def make_worker_half(
    config: TieredKVConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    is_inside_multi: bool = False,
) -> WorkerHalf:
    block_bytes = group_block_bytes(kv_cache_config)
    geometry = arena_geometry(config, vllm_config, kv_cache_config, block_bytes)
    parallel = vllm_config.parallel_config
    holding = holding_of(
        parallel.rank,
        ranks_of_stage(parallel),
        replicas_of(kv_cache_config, parallel),
        shards_per_rank(config.portable_shards, vllm_config, kv_cache_config),
    )
    return WorkerHalf(
        config,
        geometry,
        parallel.rank,
        holding,
        StepFacts(
            can_be_discarded=_steps_can_be_discarded(vllm_config),
            zero_blocks=kv_cache_config.needs_kv_cache_zeroing,
            let_loads_overtake=_loads_overtake(vllm_config, kv_cache_config),
            have_other_connectors=is_inside_multi,
        ),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        shared_fd=_share_among_replicas(geometry.capacity_bytes, holding, parallel),
        is_verified_layer=_is_verified_layer(vllm_config),
    )


def _is_verified_layer(vllm_config: VllmConfig) -> Callable[[str], bool]:
    """Verification leaves out draft layers. Model Runner V1 gives them a wrong next token where a
    prompt is split into chunks, so their KV depends on the chunks. Tokens do not: the model
    verifies all drafts."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return lambda name: True
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return lambda name: not is_draft_layer(name, layers)


def _loads_overtake(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether loads may start before earlier steps have finished. If a connector loads, vLLM frees
    blocks only after the last step in flight that uses them (`defer_block_free`). Blocks behind a
    window are an exception, but models with windows have no step loads."""
    transfer = vllm_config.kv_transfer_config
    is_consumer = transfer is not None and transfer.is_kv_consumer
    return is_consumer and not kv_cache_config.needs_kv_cache_zeroing


def _steps_can_be_discarded(vllm_config: VllmConfig) -> bool:
    """Whether vLLM can rewind requests after a step. With asynchronous scheduling and in a pipeline
    later steps are already in flight. Model Runner V2 rewinds a request only in its host copy; on
    the GPU it continues where it was."""
    if vllm_config.scheduler_config.async_scheduling:
        return False
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return False
    is_cuda = vllm_config.device_config.device_type == "cuda"  # other devices only have V1
    return not (is_cuda and getattr(vllm_config, "use_v2_model_runner", False))


def arena_geometry(
    config: TieredKVConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    block_bytes: Sequence[int],
) -> ArenaGeometry:
    """The arena of one worker, or of all replicas that share one: an even part of `cpu_memory`."""
    parallel = vllm_config.parallel_config
    ranks = parallel.world_size
    replicas = replicas_of(kv_cache_config, parallel)
    if config.cpu_memory // ranks < max(block_bytes):
        raise ConfigError(
            "cpu_memory",
            f"{format_size(config.cpu_memory)} for {ranks} worker(s) does not hold a single block "
            f"of {format_size(max(block_bytes))}; set a larger value",
        )
    _require_room_on_this_host(config.cpu_memory, parallel)
    return ArenaGeometry.for_blocks(config.cpu_memory // (ranks // replicas), list(block_bytes))


def _require_room_on_this_host(cpu_memory: int, parallel: ParallelConfig) -> None:
    """Each worker checks its own share. This checks that all workers of the host fit together."""
    if parallel.distributed_executor_backend not in (None, "uni", "mp"):
        return  # other executors do not say which workers are on this host
    hosts = getattr(parallel, "nnodes_within_dp", 1)
    engines = max(1, parallel.data_parallel_size_local)
    needed, limit = cpu_memory // hosts * engines, memory_limit()
    if needed > limit:
        raise ConfigError(
            "cpu_memory",
            f"{format_size(needed)} for all workers of this host is more than the machine or "
            f"container has ({limit / 2**30:.1f}GiB); set a smaller value",
        )


def _share_among_replicas(nbytes: int, holding: Holding, parallel: ParallelConfig) -> int | None:
    """A file descriptor of memory that all replicas share, see `replica_arena.share_memory`.

    The ranks agree on it when vLLM builds its connectors, before anything is allocated. If a rank
    fails later, the others do not wait for it here.
    """
    if holding.replicas == 1:
        return None
    import torch
    from vllm.distributed.parallel_state import get_pcp_group, get_tp_group

    # Together they reach all ranks of a pipeline stage, for which vLLM has no group of its own.
    groups = [get_tp_group()]
    if parallel.prefill_context_parallel_size > 1:
        groups.append(get_pcp_group())

    def gather(value: object) -> list[object]:
        gathered = [value]
        for group in groups:
            parts: list[list[object]] = [[]] * group.world_size
            torch.distributed.all_gather_object(parts, gathered, group=group.cpu_group)
            gathered = [one for part in parts for one in part]
        return gathered

    replicas = Replicas(holding.stage_rank, holding.replica, holding.replicas, gather)
    try:
        # The method of the group: torch's function accepts only a backend named exactly "gloo".
        for group in groups:
            group.cpu_group.monitored_barrier(_RENDEZVOUS_TIMEOUT, wait_all_ranks=False)
        return share_memory(nbytes, replicas)
    except RuntimeError as error:
        raise TieredKVError(
            "the ranks of this engine, which hold replicas of the same KV, could not agree to "
            f"share their memory: see the logs of the other ranks ({error})"
        ) from None


def _lazy_store(
    config: TieredKVConfig, vllm_config: VllmConfig, block_sizes: list[int]
) -> LazyStore | None:
    if config.store is not StorePolicy.LAZY:
        return None
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "store", '"lazy" needs vLLM\'s prefix caching; enable it or choose "eager"'
        )
    scheduler = vllm_config.scheduler_config
    per_step = sum(-(-scheduler.max_num_batched_tokens // size) for size in block_sizes)
    window = config.lazy_window or 2 * (per_step + len(block_sizes) * scheduler.max_num_seqs)
    return LazyStore(window)
