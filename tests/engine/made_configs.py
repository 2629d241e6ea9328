"""Configurations as vLLM hands them to a connector, made without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

WITH_RECURRENT_STATES = pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"),
    reason="recurrent states are cached only with vLLM 0.32 or newer",
)
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)


def one_group(**spec: Any) -> KVCacheConfig:
    """Four layers of one kind, with places in memory."""
    layers = [f"layer.{i}" for i in range(4)]
    shape = {**SHAPE, "dtype": torch.float32, **spec}
    attention = FullAttentionSpec(**shape)
    page = attention.page_size_bytes
    tensor = KVCacheTensor(
        size=page * 8 * len(layers), layers=layers, layer_stride=page * 8, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layers, attention)],
        kv_cache_layout="LBHNC",
    )


def engine_config(model: Path, **engine: Any) -> VllmConfig:
    settings = {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        **engine,
    }
    return EngineArgs(**settings).create_engine_config()


def bare_config(**changes: object) -> SimpleNamespace:
    """As much of it as decides whether a model can be cached."""
    return SimpleNamespace(
        **{
            "model_config": bare_model(),
            "speculative_config": None,
            "parallel_config": bare_parallel(),
            **changes,
        }
    )


def bare_model(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"runner_type": "generate", **changes})


def bare_parallel(**changes: object) -> SimpleNamespace:
    one = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "world_size": 2,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**{**one, **changes})


def groups(*specs: object, **changes: object) -> KVCacheConfig:
    """A group of one layer for each spec."""
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[
            KVCacheTensor(size=0, layers=[f"l{i}"], layer_stride=0, block_stride=0)
            for i in range(len(specs))
        ],
        kv_cache_groups=[
            KVCacheGroupSpec([f"l{i}"], spec, **changes) for i, spec in enumerate(specs)
        ],
    )
