"""Facts about vLLM's forward pass: the KV-cache layout to request, whether it calls each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.config import BlockLayout, Mode, TieredKVConfig
from vllm_tiered_kv.connector.support import is_inside_multi_connector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BLOCK_OUTERMOST = "BLHNC"


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Returns the KV-cache layout to request from vLLM; None leaves the choice to vLLM."""
    from vllm.platforms import current_platform

    assert vllm_config.kv_transfer_config is not None
    config = TieredKVConfig.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if config.block_layout is not BlockLayout.CONTIGUOUS or config.mode is not Mode.TIERED:
        return None
    if not current_platform.is_cuda_alike():
        return None  # CPU copies gain nothing, and CPU attention supports one layout only
    if vllm_config.model_config.is_hybrid:
        # Blocks are as large as a recurrent state. vLLM cannot split them in this layout for
        # attention back-ends that need smaller ones, and would not start. Each layer's part of such
        # a block is large enough to move by DMA.
        return None
    # A MultiConnector refuses to start when two of its connectors request different layouts, and
    # this connector works with any layout.
    return None if is_inside_multi_connector() else _BLOCK_OUTERMOST


def calls_each_layer(forward_context: Any) -> bool:
    """Whether the coming forward calls `wait_for_layer_load` once before each layer.

    A full CUDA graph makes no such calls, and a forward without attention metadata runs no
    attention layers. With two micro-batches each layer runs twice, on two streams.
    """
    from vllm.config import CUDAGraphMode

    return (
        getattr(forward_context, "attn_metadata", None) is not None
        and getattr(forward_context, "cudagraph_runtime_mode", None) != CUDAGraphMode.FULL
        and getattr(forward_context, "ubatch_slices", None) is None
    )
