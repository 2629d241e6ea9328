"""Models the cache leaves alone, ranks that do not agree: one sentence, and the engine goes on."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import (
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.engine.made_configs import (
    FULL,
    SHAPE,
    WITH_RECURRENT_STATES,
    bare_config,
    bare_model,
    bare_parallel,
    groups,
)
from tests.engine.toy_engine import ToyEngine
from vllm_tiered_kv.cache.planner import STATE_WINDOW
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.connector.metadata import TieredKVHandshake, TieredKVMetadata
from vllm_tiered_kv.connector.support import why_not_cacheable
from vllm_tiered_kv.connector.worker.forward_hooks import wanted_layout
from vllm_tiered_kv.connector.worker.kv_layout import (
    chunked_groups,
    group_block_bytes,
    group_windows,
    recurrent_groups,
)

WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKS = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
LATENT = {**SHAPE, "num_kv_heads": 1, "sliding_window": 64}
OVERWRITTEN = MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))
STATE = replace(
    OVERWRITTEN,
    mamba_cache_mode="align",
    shapes=((4, 8), (2, 8)),
    dtypes=(torch.float32, torch.bfloat16),
    page_size_padded=512,
)


def test_full_attention_is_cached_in_one_group_or_several() -> None:
    assert why_not_cacheable(bare_config(), groups(FULL)) is None
    assert why_not_cacheable(bare_config(), groups(FULL, replace(FULL, block_size=32))) is None
    mla = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})
    assert why_not_cacheable(bare_config(), groups(mla)) is None


def test_sliding_windows_are_cached_alone_and_beside_full_attention() -> None:
    wide = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"l0": WINDOW, "l2": replace(WINDOW, head_size=64)}
    )
    for cache in (groups(WINDOW), groups(FULL, WINDOW, WINDOW), groups(wide)):
        assert why_not_cacheable(bare_config(), cache) is None
    assert group_windows(groups(FULL, WINDOW, wide)) == [None, 64, 64]
    retained = replace(WINDOW, extra_retained_tokens=3)
    assert group_windows(groups(retained)) == [67]


def test_windows_over_latent_kv_are_cached() -> None:
    cache = groups(MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1}), SlidingWindowMLASpec(**LATENT))
    assert group_windows(cache) == [None, 64]
    if hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"):
        assert why_not_cacheable(bare_config(), cache) is None
    else:
        assert "only with vLLM 0.32" in str(why_not_cacheable(bare_config(), cache))


def test_chunked_attention_is_cached_beside_full_attention() -> None:
    sizes = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"l0": CHUNKS, "l2": replace(CHUNKS, head_size=64)}
    )
    for cache in (groups(CHUNKS, FULL), groups(FULL, CHUNKS, CHUNKS), groups(sizes, FULL)):
        assert why_not_cacheable(bare_config(), cache) is None
    cache = groups(FULL, CHUNKS, sizes)
    assert group_windows(cache) == [None, 64, 64]
    assert chunked_groups(cache) == [1, 2]


@WITH_RECURRENT_STATES
def test_recurrent_states_are_cached_alone_and_beside_attention() -> None:
    sizes = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"l0": STATE, "l2": replace(STATE, shapes=((8, 8), (2, 8)))}
    )
    for cache in (groups(STATE), groups(FULL, STATE, WINDOW), groups(sizes)):
        assert why_not_cacheable(bare_config(), cache) is None
    cache = groups(FULL, STATE, sizes)
    assert group_windows(cache) == [None, STATE_WINDOW, STATE_WINDOW]
    assert recurrent_groups(cache) == [1, 2]
    assert group_block_bytes(groups(STATE)) == [4 * 8 * 4 + 2 * 8 * 2]  # without the padding


NGRAM = SimpleNamespace(method="ngram", uses_draft_kv_cache=lambda: False)


@WITH_RECURRENT_STATES
@pytest.mark.parametrize("kind", ["MAMBA2", "GDN_ATTN"])
def test_recurrent_states_with_drafts_are_cached_beside_attention(kind: str) -> None:
    state = replace(STATE, num_speculative_blocks=3, mamba_type=MambaAttentionBackendEnum[kind])
    config = bare_config(speculative_config=NGRAM, model_config=bare_model(is_hybrid=True))
    assert why_not_cacheable(config, groups(FULL, state)) is None


@pytest.mark.parametrize(
    ("kind", "model", "parallel", "reason"),
    [
        ("MAMBA1", {}, {}, "only that of Mamba 2 and GDN"),
        ("SHORT_CONV", {}, {}, "only that of Mamba 2 and GDN"),
        ("MAMBA2", {"is_hybrid": False}, {}, "only in models that have attention"),
        ("MAMBA2", {}, {"pipeline_parallel_size": 2}, "and pipeline parallelism"),
    ],
)
def test_recurrent_states_with_drafts_are_uncached_where_they_may_be_wrong(
    kind: str, model: dict[str, Any], parallel: dict[str, Any], reason: str
) -> None:
    state = replace(STATE, num_speculative_blocks=3, mamba_type=MambaAttentionBackendEnum[kind])
    config = bare_config(
        speculative_config=NGRAM,
        model_config=bare_model(**{"is_hybrid": True, **model}),
        parallel_config=bare_parallel(**parallel),
    )
    said = why_not_cacheable(config, groups(FULL, state))
    assert reason in (said or "")


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (groups(), "no KV cache"),
        (groups(FULL, SlidingWindowMLASpec(**LATENT, bounded_replay=True)), "swa-bounded-replay"),
        (groups(CHUNKS), "only beside layers of another kind"),
        (groups(FULL, replace(CHUNKS, attention_chunk_size=72)), "chunks of 72 tokens consist of"),
        (groups(FULL, OVERWRITTEN), "recurrent state (Mamba, linear attention) is cached only"),
        (groups(FULL, CrossAttentionSpec(**SHAPE)), "encoder"),
        (groups(SinkFullAttentionSpec(**SHAPE, sink_len=4)), "sinks"),
        (groups(FULL, CircularBufferSpec(**SHAPE)), "ring buffer"),
        (groups(RSWASpec(**SHAPE, rswa_window=64)), "RSWASpec: blocks between"),
        (groups(FULL, enable_kv_transfer=False), "does not let"),
        (groups(replace(FULL, non_causal=True)), "not causal"),
    ],
)
def test_unsupported_caches_are_uncached(cache: KVCacheConfig, reason: str) -> None:
    said = why_not_cacheable(bare_config(), cache)
    assert said is not None
    assert reason in said
    assert "\n" not in said


def test_rank_without_layers_of_a_group_is_uncached() -> None:
    cache = groups(FULL, WINDOW)
    del cache.kv_cache_tensors[1]
    assert "group 1 has no layers" in (why_not_cacheable(bare_config(), cache) or "")


def test_unsupported_engines_are_uncached() -> None:
    for method in ("dflash", "dspark", "extract_hidden_states", "a newer one"):
        drafts = bare_config(speculative_config=SimpleNamespace(method=method))
        assert f"with {method} is not" in (why_not_cacheable(drafts, groups(FULL)) or "")
    diffusion = bare_model(is_diffusion=True)
    said = why_not_cacheable(bare_config(model_config=diffusion), groups(FULL))
    assert "diffusion" in (said or "")
    for changes, reason in (
        ({"distributed_executor_backend": "external_launcher"}, "external launcher"),
        ({"enable_fault_tolerance": True}, "fault tolerance"),
    ):
        said = why_not_cacheable(
            bare_config(parallel_config=bare_parallel(**changes)), groups(FULL)
        )
        assert reason in (said or "")


def test_prefill_context_parallelism_is_cached_with_mla_alone() -> None:
    mla = MLAAttentionSpec(**{**SHAPE, "num_kv_heads": 1})

    def said(*specs: object, **changes: object) -> str:
        ranks = bare_parallel(prefill_context_parallel_size=2)
        config = bare_config(parallel_config=ranks, **changes)
        return why_not_cacheable(config, groups(*specs)) or ""

    layers = {"l0": mla, "indexer": replace(mla, head_size=132)}
    assert said(mla) == said(UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers)) == ""
    for others in (
        (FULL,),
        (mla, FULL),
        (mla, WINDOW),
        (replace(mla, dcp_sharded=False),),
    ):
        assert "only with MLA in all layers" in said(*others)
    drafts = SimpleNamespace(method="mtp")
    assert "not cached with speculative decoding" in said(mla, speculative_config=drafts)


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model"])
def test_speculating_engines_are_cached(method: str) -> None:
    drafts = bare_config(speculative_config=SimpleNamespace(method=method))
    assert why_not_cacheable(drafts, groups(FULL, is_eagle_group=True)) is None


@pytest.mark.parametrize("backend", ["ray", "vllm.v1.executor.ray_executor.RayDistributedExecutor"])
def test_pipeline_whose_stages_do_not_report_is_uncached(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    def said(stages: int) -> str | None:
        parallel = bare_parallel(
            distributed_executor_backend=backend, pipeline_parallel_size=stages
        )
        return why_not_cacheable(bare_config(parallel_config=parallel), groups(FULL))

    variable = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    if variable in envs.environment_variables:
        monkeypatch.setenv(variable, "0")
        assert "legacy Ray" in (said(2) or "")
        assert said(1) is None
        monkeypatch.setenv(variable, "1")
        assert (said(2) is None) == (backend == "ray")
    # vLLM 0.33 removed the legacy executor together with the variable.
    monkeypatch.delitem(envs.environment_variables, variable, raising=False)
    assert (said(2) is None) == (backend == "ray")


def test_engines_that_need_a_forward_of_every_token_are_uncached() -> None:
    last = bare_model(runner_type="pooling", is_prefix_caching_supported=True)
    assert why_not_cacheable(bare_config(model_config=last), groups(FULL)) is None
    silent = SimpleNamespace(enabled=False)
    assert why_not_cacheable(bare_config(aux_output_config=silent), groups(FULL)) is None
    mean = bare_model(runner_type="pooling", is_prefix_caching_supported=False)
    for changes, reason in (
        ({"model_config": mean}, "pooling"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "routed experts"),
        ({"model_config": bare_model(enable_return_routed_experts=True)}, "routed experts"),
    ):
        assert reason in (why_not_cacheable(bare_config(**changes), groups(FULL)) or "")


def test_results_that_promise_the_same_bits_are_uncached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(backend: str | None) -> str | None:
        chosen = None if backend is None else AttentionBackendEnum[backend]
        attention = SimpleNamespace(backend=chosen)
        return why_not_cacheable(bare_config(attention_config=attention), groups(FULL))

    assert said(None) is None
    assert said("FLASHINFER") is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert said("FLASH_ATTN") is None
    for backend in (None, "FLASHINFER", "TRITON_MLA"):  # what vLLM chooses is not known here
        assert "VLLM_BATCH_INVARIANT" in (said(backend) or "")


def test_hybrids_with_recurrent_layers_keep_the_layout_that_vllm_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    transfer = SimpleNamespace(kv_connector_extra_config={"cpu_memory": "1GiB"})
    layouts = [
        wanted_layout(
            bare_config(kv_transfer_config=transfer, model_config=bare_model(is_hybrid=is_hybrid))
        )
        for is_hybrid in (False, True)
    ]
    assert layouts == ["BLHNC", None]


def test_uncached_model_runs_and_the_log_says_why(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ToyEngine(tiny_model).config
    hybrid = groups(FULL, CircularBufferSpec(**SHAPE))
    with caplog.at_level(logging.WARNING):
        scheduler = TieredKVConnector(config, KVConnectorRole.SCHEDULER, hybrid)
        worker = TieredKVConnector(config, KVConnectorRole.WORKER, hybrid)
    said = [record.message for record in caplog.records if "not tiered" in record.message]
    assert said == [
        "the KV cache of this model is not tiered: KV-cache group 1 is CircularBufferSpec: a ring "
        "buffer is overwritten while its request runs"
    ]
    assert scheduler.get_num_new_matched_tokens(None, 0) == (0, False)
    assert scheduler.build_connector_meta(None) == TieredKVMetadata()
    assert not scheduler.has_pending_push_work()
    worker.register_kv_caches({})
    worker.bind_connector_metadata(TieredKVMetadata())
    worker.handle_preemptions(TieredKVMetadata())
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_transfer_results(set()) == KVConnectorTransferResults()


def test_ranks_that_cut_their_blocks_otherwise_switch_the_cache_off(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = {"remote": "ipc:///nobody/is/here", "mode": "tiered"}
    before = threading.enumerate()
    engine = ToyEngine(tiny_model, extra_config=nobody)
    connector = engine.scheduler.connector
    own = TieredKVHandshake(engine.half.block_bytes)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): own, (0, 1): own})
    assert connector.scheduler_half is not None
    engine.worker._is_refused, engine.worker.worker_half = True, None
    other = engine.worker.get_handshake_metadata()
    assert other == TieredKVHandshake(())
    with caplog.at_level(logging.WARNING):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): own, (1, 0): other})
    assert connector.scheduler_half is None
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith("tiered-kv-lookup")]
    assert "not tiered: blocks of rank (1, 0)" in caplog.text
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
