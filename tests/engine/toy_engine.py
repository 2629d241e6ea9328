"""A toy engine: vLLM's real scheduler and our real connector around a fully checkable model.

The KV of a token is a hash of the whole prefix up to it, so every position has exactly one right
value, and every read of the cache is compared with it. Tests choose how slow copies are. A store
reads its blocks some polls later, or when a step that overwrites them waits for it. A load reads
its slots and writes its blocks some polls later. So the model detects any block or slot that is
reused too early.

With `async_scheduling`, vLLM's AsyncScheduler runs with two steps in flight: a step is scheduled
and executed before the output of the one before it is processed.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from vllm import SamplingParams
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.delayed_copier import LAYERS, DelayedCopier
from tests.engine.toy_groups import EXPORTED_STATE, Chunks, ToyGroup, is_state, kv_cache_config
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.device.arena import Arena

VOCAB = 50
_MASK = (1 << 61) - 1


def next_token(state: int) -> int:
    return 3 + (state >> 20) % (VOCAB - 3)


def play(prompt: Sequence[int], count: int, salt: str = "") -> tuple[list[int], np.ndarray]:
    """The model's answer to a prompt and the right KV of every token, computed without a cache."""
    tokens, kv = list(prompt), []
    state = sum(map(ord, salt))
    for position in range(len(prompt) + count):
        if position == len(tokens):
            tokens.append(next_token(state))
        state = (state * 6364136223846793005 + tokens[position] + 1442695040888963407) & _MASK
        kv.append(state)
    return tokens[len(prompt) :], np.array(kv, np.int64)


def _ours(connector: Any) -> TieredKVConnector:
    """Our connector: this one, or the first inside a MultiConnector."""
    return getattr(connector, "sub_connectors", [connector])[0]


@dataclass
class _Running:
    blocks: list[list[int]]  # per group
    computed: int  # tokens before this step's


@dataclass
class Finished:
    tokens: list[int]
    status: RequestStatus


@dataclass
class ToyEngine:
    """One engine with one worker. Tests add requests and call `step` or `run`, in one thread."""

    model: Path
    async_scheduling: bool = False
    block_size: int = 4  # of the first group
    windows: tuple[int | Chunks | None, ...] = (None,)  # for each group, see `toy_groups.STATE`
    block_sizes: tuple[int, ...] = ()  # per group, if they differ: up to twice the first
    hash_size: int = 0  # tokens of a block hash; 0: the smallest block size
    retention: int | None = None  # vLLM's prefix_cache_retention_interval
    gpu_blocks: int = 64
    cpu_blocks: int = 32
    max_tokens_per_step: int = 32
    max_seqs: int = 8
    prefix_caching: bool = True
    second_runner: bool = False  # vLLM's Model Runner V2, see `_update_batch`
    store_delay: int | None = None  # polls until a store reads its blocks, unless a step waits
    ranks: int = 1  # use `toy_ranks.RankedToyEngine` for more than one
    replicas: int = 1  # how many consecutive ranks hold the same KV
    extra_config: dict[str, Any] = field(default_factory=dict)
    parallel_config: dict[str, Any] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        # vLLM runs prefill context parallelism with no other.
        self.second_runner |= self.parallel_config.get("prefill_context_parallel_size", 1) > 1
        block_bytes = len(LAYERS) * self.block_size * 8
        slot_bytes = -(-block_bytes // 64) * 64
        args = EngineArgs(
            model=str(self.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            max_num_seqs=self.max_seqs,
            enable_prefix_caching=self.prefix_caching,
            kv_transfer_config=self._transfer_config(
                {"cpu_memory": self.cpu_blocks * slot_bytes * self.ranks, **self.extra_config}
            ),
            **self.engine_args,
        )
        self.config = args.create_engine_config()
        # Set only now: vLLM refuses this runner in `create_engine_config` without a GPU.
        version = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if self.second_runner else {}
        with mock.patch.dict(os.environ, version):
            self._build(self.config, slot_bytes)

    def _build(self, config: VllmConfig, slot_bytes: int) -> None:
        config.cache_config.block_size = self.block_size
        config.cache_config.num_gpu_blocks = self.gpu_blocks
        config.parallel_config.tensor_parallel_size = self.ranks
        config.parallel_config.world_size = self.ranks
        for name, value in self.parallel_config.items():
            setattr(config.parallel_config, name, value)
        self._adjust(config)
        config.scheduler_config.async_scheduling = self.async_scheduling
        config.scheduler_config.max_num_batched_tokens = self.max_tokens_per_step
        sizes = self.block_sizes or [self.block_size] * len(self.windows)
        parallel = config.parallel_config
        self.groups = [
            ToyGroup(
                number,
                window,
                size,
                self.block_size * 8,
                1 if is_state(window) else parallel.decode_context_parallel_size,
                parallel.cp_kv_cache_interleave_size,
                is_latent=parallel.prefill_context_parallel_size > 1,
                drafts=config.num_speculative_tokens if is_state(window) else 0,
            )
            for number, (window, size) in enumerate(zip(self.windows, sizes, strict=True))
        ]
        spans = [group.span for group in self.groups]
        self.alignment = math.lcm(*spans)
        if any(group.is_recurrent for group in self.groups):
            config.cache_config.mamba_cache_mode = "align"
        hash_size = self.hash_size or min(spans)
        self.kv_cache_config = kv_cache_config(self.groups, self.gpu_blocks, hash_size)
        tensor_ranks = config.parallel_config.tensor_parallel_size
        self.kv_cache_config.kv_tp_replicas = min(self.replicas, tensor_ranks)
        if self.retention is not None:
            self.kv_cache_config.prefix_cache_retention_interval = self.retention
        scheduler_class = AsyncScheduler if self.async_scheduling else Scheduler
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=self.alignment,
            hash_block_size=hash_size,
            log_stats=True,
        )
        self.half = _ours(self.scheduler.connector).scheduler_half
        _ours(self.scheduler.connector)._idle_steps = None  # `run` steps until the engine is idle
        # The ranks of a toy engine are built one after the other and cannot communicate.
        device = "cuda" if self.second_runner else config.device_config.device_type
        with (
            mock.patch.object(assembly, "_share_among_replicas", return_value=None),
            mock.patch.object(config.device_config, "device_type", device),
        ):
            self._open_workers()
        self.caches = [np.full((self.gpu_blocks, self.block_size), -2, np.int64) for _ in LAYERS]
        geometry = self.half.index.geometry
        arena = Arena(geometry.capacity_bytes)
        self.arena = np.lib.stride_tricks.as_strided(
            arena.bytes_at(0, arena.nbytes).view(np.int64),
            (geometry.num_slabs * geometry.slots_per_slab, len(LAYERS), self.block_size),
            (slot_bytes, self.block_size * 8, 8),
        )
        self.arena[:] = -3
        self.copier = DelayedCopier(self.caches, self.arena, random.Random(self.seed + 1))
        self.copier.store_delay = self.store_delay
        worker_half = _ours(self.worker).worker_half
        if worker_half is not None:
            worker_half._copier = self.copier
            worker_half.arena = arena
            worker_half.block_bytes = self.half.block_bytes
        self.depth = 2 if self.async_scheduling else 1
        self._running: dict[str, _Running] = {}
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._next_id = 0
        self._truth: dict[str, np.ndarray] = {}
        self.reported_loads: list[str] = []
        self.layer_calls = 0.5  # probability that a forward calls the connector at each layer
        self._calls_layers = False
        self.idle = False

    def _open_workers(self) -> None:
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.kv_cache_config
        )

    def _adjust(self, config: VllmConfig) -> None:
        """For subclasses: sets options that vLLM does not allow on this machine."""

    def _transfer_config(self, options: dict[str, Any]) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="TieredKVConnector",
            kv_connector_module_path="vllm_tiered_kv.connector.connector",
            kv_role="kv_both",
            kv_connector_extra_config=options,
        )

    # ---- what a client does ---------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        salt: str = "",
        model: str = "",
        control: dict[str, Any] | None = None,
        **request_args: Any,
    ) -> str:
        """`model`: anything besides the salt that changes the KV of the tokens, like an adapter.
        `control`: what the request asks of the cache, see `request_control`."""
        request_id = f"r{self._next_id}"
        self._next_id += 1
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"tiered_kv": control}} if control else None,
            ),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self._hasher,
            **request_args,
        )
        self.requests[request_id] = request
        # More tokens than requested: asynchronous scheduling runs a step past the end.
        self._truth[request_id] = play(prompt, max_tokens + 2, salt + model)[1]
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def run(self, limit: int = 3000, seconds: float = 60) -> None:
        """Steps until all requests are finished and all stores and puts are done."""
        end = time.monotonic() + seconds
        while limit > 0 and time.monotonic() < end:
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            self.step()
            if self.idle:
                time.sleep(0.001)  # only threads make progress now
            else:
                limit -= 1
        raise AssertionError("the engine did not become idle: a request hangs")

    def step(self) -> None:
        if len(self._in_flight) < self.depth and self.scheduler.has_requests():
            output = self.scheduler.schedule()
            remote = self.half is not None and self.half.remote is not None
            self.idle = remote and not output.total_num_scheduled_tokens
            self._in_flight.append((output, self._execute(output)))
            if len(self._in_flight) < self.depth and output.total_num_scheduled_tokens:
                return  # the next step is scheduled before this one's output is processed
        self._process_oldest()

    def land(self) -> None:
        """Processes the outputs of all steps in flight."""
        while self._in_flight:
            self._process_oldest()

    def _process_oldest(self) -> None:
        if self._in_flight:
            self.scheduler.update_from_output(*self._in_flight.popleft())
            self._collect()
        self.half.index.check()

    # ---- what a worker does ---------------------------------------------------------------------

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        if not self._in_flight:
            self.copier.last_writes = {}
        if self.second_runner:
            self._prepare(output)  # before any hook
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        if not self.second_runner:
            self._prepare(output)
        context = SimpleNamespace(
            attn_metadata={} if self.rng.random() < self.layer_calls else None,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            ubatch_slices=None,
        )
        if output.has_sync_kv_loads:
            # At this point vLLM may zero new blocks, including those to load.
            self.copier.fenced = False
            self.worker.start_load_kv(context)
        self._calls_layers = context.attn_metadata is not None
        before = [cache.copy() for cache in self.caches] if self.async_scheduling else []
        sampled = {r: self._forward(r, n) for r, n in output.num_scheduled_tokens.items()}
        changed = [was != cache for was, cache in zip(before, self.caches, strict=False)]
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(context)
        self.worker.wait_for_save()
        self.copier.last_writes = {
            layer: (places, self.caches[layer][places]) for layer, places in enumerate(changed)
        }
        results = self.worker.get_transfer_results(output.finished_req_ids)
        self.reported_loads += results.finished_recving
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=[sampled[r] for r in ids],
            kv_connector_output=connector_output,
        )

    def _prepare(self, output: SchedulerOutput) -> None:
        """Updates the batch, and writes blocks as vLLM does before the forward: clears new ones,
        copies those that requests share, and moves recurrent states."""
        self._update_batch(output)
        for cache in self.caches:
            cache[output.new_block_ids_to_zero or []] = 0
            for copy in getattr(output, "kv_cache_block_copies", None) or ():  # from 0.32 on
                cache[copy.dst_block_id] = cache[copy.src_block_id]
        for request_id, count in output.num_scheduled_tokens.items():
            span = self._span(request_id, count)
            for group, blocks in zip(self.groups, self._running[request_id].blocks, strict=True):
                if group.is_recurrent:
                    self._move_state(request_id, group, blocks, span)

    def _span(self, request_id: str, count: int) -> range:
        """The tokens of a step."""
        start = self._running[request_id].computed
        return range(start, start + count)

    def _move_state(
        self, request_id: str, group: ToyGroup, blocks: Sequence[int], span: range
    ) -> None:
        """Copies the state before the tokens of `span` to the block where they write theirs, which
        vLLM does before the forward."""
        before, after = (span.start - 1) // group.block_size, (span.stop - 1) // group.block_size
        if span.start and before != after:
            for cache in self.caches:
                cache[blocks[after]] = cache[blocks[before]]

    def _export_state(self, group: ToyGroup, blocks: list[int], right: Any, span: range) -> None:
        """Writes the state at a boundary within these tokens where the scheduler expects it."""
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        coordinator = self.scheduler.kv_cache_manager.coordinator
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [span.stop],
            [len(span)],
            hash_block_size=coordinator.hash_block_size,
            mamba_block_size=group.block_size,
            checkpoint_alignment=1,
            drop_eagle_block=self.scheduler.use_eagle_block_drop,
            cache_hit_alignment_tokens=coordinator._cache_hit_alignment_tokens,
        )
        if offset:
            for layer, cache in enumerate(self.caches):
                state = group.state(right, span.start + offset, layer)
                group.rows(cache)[blocks[column]] = state

    def _update_batch(self, output: SchedulerOutput) -> None:
        """Applies the scheduler output. Model Runner V2 counts the tokens of a request on the GPU,
        so it does not notice when the scheduler rewinds a running request."""
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._running[new.req_id] = _Running(
                [list(ids) for ids in new.block_ids], new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            running = self._running[request_id]
            if not self.second_runner or request_id in cached.resumed_req_ids:
                running.computed = computed
            if request_id in cached.resumed_req_ids:
                running.blocks = [list(ids) for ids in blocks]
            elif blocks:
                for table, ids in zip(running.blocks, blocks, strict=True):
                    table += ids

    def _forward(self, request_id: str, count: int) -> list[int]:
        running = self._running[request_id]
        right, span = self._right(request_id), self._span(request_id, count)
        start, stop = span.start, span.stop
        if self.second_runner:
            running.computed = stop
        half = _ours(self.worker).worker_half
        for group, blocks in zip(self.groups, running.blocks, strict=True):
            if half is not None and half._step_loads._invalid_blocks & set(blocks):
                # It computes wrong KV from invalid blocks. vLLM is told and rewinds the request.
                (table, place), written = group.table(blocks, stop), group.own(start, stop)
                for cache in self.caches:
                    group.rows(cache)[table[written], place[written]] = -4
                return [VOCAB]
            group.forward(request_id, self.caches, blocks, right, span, self._before_layer)
            if group.window == EXPORTED_STATE:
                self._export_state(group, blocks, right, span)
        # A chunk that ends before the last known token samples nothing: a part of a prompt, or of a
        # request that restarts after a preemption.
        known = self.requests[request_id].num_tokens
        return [next_token(int(right[stop - 1]))] if stop >= known else []

    def _right(self, request_id: str) -> np.ndarray:
        return self._truth[request_id]

    def _before_layer(self, layer: int) -> None:
        if self._calls_layers:
            self.worker.wait_for_layer_load(LAYERS[layer])

    # ---- after a step ---------------------------------------------------------------------------

    def _collect(self) -> None:
        for request_id, request in list(self.requests.items()):
            if request.is_finished() and request_id not in self.finished:
                self.finished[request_id] = Finished(list(request.output_token_ids), request.status)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def drop_gpu_cache(self) -> None:
        assert self.scheduler.reset_prefix_cache()

    def assert_at_rest(self) -> None:
        """Checks that nothing is pinned, reserved or leaked."""
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.gpu_blocks - 1  # the null block
        assert not self.half.index.pinned_slots()
        assert not self.half.ledger.has_open_stores
        assert not self.half.ledger._loads
        assert not self.half.ledger.has_open_puts
        end = time.monotonic() + 30
        remote = self.half.remote
        daemons = remote._lookups._local_daemons.values() if remote is not None else ()
        while any(m.alive and m._lookup_leases for one in list(daemons) for m in one._mapped):
            # The answer to a dropped lookup may still arrive.
            assert time.monotonic() < end, "a daemon's lease was not released"
            time.sleep(0.001)
        assert not self.half._requests
        assert not self.half._uncached
        assert not self.half.stores.has_deferred
        self.half.index.check()
