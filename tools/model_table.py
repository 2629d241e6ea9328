"""Which models and features are cached, and the tests that show it.

The first is docs/models.md, the second docs/model-tests.md.

The log message for a model that is not cached is not written here but read from the source that
logs it, so that the page always quotes the real message.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.api.model_check import ModelCheck, kib
from vllm_tiered_kv.api.model_shape import read_shape

ROOT = Path(__file__).parents[1]
_SUPPORT = ROOT / "vllm_tiered_kv" / "connector" / "support.py"


class State(enum.Enum):
    CACHED = "yes"
    LEFT_ALONE = "no"  # the engine runs as without the plugin, and the log says why
    UNTOUCHED = "not affected"  # independent of the cache
    REFUSED = "refused by vLLM"


@dataclass(frozen=True)
class Row:
    feature: str
    state: State
    tests: tuple[str, ...]  # path::name, with [id] for one case of a parametrised test
    note: str = ""
    says: str = ""  # a unique part of the log message


def _kinds(name: str) -> str:
    return f"tests/engine/test_model_kinds.py::{name}"


def _gpu(name: str) -> str:
    return f"tests/gpu/test_models_gpu.py::{name}"


_SUPPORT_TESTS = "tests/engine/test_support_engine.py::test_unsupported_caches_are_uncached"
_RECURRENT_DRAFTS = (
    "tests/engine/test_support_engine.py::"
    "test_recurrent_states_with_drafts_are_uncached_where_they_may_be_wrong"
)
_PREFILL_CONTEXT = (
    "tests/engine/test_support_engine.py::test_prefill_context_parallelism_is_cached_with_mla_alone"
)
_EVERY_TOKEN = (
    "tests/engine/test_support_engine.py::"
    "test_engines_that_need_a_forward_of_every_token_are_uncached"
)

ROWS = (
    Row(
        "Full attention: MHA, GQA, MQA",
        State.CACHED,
        (
            _kinds("test_full_attention"),
            "tests/gpu/test_engine_gpu.py::test_tier_hit_is_a_device_hit",
        ),
    ),
    Row(
        "Multi-head latent attention (DeepSeek)",
        State.CACHED,
        (_kinds("test_mla"), _kinds("test_mla_with_amx"), _gpu("test_mla")),
        "vLLM's reference kernels for CPUs without AMX (CPU_MLA) round a cached prefix to "
        "bfloat16: logprobs after a hit differ, and the log warns about it",
    ),
    Row(
        "MLA over tensor-parallel ranks",
        State.CACHED,
        (
            "tests/engine/test_mla_ranks.py::test_two_ranks_of_mla_share_one_copy",
            "tests/engine/test_replica_ranks.py::test_random_clients",
            "tests/unit/test_replicas.py::test_daemons_hold_one_copy_and_both_ranks_load_it",
            _kinds("test_engines_of_other_sizes_have_keys_of_their_own"),
        ),
        "the CPU tier and daemons hold one copy for all ranks of a host (with a pipeline, one per "
        "rank)",
    ),
    Row(
        "Blocks of engines with another tensor-parallel size",
        State.CACHED,
        (
            "tests/engine/test_portable_shards.py::test_each_size_finds_the_blocks_of_each_other",
            "tests/engine/test_portable_shards.py::test_with_mla_every_rank_holds_whole_blocks",
            "tests/engine/test_remote_engines.py::"
            "test_engines_share_a_daemon_across_their_sizes_their_deaths_and_its_own",
            _kinds("test_engines_of_other_sizes_have_keys_of_their_own"),
        ),
        "only at daemons and with the option portable_shards, for full attention, sliding windows "
        "and MLA; not with more ranks than KV heads, layers of different head counts, recurrent or "
        "draft layers, pipelines or VLLM_BATCH_INVARIANT, which the option refuses",
    ),
    Row(
        "Sliding window",
        State.CACHED,
        (
            "tests/engine/test_windows.py::test_repeated_prompt_loads_what_its_windows_reach",
            "tests/engine/test_window_engines.py::test_each_prompt_is_found_as_by_vllm_itself",
        ),
        "only the blocks of the last window are loaded, not the prefix before it",
    ),
    Row(
        "Hybrids of full attention and sliding windows (Gemma-3, gpt-oss)",
        State.CACHED,
        (
            "tests/engine/test_window_engines.py::test_each_prompt_is_found_as_by_vllm_itself",
            "tests/engine/test_window_daemon.py::test_another_engine_finds_what_the_first_one_stored",
            "tests/engine/test_remote_windows.py::test_random_clients_of_two_engines",
            "tests/gpu/test_windows_gpu.py::test_tier_hit_is_a_device_hit",
        ),
    ),
    Row(
        "Recurrent layers, alone or beside attention: GDN (Qwen3-Next, Qwen3.5), Mamba 2 "
        "(Granite-4, Nemotron-H), Mamba 1 (Jamba)",
        State.CACHED,
        (
            "tests/engine/test_recurrent_engine.py::test_each_prompt_is_found_as_by_vllm_itself",
            "tests/engine/test_recurrent.py::test_random_clients",
            "tests/engine/test_remote_windows.py::test_second_engine_finds_recurrent_states",
            "tests/gpu/test_recurrent_gpu.py::test_tier_hit_is_a_device_hit",
        ),
        "a hit ends where vLLM keeps a state: at the last full block of a prompt and where prompts "
        "diverge, or more often with --prefix-cache-retention-interval. vLLM's CPU back-end runs "
        "only GDN with prefix caching, so the other kinds are tested on a GPU",
    ),
    Row(
        "Recurrent layers without vLLM's prefix caching",
        State.LEFT_ALONE,
        (_SUPPORT_TESTS,),
        says="is cached only with vLLM's prefix caching",
    ),
    Row(
        "Recurrent layers (GDN, Mamba 2) with speculative decoding",
        State.CACHED,
        (
            "tests/engine/test_recurrent_drafts.py::test_random_clients",
            "tests/engine/test_recurrent_drafts_engine.py::test_tier_hit_is_a_device_hit",
            "tests/gpu/test_recurrent_drafts_gpu.py::test_tier_hit_is_a_device_hit",
        ),
        "MTP, EAGLE, draft models and n-gram; hits end a block earlier with MTP and EAGLE, as in "
        "vLLM's own cache. Only engines that draft the same number of tokens share blocks. Shown "
        "on a GPU for GDN with MTP and Mamba 2 with n-gram, for the rest with vLLM's schedulers; "
        "on CPUs a stand-in moves states that vLLM's kernels move on GPUs",
    ),
    Row(
        "Recurrent layers of other kinds with speculative decoding",
        State.LEFT_ALONE,
        (_RECURRENT_DRAFTS,),
        says="of this kind is not cached with speculative decoding",
    ),
    Row(
        "Recurrent layers without attention, with speculative decoding",
        State.LEFT_ALONE,
        (_RECURRENT_DRAFTS,),
        says="is cached with speculative decoding only in models that have attention",
    ),
    Row(
        "Recurrent layers with speculative decoding and pipeline parallelism",
        State.LEFT_ALONE,
        (_RECURRENT_DRAFTS,),
        says="is not cached with speculative decoding and pipeline parallelism",
    ),
    Row(
        "Chunked local attention (Llama-4)",
        State.CACHED,
        (
            "tests/engine/test_window_engines.py::test_each_prompt_is_found_as_by_vllm_itself",
            "tests/engine/test_windows.py::test_random_clients",
            "tests/engine/test_remote_windows.py::test_random_clients_of_two_engines",
        ),
        "only the blocks of the last chunk are loaded; not cached if all layers are chunked, or if "
        "a chunk does not consist of whole blocks",
    ),
    Row(
        "Sliding windows over latent KV, compressed KV (DeepSeek-V4)",
        State.CACHED,
        (
            "tests/engine/test_latent_windows.py::test_all_groups_of_deepseek_v4_are_cached",
            "tests/engine/test_latent_windows.py"
            "::test_blocks_of_deepseek_v4_are_the_bytes_of_their_layers",
            "tests/engine/test_windows.py::test_random_clients",
            "tests/gpu/test_latent_windows_gpu.py::test_tier_hit_is_a_device_hit",
        ),
        "its kernels need a GPU or a CPU with AMX, so a whole engine is tested on a GPU; there "
        "substitutes in PyTorch and Triton stood in for its TileLang and CuTe DSL kernels",
    ),
    Row(
        "Sliding windows that vLLM recomputes after each hit (DeepSeek-V4.1)",
        State.LEFT_ALONE,
        (_SUPPORT_TESTS,),
        says="sliding windows that vLLM recomputes",
    ),
    Row(
        "Layers that share the KV cache of other layers (Gemma-3n)",
        State.CACHED,
        (_kinds("test_layers_that_share_the_cache_of_others"),),
        "a layer without its own cache has nothing to store",
    ),
    Row(
        "fp8 KV cache",
        State.CACHED,
        (
            _kinds("test_fp8_cache"),
            _gpu("test_fp8_cache"),
            _kinds("test_each_kind_of_kv_cache_has_keys_of_its_own"),
            _kinds("test_scales_of_the_checkpoint_are_part_of_its_identity"),
        ),
        "not shared with a KV cache of another dtype or with other scales in the checkpoint",
    ),
    Row(
        "LoRA",
        State.CACHED,
        (
            _kinds("test_lora_adapters_hit_their_own_blocks_only"),
            _gpu("test_lora_adapters_hit_their_own_blocks_only"),
        ),
        "adapters are identified by the content of their files",
    ),
    Row(
        "Speculative decoding: n-gram",
        State.CACHED,
        (
            "tests/engine/test_speculation.py::test_ngram_speculation_changes_no_token",
            "tests/engine/test_speculation.py::test_rejected_drafts_are_never_stored",
            "tests/engine/test_toy_speculation.py::test_random_clients",
            _gpu("test_ngram_speculation"),
        ),
        note="shares its blocks with engines that do not speculate",
    ),
    Row(
        "Speculative decoding: EAGLE, EAGLE-3, MTP, a draft model",
        State.CACHED,
        (
            "tests/engine/test_drafts.py::test_tier_hit_is_a_device_hit",
            "tests/engine/test_toy_speculation.py"
            "::test_random_clients_of_drafting_engines_read_no_wrong_kv",
            "tests/engine/test_namespace.py::test_draft_model_changes_the_namespace_by_its_content",
            _gpu("test_drafts"),
        ),
        "draft layers are cached with those of the model; with EAGLE and MTP hits end one block "
        "early, as in vLLM's own prefix cache; of several MTP modules Model Runner V1 (CPUs) "
        "runs only the first, except in Step-3.5",
    ),
    Row(
        "Speculative decoding: DFlash, DSpark, extraction of hidden states",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_unsupported_engines_are_uncached",),
        says="speculative decoding with",
    ),
    Row(
        "Images and other multimodal inputs",
        State.CACHED,
        (
            _kinds("test_images"),
            "tests/engine/test_request_keys.py::test_keys_differ_by_image_identifier_and_position",
        ),
    ),
    Row("Prompt embeddings", State.CACHED, (_kinds("test_prompt_embeddings"),)),
    Row(
        "Embeddings and scores of a causal model",
        State.CACHED,
        (_kinds("test_embeddings_of_a_causal_model_are_served"),),
    ),
    Row(
        "Embeddings with MEAN, CLS or STEP pooling",
        State.LEFT_ALONE,
        (_kinds("test_pooling_of_all_tokens_is_uncached"), _EVERY_TOKEN),
        says="needs the outputs of all tokens",
    ),
    Row(
        "Encoders (BERT)",
        State.LEFT_ALONE,
        (_kinds("test_encoder_is_uncached"),),
        says="the model has no KV cache",
    ),
    Row(
        "Non-causal attention (prefix LM)",
        State.LEFT_ALONE,
        (_SUPPORT_TESTS,),
        says="attention is not causal",
    ),
    Row(
        "Encoder-decoders (Whisper)",
        State.REFUSED,
        (_kinds("test_encoder_decoder_is_refused_by_vllm"),),
        "vLLM 0.32 does not start them with any KV connector",
    ),
    Row(
        "Cascade attention",
        State.UNTOUCHED,
        (_gpu("test_many_requests_with_one_long_prefix"),),
        "removed in vLLM 0.32; it changed how kernels read a prefix shared by many requests, not "
        "the blocks the cache stores (0.31 has it; not tested there)",
    ),
    Row(
        "Diffusion (DiffusionGemma)",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_unsupported_engines_are_uncached",),
        says="diffusion does not",
    ),
    Row(
        "Returning the routed experts of each token (`--enable-return-routed-experts`)",
        State.LEFT_ALONE,
        (_EVERY_TOKEN,),
        says="routed experts of all tokens",
    ),
    Row(
        "Decode context parallelism (`--decode-context-parallel-size`)",
        State.CACHED,
        (
            "tests/engine/test_parallel.py::test_ranks_that_divide_the_tokens_of_a_block",
            "tests/gpu/test_context_parallel_gpu.py::test_decode_context_parallelism",
            "tests/engine/test_ranks.py::test_random_clients",
            "tests/engine/test_ranks.py"
            "::test_random_clients_of_hybrids_whose_states_are_not_divided",
            "tests/engine/test_namespace.py"
            "::test_tokens_that_a_rank_holds_of_a_block_change_the_namespace",
        ),
        "a block stands for the tokens of all ranks of a DCP group, and blocks are shared only "
        "between engines with the same number of ranks and the same interleave size; several DCP "
        "groups with the same KV each store it. vLLM itself runs DCP with full attention, MLA and "
        "recurrent layers, not with sliding windows or chunks. Shown for MQA and MLA with vLLM's "
        "kernels, by two ranks on one GPU whose collectives go through the host, and for recurrent "
        "layers with vLLM's schedulers",
    ),
    Row(
        "Prefill context parallelism (`--prefill-context-parallel-size`)",
        State.CACHED,
        (
            "tests/engine/test_prefill_context.py"
            "::test_each_rank_holds_after_a_step_what_it_would_without_pcp",
            "tests/engine/test_prefill_context.py"
            "::test_ranks_of_both_parallelisms_share_one_memory",
            "tests/gpu/test_context_parallel_gpu.py::test_prefill_context_parallelism",
            "tests/engine/test_ranks.py::test_random_clients",
            "tests/engine/test_ranks.py"
            "::test_random_clients_of_both_context_parallelisms_over_tensor_parallel_ranks",
            "tests/engine/test_replica_ranks.py::test_random_clients",
            _PREFILL_CONTEXT,
        ),
        "models with MLA in all layers, with or without DCP. vLLM itself runs it only with MLA, "
        "Model Runner V2 and several GPUs, beside DCP only with sparse MLA (DeepSeek-V3.2, GLM-5). "
        "Each layer gathers the KV of all ranks' tokens before it writes it: without DCP all ranks "
        "hold the same, of which the CPU tier and daemons keep one copy (with a pipeline, one per "
        "rank), with DCP each holds its part. Shown without DCP with vLLM's kernels, by two ranks "
        "on one GPU whose collectives go through the host; with DCP with vLLM's schedulers, and "
        "with its own division of tokens and gathering of KV on CPUs",
    ),
    Row(
        "Prefill context parallelism with other layers than MLA",
        State.LEFT_ALONE,
        (_PREFILL_CONTEXT,),
        says="only with MLA in all layers",
    ),
    Row(
        "Prefill context parallelism with MTP",
        State.LEFT_ALONE,
        (_PREFILL_CONTEXT,),
        says="not cached with speculative decoding: each rank",
    ),
    Row(
        "Fault tolerance of expert parallelism (`--enable-fault-tolerance`)",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_unsupported_engines_are_uncached",),
        says="with fault tolerance",
    ),
    Row(
        "Pipeline parallelism on the legacy Ray executor (`VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0`)",
        State.LEFT_ALONE,
        (
            "tests/engine/test_support_engine.py"
            "::test_pipeline_whose_stages_do_not_report_is_uncached",
        ),
        says="legacy Ray executor",
    ),
)


@dataclass(frozen=True)
class NamedModel:
    """A published model: the numbers of its config.json that decide, and what shows the verdict."""

    name: str
    config: Mapping[str, Any]
    tiny: str = ""  # the tiny model with which a test runs these kinds of layers
    test: str = ""  # without one, the verdict is a guess from the architecture


def _published(
    model_type: str, layers: int, kv_heads: int, head_dim: int, **fields: object
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **fields,
    }


def _latent(model_type: str, layers: int, **fields: object) -> dict[str, Any]:
    return _published(model_type, layers, 1, 0, kv_lora_rank=512, qk_rope_head_dim=64, **fields)


def _delta_net(model_type: str, layers: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    """Qwen's hybrids: three layers with a gated delta net to one with attention."""
    return _published(
        model_type,
        layers,
        kv_heads,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        **({} if model_type == "qwen3_next" else {"mamba_ssm_dtype": "float32"}),
    )


def _windows(name: str) -> str:
    return f"tests/engine/test_window_engines.py::{name}"


_FULL = ("a tiny Qwen2", _kinds("test_full_attention"))
_MLA = ("a tiny DeepSeek-V2", _kinds("test_mla"))
_EACH_PROMPT = _windows("test_each_prompt_is_found_as_by_vllm_itself")
_RECURRENT = (
    "a tiny Qwen3-Next",
    "tests/engine/test_recurrent_engine.py::test_each_prompt_is_found_as_by_vllm_itself",
)
_RECURRENT_GPU = "tests/gpu/test_recurrent_gpu.py::test_tier_hit_is_a_device_hit"

NAMED = (
    NamedModel("Qwen3-8B", _published("qwen3", 36, 8, 128), *_FULL),
    NamedModel("Qwen3-32B", _published("qwen3", 64, 8, 128), *_FULL),
    NamedModel("Qwen3-30B-A3B", _published("qwen3_moe", 48, 4, 128), *_FULL),
    NamedModel("Qwen3-235B-A22B", _published("qwen3_moe", 94, 4, 128), *_FULL),
    NamedModel("Qwen3-Next-80B-A3B", _delta_net("qwen3_next", 48, 2, 32), *_RECURRENT),
    NamedModel("Qwen3.5-35B-A3B, Qwen3.6-35B-A3B", _delta_net("qwen3_5_moe_text", 40, 2, 32)),
    NamedModel("Qwen3.5-27B, Qwen3.6-27B", _delta_net("qwen3_5_text", 64, 4, 48)),
    NamedModel("Qwen3.5-397B-A17B", _delta_net("qwen3_5_moe_text", 60, 2, 64)),
    NamedModel("DeepSeek-V3, R1", _latent("deepseek_v3", 61), *_MLA),
    NamedModel("DeepSeek-V3.2", _latent("deepseek_v32", 61, index_topk=2048, index_head_dim=128)),
    NamedModel(
        "DeepSeek-V4",
        {"model_type": "deepseek_v4", "num_hidden_layers": 61, "compress_ratios": [4, 128]},
        "a tiny DeepSeek-V4",
        "tests/gpu/test_latent_windows_gpu.py::test_tier_hit_is_a_device_hit",
    ),
    NamedModel("Kimi-K2", _latent("kimi_k2", 61), *_MLA),
    NamedModel(
        "Kimi-K3",
        _latent(
            "kimi_linear",
            93,
            linear_attn_config={
                "full_attn_layers": [*range(4, 93, 4), 93],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        ),
    ),
    NamedModel("GLM-4.6", _published("glm4_moe", 92, 8, 128), *_FULL),
    NamedModel("GLM-5", _latent("glm_moe_dsa", 78, index_topk=2048, index_head_dim=128)),
    NamedModel("MiniMax-M2", _published("minimax_m2", 62, 8, 128), *_FULL),
    NamedModel(
        "gpt-oss-20b",
        _published("gpt_oss", 24, 8, 64, sliding_window=128),
        "a tiny one",
        _EACH_PROMPT,
    ),
    NamedModel(
        "gpt-oss-120b",
        _published("gpt_oss", 36, 8, 64, sliding_window=128),
        "a tiny one",
        _EACH_PROMPT,
    ),
    NamedModel(
        "Gemma-3-27B",
        _published("gemma3_text", 62, 16, 128, sliding_window=1024),
        "a tiny one",
        _EACH_PROMPT,
    ),
    NamedModel(
        "Gemma-3n-E4B",
        _published("gemma3n_text", 35, 2, 256, sliding_window=512, num_kv_shared_layers=15),
        "a tiny one without windows",
        _kinds("test_layers_that_share_the_cache_of_others"),
    ),
    NamedModel(
        "Gemma-4-26B-A4B",
        _published(
            "gemma4_text",
            30,
            8,
            256,
            sliding_window=1024,
            global_head_dim=512,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
        ),
    ),
    NamedModel("Llama-3.1-8B", _published("llama", 32, 8, 128), *_FULL),
    NamedModel("Llama-3.1-70B", _published("llama", 80, 8, 128), *_FULL),
    NamedModel(
        "Llama-4 Scout, Maverick",
        _published("llama4_text", 48, 8, 128, attention_chunk_size=8192),
        "a tiny one",
        _EACH_PROMPT,
    ),
    NamedModel(
        "Mistral-7B-v0.1",
        _published("mistral", 32, 8, 128, sliding_window=4096),
        "a tiny one",
        _EACH_PROMPT,
    ),
    NamedModel(
        "Mistral-Small-3.2-24B", _published("mistral", 40, 8, 128, sliding_window=None), *_FULL
    ),
    NamedModel("Mixtral-8x22B", _published("mixtral", 56, 8, 128), *_FULL),
    NamedModel("Phi-4", _published("phi3", 40, 10, 128), *_FULL),
    NamedModel(
        "Granite-4.0-H-Small",
        _published(
            "granitemoehybrid",
            40,
            8,
            128,
            layer_types=["attention" if n % 10 == 5 else "mamba" for n in range(40)],
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
        ),
        "a tiny Granite-4",
        _RECURRENT_GPU,
    ),
    NamedModel(
        "Jamba-1.5-Mini",
        _published(
            "jamba",
            32,
            8,
            128,
            hidden_size=4096,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        "a tiny Jamba",
        _RECURRENT_GPU,
    ),
    NamedModel(
        "Nemotron-H-56B",
        _published(
            "nemotron_h",
            118,
            8,
            128,
            hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
            mamba_num_heads=256,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=256,
            conv_kernel=4,
        ),
        "a tiny Nemotron-H",
        _RECURRENT_GPU,
    ),
    NamedModel(
        "Nemotron-3-Nano-30B-A3B",
        _published(
            "nemotron_h",
            52,
            2,
            128,
            hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
            mamba_num_heads=64,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
        ),
        "a tiny Nemotron-H",
        _RECURRENT_GPU,
    ),
)


def sentence(piece: str) -> str:
    """The one message in support.py that contains this text, with its variables shown as …"""
    found = [text for text in _sentences() if piece in text]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sentences in {_SUPPORT.name} contain {piece!r}")
    return found[0]


def _sentences() -> list[str]:
    texts: list[str] = []
    inside: set[int] = set()
    for node in ast.walk(ast.parse(_SUPPORT.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            texts.append(
                "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            )
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            texts += [node.value] if isinstance(node.value, str) else []
    return texts


def models_table() -> str:
    lines = [
        "| feature | cached | note, or log message |",
        "| --- | --- | --- |",
    ]
    for row in ROWS:
        said = f"“{sentence(row.says)}”" if row.says else row.note
        lines.append(f"| {row.feature} | {row.state.value} | {said} |")
    return "\n".join(lines) + "\n"


def feature_tests_table() -> str:
    lines = ["| feature | tests |", "| --- | --- |"]
    for row in ROWS:
        tests = "<br>".join(f"`{test}`" for test in row.tests)
        lines.append(f"| {row.feature} | {tests} |")
    return "\n".join(lines) + "\n"


def named_table() -> str:
    lines = ["| model | cached | KiB per token | notes |", "| --- | --- | --- | --- |"]
    for model in NAMED:
        check = ModelCheck(read_shape(model.config), block_size=16, ranks=1, memory=0)
        state = State.CACHED if check.is_cached else State.LEFT_ALONE
        size = kib(check.token_bytes) if check.token_bytes else "not computed"
        if check.snapshot_bytes:
            size += f", and {kib(check.snapshot_bytes)} per snapshot"
        note = "" if model.test else "guess from the architecture"
        lines.append(f"| {model.name} | {state.value} | {size} | {note} |")
    return "\n".join(lines) + "\n"


def named_tests_table() -> str:
    lines = ["| model | shown with |", "| --- | --- |"]
    for model in NAMED:
        shown = f"{model.tiny}: `{model.test}`" if model.test else "guess from the architecture"
        lines.append(f"| {model.name} | {shown} |")
    return "\n".join(lines) + "\n"
