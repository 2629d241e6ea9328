"""Which models and features are cached, and the tests that show it: the rows of docs/models.md.

The log message for a model that is not cached is not written here but read from the source that
logs it, so that the page always quotes the real message.
"""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SUPPORT = ROOT / "vllm_tiered_kv" / "connector" / "support.py"


class State(enum.Enum):
    CACHED = "cached"
    LEFT_ALONE = "not cached"  # the engine runs as without the plugin, and the log says why
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


_SUPPORT_TESTS = "tests/engine/test_support_engine.py::test_other_caches_are_left_alone"
_EVERY_TOKEN = (
    "tests/engine/test_support_engine.py::"
    "test_engines_that_need_a_forward_of_every_token_are_left_alone"
)

ROWS = (
    Row(
        "Full attention: MHA, GQA, MQA",
        State.CACHED,
        (
            _kinds("test_full_attention"),
            "tests/gpu/test_engine_gpu.py::test_a_tier_hit_is_a_device_hit",
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
        "Sliding window",
        State.CACHED,
        (
            "tests/engine/test_windows.py::test_a_repeated_prompt_loads_what_its_windows_reach",
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
            "tests/gpu/test_windows_gpu.py::test_a_tier_hit_is_a_device_hit",
        ),
    ),
    Row(
        "Recurrent layers, alone or beside attention: GDN (Qwen3-Next, Qwen3.5), Mamba 2 "
        "(Granite-4, Nemotron-H), Mamba 1 (Jamba)",
        State.CACHED,
        (
            "tests/engine/test_recurrent_engine.py::test_each_prompt_is_found_as_by_vllm_itself",
            "tests/engine/test_recurrent.py::test_random_clients",
            "tests/engine/test_remote_windows.py::test_a_second_engine_finds_recurrent_states",
            "tests/gpu/test_recurrent_gpu.py::test_a_tier_hit_is_a_device_hit",
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
        "Recurrent layers with speculative decoding",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_recurrent_states_with_drafts_are_left_alone",),
        says="is not cached with speculative decoding",
    ),
    Row(
        "Chunked local attention that frees blocks (Llama-4, opt-in)",
        State.LEFT_ALONE,
        (_kinds("test_a_cache_that_is_not_full_attention_is_left_alone"),),
        says="chunked local attention",
    ),
    Row(
        "Sliding windows over latent KV (DeepSeek-V4)",
        State.LEFT_ALONE,
        (_SUPPORT_TESTS,),
        says="sliding windows over latent KV",
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
    ),
    Row(
        "Speculative decoding: EAGLE, MTP, a draft model",
        State.LEFT_ALONE,
        (
            _kinds("test_draft_layers_are_left_alone"),
            "tests/engine/test_support_engine.py::test_other_engines_are_left_alone",
        ),
        says="speculative decoding with a draft",
    ),
    Row(
        "Images and other multimodal inputs",
        State.CACHED,
        (
            _kinds("test_images"),
            "tests/engine/test_request_keys.py::test_images_are_told_apart_by_identifier_and_place",
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
        (_kinds("test_pooling_of_all_tokens_is_left_alone"), _EVERY_TOKEN),
        says="needs the outputs of all tokens",
    ),
    Row(
        "Encoders (BERT)",
        State.LEFT_ALONE,
        (_kinds("test_an_encoder_is_left_alone"),),
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
        (_kinds("test_an_encoder_decoder_is_refused_by_vllm"),),
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
        ("tests/engine/test_support_engine.py::test_other_engines_are_left_alone",),
        says="diffusion does not",
    ),
    Row(
        "Returning the routed experts of each token (`--enable-return-routed-experts`)",
        State.LEFT_ALONE,
        (_EVERY_TOKEN,),
        says="routed experts of all tokens",
    ),
    Row(
        "Context parallelism",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_other_engines_are_left_alone",),
        says="context parallelism",
    ),
    Row(
        "Fault tolerance of expert parallelism (`--enable-fault-tolerance`)",
        State.LEFT_ALONE,
        ("tests/engine/test_support_engine.py::test_other_engines_are_left_alone",),
        says="with fault tolerance",
    ),
    Row(
        "Pipeline parallelism on the legacy Ray executor (`VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0`)",
        State.LEFT_ALONE,
        (
            "tests/engine/test_support_engine.py"
            "::test_a_pipeline_whose_stages_are_not_heard_is_left_alone",
        ),
        says="legacy Ray executor",
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
        "| feature | state | note, or log message | tests |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        said = f"“{sentence(row.says)}”" if row.says else row.note
        tests = "<br>".join(f"`{test}`" for test in row.tests)
        lines.append(f"| {row.feature} | {row.state.value} | {said} | {tests} |")
    return "\n".join(lines) + "\n"
