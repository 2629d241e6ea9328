"""Checks which vLLM versions and model features are supported, and says why one is not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_tiered_kv.core.vllm_releases import NEWEST_TESTED_VLLM, OLDEST_VLLM, parse_version
from vllm_tiered_kv.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

_UNSUPPORTED = {
    "CrossAttentionSpec": "the KV of an encoder's output depends on no prefix of tokens",
    "EncoderOnlyAttentionSpec": "an encoder has no KV cache to keep",
    "SinkFullAttentionSpec": "blocks of attention sinks belong to no request",
    "RSWASpec": "blocks between prompt and window are dropped while a request runs",
    "CircularBufferSpec": "a ring buffer is overwritten while its request runs",
}
"""Why kinds of KV cache are not supported, by the name of vLLM's specification class."""


_SPECULATIVE_METHODS = frozenset(
    {
        # Without KV of their own.
        *("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"),
        # Their layers are cached with those of the model.
        *("eagle", "eagle3", "mtp", "draft_model"),
    }
)
"""vLLM's speculative methods whose engines are cached."""


_DRAFTED_STATES = frozenset({"MAMBA2", "GDN_ATTN"})
"""Kinds of recurrent layers (vLLM's MambaAttentionBackendEnum) that are cached with speculative
decoding: their kernels keep a state for each drafted token."""


def require_supported_vllm(version: str, base: type) -> str | None:
    """Raises for a vLLM that cannot work; returns a warning for one that was not tested.

    `base` is vLLM's connector base class. Its hooks are checked too, because development builds
    have no useful version.
    """
    hooks = ("get_transfer_results", "on_new_request", "bind_kv_cache_manager", "finish_forward")
    missing = [hook for hook in hooks if not hasattr(base, hook)]
    number = parse_version(version)
    if missing or (number is not None and (0, 1) < number < OLDEST_VLLM):
        raise UnsupportedError(
            f"vllm-tiered-kv needs vLLM {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or newer, this is "
            f"{version}; upgrade vLLM or remove TieredKVConnector from --kv-transfer-config"
        )
    if number is not None and number > NEWEST_TESTED_VLLM:
        return (
            f"vllm-tiered-kv was tested with vLLM up to {NEWEST_TESTED_VLLM[0]}."
            f"{NEWEST_TESTED_VLLM[1]}, this is {version}"
        )
    return None


def is_inside_multi_connector() -> bool:
    """Whether a MultiConnector builds this connector. Its configuration does not say so, hence the
    look at the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith(".multi_connector"):
            return True
        frame = frame.f_back
    return False


def why_not_cacheable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason why this model's KV cache is not cached, or None if it can be."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    from vllm_tiered_kv.connector.worker.kv_layout import group_block_bytes

    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    if len(kv_cache_config.kv_cache_groups) > 255:
        return "the model has more than 255 KV-cache groups"
    apart = {
        SlidingWindowSpec: "sliding windows",
        SlidingWindowMLASpec: "sliding windows over latent KV",
        ChunkedLocalAttentionSpec: "chunked local attention",
        MambaSpec: "recurrent state",
    }
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kinds = {type(layer_spec) for layer_spec in iter_layer_specs(spec)}
        # Only known classes pass: a subclass may drop or rewrite blocks of a running request.
        for kind in kinds - {FullAttentionSpec, MLAAttentionSpec, *apart}:
            reason = _UNSUPPORTED.get(kind.__name__, "a kind of cache that is not supported so far")
            return f"KV-cache group {group_id} is {kind.__name__}: {reason}"
        for kind, name in apart.items():
            if kind in kinds and len(kinds) > 1:
                return f"KV-cache group {group_id} mixes {name} with other kinds of cache"
        if ChunkedLocalAttentionSpec in kinds:
            unusable = _why_not_chunked(kv_cache_config, spec)
            if unusable is not None:
                return unusable
        if SlidingWindowMLASpec in kinds:
            unusable = _why_not_latent_windows(spec)
            if unusable is not None:
                return unusable
        if MambaSpec in kinds:
            unusable = _why_not_recurrent(vllm_config, [*iter_layer_specs(spec)])
            if unusable is not None:
                return unusable
        if any(getattr(layer_spec, "non_causal", False) for layer_spec in iter_layer_specs(spec)):
            return "attention is not causal: the KV of a prefix depends on what follows it"
        if not group.enable_kv_transfer or group.host_resident or not spec.prefix_cacheable:
            return f"vLLM does not let KV-cache group {group_id} be transferred"
    empty = [n for n, nbytes in enumerate(group_block_bytes(kv_cache_config)) if not nbytes]
    if empty:
        return f"KV-cache group {empty[0]} has no layers on one of the ranks"
    if getattr(vllm_config.model_config, "is_diffusion", False):
        # Some answers end without the forward that writes the KV of their last tokens.
        return "diffusion does not compute tokens in order"
    every_token = _why_every_token(vllm_config)
    if every_token is not None:
        return every_token
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _SPECULATIVE_METHODS:
        return f"speculative decoding with {speculative.method} is not supported so far"
    parallel = vllm_config.parallel_config
    if parallel.prefill_context_parallel_size > 1:
        unusable = _why_not_prefill_context(vllm_config, kv_cache_config)
        if unusable is not None:
            return unusable
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "ranks started by an external launcher do not report to one scheduler"
    if parallel.pipeline_parallel_size > 1 and _is_legacy_ray(parallel):
        return (
            "the legacy Ray executor forwards only reports of the last pipeline stage; unset "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND or use --distributed-executor-backend mp"
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        # Blocks of a failed step must not be stored, its reports are lost, and vLLM calls no hook.
        return "with fault tolerance vLLM continues after failed steps, unknown to the cache"
    return None


def _why_not_chunked(kv_cache_config: KVCacheConfig, spec: KVCacheSpec) -> str | None:
    """The reason why chunked local attention is not cached, or None if it can be."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, iter_layer_specs

    chunks = {one.attention_chunk_size for one in iter_layer_specs(spec)}
    if any(chunk % spec.block_size for chunk in chunks):
        # vLLM's own hit then drops a block that is half in the chunk, and computes wrong KV behind.
        return (
            f"chunked local attention is cached only if chunks of {min(chunks)} tokens consist of "
            f"whole blocks, not of {spec.block_size} tokens; set another --block-size"
        )
    if all(
        isinstance(one, ChunkedLocalAttentionSpec)
        for group in kv_cache_config.kv_cache_groups
        for one in iter_layer_specs(group.kv_cache_spec)
    ):
        # A prefix of whole chunks then needs no block at all.
        return "chunked local attention is cached only beside layers of another kind"
    return None


def _why_not_latent_windows(spec: KVCacheSpec) -> str | None:
    """The reason why sliding windows over latent KV are not cached, or None if they can be."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.kv_cache_interface import iter_layer_specs

    if any(getattr(one, "bounded_replay", False) for one in iter_layer_specs(spec)):
        return (
            "sliding windows that vLLM recomputes after each hit (DeepSeek-V4.1, "
            "--swa-bounded-replay) are not supported so far"
        )
    if not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"):
        # vLLM would clear blocks while they are loaded.
        return "sliding windows over latent KV are cached only with vLLM 0.32 or newer"
    return None


def _why_not_recurrent(vllm_config: VllmConfig, specs: Sequence[MambaSpec]) -> str | None:
    """The reason why the states of recurrent layers are not cached, or None if they can be."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if any(spec.mamba_cache_mode != "align" for spec in specs):
        # Each request then has a single state, which every step overwrites.
        return (
            "recurrent state (Mamba, linear attention) is cached only with vLLM's prefix caching; "
            "set --enable-prefix-caching"
        )
    if vllm_config.speculative_config is not None:
        unusable = _why_not_recurrent_drafts(vllm_config, specs)
        if unusable is not None:
            return unusable
    if not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"):
        # vLLM would clear blocks while they are loaded.
        return "recurrent state (Mamba, linear attention) is cached only with vLLM 0.32 or newer"
    return None


def _why_not_recurrent_drafts(vllm_config: VllmConfig, specs: Sequence[MambaSpec]) -> str | None:
    """The reason why recurrent states are not cached beside speculative decoding, or None if they
    can be. vLLM then keeps a state for each drafted token, and copies the right one to a block's
    boundary after it has sampled."""
    if any(spec.mamba_type.name not in _DRAFTED_STATES for spec in specs):
        # Its kernels keep no state for each draft, so rejected ones stay in the state.
        return (
            "recurrent state of this kind is not cached with speculative decoding, only that of "
            "Mamba 2 and GDN"
        )
    if not vllm_config.model_config.is_hybrid:
        # Model Runner V1 copies no states in such models, so blocks with a hash may hold others.
        return (
            "recurrent state is cached with speculative decoding only in models that have attention"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        # All ranks but the last learn what was accepted only after the step's stores.
        return (
            "recurrent state is not cached with speculative decoding and pipeline parallelism; use "
            "--tensor-parallel-size alone"
        )
    return None


def _why_not_prefill_context(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason why an engine with prefill context parallelism (PCP) is not cached, or None if it
    can be. Its ranks divide the tokens of a step, and each layer gathers their KV before it writes
    it: a rank then holds the same blocks as without PCP, those that DCP alone gives it."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, iter_layer_specs

    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    if any(type(spec) is not MLAAttentionSpec or not spec.dcp_sharded for spec in specs):
        # vLLM runs PCP only in models with MLA. Whether layers of other kinds gather what they keep
        # is not known.
        return (
            "prefill context parallelism (PCP) is cached only with MLA in all layers, whose KV "
            "each of its ranks gathers"
        )
    if vllm_config.speculative_config is not None:
        # Ranks that draft different tokens compute different batches from then on.
        return (
            "prefill context parallelism (PCP) is not cached with speculative decoding: each rank "
            "drafts on its own, and the ranks draft alike only if their KV is equal to the bit"
        )
    return None


def _is_legacy_ray(parallel: ParallelConfig) -> bool:
    from vllm import envs

    backend = parallel.distributed_executor_backend
    if backend == "ray":
        # 0.33 has no legacy executor, and neither the variable.
        return not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    name = backend.__name__ if isinstance(backend, type) else str(backend).rpartition(".")[2]
    return name == "RayDistributedExecutor"


def _why_every_token(vllm_config: VllmConfig) -> str | None:
    """The reason why all tokens must be computed, even those whose KV is cached; None if there is
    none."""
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        # vLLM's own prefix cache is off then, and a missing token makes its pooler stop the engine.
        return "its pooling (MEAN, CLS or STEP) needs the outputs of all tokens"
    auxiliary = getattr(vllm_config, "aux_output_config", None)
    if (auxiliary is not None and auxiliary.enabled) or getattr(
        model, "enable_return_routed_experts", False
    ):
        # vLLM keeps the experts of its own cached blocks, and stops the engine if some are missing.
        return "the routed experts of all tokens are requested"
    return _why_not_invariant(vllm_config)


def _why_not_invariant(vllm_config: VllmConfig) -> str | None:
    """With batch invariance vLLM promises bit-identical results in any batch. Some attention
    backends cannot keep this after a prefix hit, so vLLM turns its own prefix cache off for them,
    in the workers."""
    from vllm import envs

    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    is_known = chosen is not None and chosen.name not in ("FLASHINFER", "TRITON_MLA")
    if not envs.VLLM_BATCH_INVARIANT or is_known:
        return None
    return (
        "with VLLM_BATCH_INVARIANT, vLLM reuses no prefixes with FLASHINFER or TRITON_MLA; "
        "choose another with --attention-backend"
    )


def why_inexact(vllm_config: VllmConfig) -> str | None:
    """A known reason why answers after a hit differ from those without one, by more than the
    summation order; None if there is none."""
    import torch
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and vllm_config.model_config.use_mla):
        return None
    chosen = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    is_reference = chosen is not None and chosen.name == "CPU_MLA"
    if not is_reference and torch.cpu._is_amx_tile_supported():
        return None
    return (
        "vLLM's reference kernels for latent attention on CPUs (CPU_MLA) round a cached prefix to "
        "bfloat16, and vLLM's own prefix cache is off with them: answers after a hit may differ "
        "from those without"
    )
