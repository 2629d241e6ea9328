"""TieredKVConnector: the class that vLLM loads. It delegates to the half of its role."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_tiered_kv.connector.support import (
    is_inside_multi_connector,
    require_supported_vllm,
    why_inexact,
    why_not_cacheable,
)

# The imports below fail with older releases. This check comes first, with a clear message.
require_supported_vllm(vllm.__version__, KVConnectorBase_V1)

from vllm.distributed.kv_transfer import (  # noqa: E402
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_tiered_kv.config import Mode, TieredKVConfig  # noqa: E402
from vllm_tiered_kv.connector import idle_steps, same_process  # noqa: E402
from vllm_tiered_kv.connector.assembly import make_scheduler_half, make_worker_half  # noqa: E402
from vllm_tiered_kv.connector.metadata import (  # noqa: E402
    TieredKVHandshake,
    TieredKVMetadata,
    TieredKVWorkerMetadata,
)
from vllm_tiered_kv.connector.scheduler.scheduler_half import SchedulerHalf  # noqa: E402
from vllm_tiered_kv.connector.stats import TieredKVPromMetrics, TieredKVStats  # noqa: E402
from vllm_tiered_kv.connector.vllm_log import join_vllm_log  # noqa: E402
from vllm_tiered_kv.connector.worker.forward_hooks import calls_each_layer, wanted_layout  # noqa: E402
from vllm_tiered_kv.connector.worker.worker_half import WorkerHalf  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32 does not ask where hits come from
    CacheHitSource = None

logger = logging.getLogger(__name__)

_RECOMPUTE_ADVICE = (
    "a failed cache load will end its request with an error: add "
    '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector" in '
    "--kv-transfer-config"
)


class TieredKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV cache in tiers beyond the GPU. vLLM builds one in the scheduler and one in
    each worker, and calls each from a single thread."""

    _cache_hit_source = getattr(CacheHitSource, "HOST", None)

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        join_vllm_log()
        warning = require_supported_vllm(vllm.__version__, KVConnectorBase_V1)
        super().__init__(vllm_config, role, kv_cache_config)
        config = TieredKVConfig.load(self._kv_transfer_config.kv_connector_extra_config)
        self.scheduler_half: SchedulerHalf | None = None
        self.worker_half: WorkerHalf | None = None
        self._idle_steps: idle_steps.IdleSteps | None = None
        self._manager: KVCacheManager | None = None
        self._is_inside_multi = is_inside_multi_connector()
        # A failed load is recomputed, never an error. vLLM reads this after it has built us.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"

        reason = why_not_cacheable(vllm_config, kv_cache_config)
        self._is_refused = self._must_report_refusal = reason is not None
        if reason is not None or config.mode is Mode.NAIVE:
            if reason is not None and role is KVConnectorRole.SCHEDULER:
                logger.warning("the KV cache of this model is not tiered: %s", reason)
            return
        if role is KVConnectorRole.SCHEDULER:
            for message in (warning, why_inexact(vllm_config)):
                if message is not None:
                    logger.warning(message)
            logger.info("tiered KV cache: %s", config.describe())
            self._open_scheduler_half(config)
        elif config.mode is Mode.TIERED:
            self.worker_half = make_worker_half(
                config, vllm_config, kv_cache_config, self._is_inside_multi
            )
            same_process.register_worker(self.worker_half, vllm_config)

    def _open_scheduler_half(
        self, config: TieredKVConfig, block_bytes: tuple[int, ...] | None = None
    ) -> None:
        """`block_bytes`: what the workers report, if it is not what the scheduler can see."""
        half = make_scheduler_half(
            config, self._vllm_config, self._kv_cache_config, self._is_inside_multi, block_bytes
        )
        self.scheduler_half = half
        if half.remote is not None and idle_steps.are_needed(self._vllm_config):
            self._idle_steps = idle_steps.IdleSteps(half, self._vllm_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return wanted_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store only causes a miss later

    # ---- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker_half is None:
            return
        self.worker_half.register_kv_caches(kv_caches, self._kv_cache_config)
        if self._is_inside_multi and has_kv_transfer_group():
            outer = get_kv_transfer_group()
            if outer._kv_transfer_config.kv_load_failure_policy != "recompute":
                logger.warning(_RECOMPUTE_ADVICE)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._is_inside_multi:
            return None  # a MultiConnector passes only one connector's handshake, and to all
        if self.worker_half is not None:
            return TieredKVHandshake(self.worker_half.block_bytes)
        # The model is refused on this rank. An empty answer keeps the scheduler from waiting.
        return TieredKVHandshake(()) if self._is_refused else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self.worker_half is not None:
            assert isinstance(kv_connector_metadata, TieredKVMetadata)
            self.worker_half.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker_half is not None:
            self.worker_half.start_loads(self._metadata(), calls_each_layer(forward_context))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self.worker_half is not None:
            self.worker_half.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass  # blocks are stored whole, after the forward

    def finish_forward(self) -> None:
        if self.worker_half is not None:
            self.worker_half.finish_step_loads()

    def wait_for_save(self) -> None:
        if self.worker_half is not None:
            self.worker_half.after_forward()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self.worker_half is None:
            return KVConnectorTransferResults()
        return self.worker_half.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_half.take_invalid_blocks() if self.worker_half is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self.worker_half is not None:
            return self.worker_half.worker_metadata()
        if not (self._is_inside_multi and self._must_report_refusal):
            return None
        self._must_report_refusal = False
        return TieredKVWorkerMetadata(block_bytes={self._vllm_config.parallel_config.rank: ()})

    def _metadata(self) -> TieredKVMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, TieredKVMetadata)
        return metadata

    # ---- scheduler ------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self.scheduler_half is not None:
            self.scheduler_half.bind_kv_cache_manager(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All ranks must have the block sizes that the scheduler expects, or slots would not match.

        vLLM shows the scheduler only the first layer of each group. Where the layers of a group
        differ in size, as latent KV and its indexer, the sizes that all ranks report replace those
        of the scheduler. No request has arrived by then."""
        if self.scheduler_half is None:
            return
        sizes = {
            rank: handshake.block_bytes
            for rank, handshake in metadata.items()
            if isinstance(handshake, TieredKVHandshake)
        }
        half, reported = self.scheduler_half, set(sizes.values())
        if len(reported) == 1 and reported.isdisjoint({(), half.block_bytes}):
            half.shutdown()
            config = TieredKVConfig.load(self._kv_transfer_config.kv_connector_extra_config)
            self._open_scheduler_half(config, reported.pop())
            if self._manager is not None:
                self.scheduler_half.bind_kv_cache_manager(self._manager)
            return
        for rank, block_bytes in sizes.items():
            self._check_block_bytes(rank, block_bytes)

    def _check_block_bytes(self, rank: object, block_bytes: tuple[int, ...]) -> None:
        """Switches the cache off if a rank has other block sizes than the scheduler expects."""
        half = self.scheduler_half
        if half is None or block_bytes == half.block_bytes:
            return
        logger.warning(
            "the KV cache of this model is not tiered: blocks of rank %s have %s bytes, those of "
            "the first rank %s",
            rank,
            block_bytes,
            half.block_bytes,
        )
        half.shutdown()
        self.scheduler_half = None

    def on_new_request(self, request: Request) -> None:
        if self.scheduler_half is not None:
            self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.scheduler_half is None:
            return 0, False
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self.scheduler_half is not None:
            self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        disk = 0
        if self.scheduler_half is not None:
            disk = min(num_external_tokens, self.scheduler_half.loaded_from_disk(request))
        tokens = {
            CacheHitSource.HOST: num_external_tokens - disk,
            CacheHitSource.DISK: disk,
        }
        return {source: count for source, count in tokens.items() if count}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.scheduler_half is None:
            return TieredKVMetadata()
        return self.scheduler_half.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, TieredKVWorkerMetadata):
            for rank, block_bytes in metadata.block_bytes.items():
                self._check_block_bytes(rank, block_bytes)
        if self.scheduler_half is not None:
            self.scheduler_half.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = None
        if self.scheduler_half is not None:
            answer = self.scheduler_half.request_finished(request, block_ids)
        # A MultiConnector fails if two of its connectors answer under the same key.
        return False, None if self._is_inside_multi else answer

    def has_pending_push_work(self) -> bool:
        return self.scheduler_half is not None and self.scheduler_half.has_pending_push_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM calls this once a step, after it has processed the step's output.
        if self._idle_steps is not None and self.scheduler_half is not None:
            self._idle_steps.run()
        return self.scheduler_half.take_events() if self.scheduler_half is not None else ()

    def reset_cache(self) -> bool | None:
        return self.scheduler_half.reset_cache() if self.scheduler_half is not None else True

    # ---- both -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self.worker_half is not None:
            self.worker_half.shutdown()
        if self.scheduler_half is not None:
            self.scheduler_half.shutdown()

    def get_kv_connector_stats(self) -> TieredKVStats | None:
        return self.scheduler_half.stats() if self.scheduler_half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredKVStats:
        return TieredKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TieredKVPromMetrics:
        return TieredKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
