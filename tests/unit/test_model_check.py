"""`tiered-kv model`: bytes and verdicts from a config.json alone, and errors that say what to do.
tests/engine compares the bytes with those of real engines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine import window_models
from tests.models import TINY_BERT, TINY_GEMMA3N, TINY_LLAMA, TINY_MLA, TINY_QWEN2, write_config
from tools.model_table import NAMED
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.model_check import VERDICTS, ModelCheck
from vllm_tiered_kv.api.model_shape import LayerKind, read_config, read_shape
from vllm_tiered_kv.connector import support
from vllm_tiered_kv.errors import ModelConfigError

GIB = 1 << 30


def check(config: dict[str, Any], ranks: int = 1, memory: int = 100 * GIB, **kw: str) -> ModelCheck:
    return ModelCheck(read_shape(config, tensor_parallel=ranks, **kw), 16, ranks, memory)


def groups(config: dict[str, Any], ranks: int = 1, **kw: str) -> list[tuple[LayerKind, int, int]]:
    """Kind, layers and bytes of all layers on one rank."""
    return [
        (group.kind, group.layers, group.layers * group.layer_bytes)
        for group in read_shape(config, tensor_parallel=ranks, **kw).groups
    ]


# ---- bytes --------------------------------------------------------------------------------------


def test_grouped_heads_are_divided_among_ranks_and_repeated_beyond() -> None:
    token = 4 * 2 * 2 * 32 * 2  # layers, keys and values, heads, size, bfloat16
    assert groups(TINY_LLAMA) == [(LayerKind.FULL, 4, token)]
    assert check(TINY_LLAMA, 2).rank_token_bytes == token // 2
    assert check(TINY_LLAMA, 2).token_bytes == token
    assert check(TINY_LLAMA, 4).token_bytes == 2 * token  # each of two heads on two ranks
    with pytest.raises(ModelConfigError, match="2 KV heads cannot be divided among 3"):
        read_shape(TINY_LLAMA, tensor_parallel=3)


def test_dtypes() -> None:
    token = check(TINY_QWEN2).token_bytes
    assert check(TINY_QWEN2, dtype="float32").token_bytes == 2 * token
    assert check(TINY_QWEN2, kv_cache_dtype="fp8").token_bytes == token // 2
    asked = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert check({**TINY_QWEN2, "quantization_config": asked}).token_bytes == token // 2
    explicit = check({**TINY_QWEN2, "quantization_config": asked}, kv_cache_dtype="bfloat16")
    assert explicit.token_bytes == token
    assert read_shape({**TINY_QWEN2, "torch_dtype": "float32"}).kv_cache_dtype == "bfloat16"
    unknown = {key: value for key, value in TINY_QWEN2.items() if key != "torch_dtype"}
    assert "no dtype" in read_shape(unknown).guesses[0]


def test_latent_kv_is_stored_once_for_all_ranks() -> None:
    answer = check(TINY_MLA, 4)
    assert answer.rank_token_bytes == answer.token_bytes == 2 * 576 * 2
    assert any("once per host" in note for note in answer.notes())


def test_indexer_adds_its_keys() -> None:
    sparse = {**TINY_MLA, "model_type": "deepseek_v32", "index_topk": 64, "index_head_dim": 128}
    assert groups(sparse) == [(LayerKind.MLA, 2, 2 * 1152), (LayerKind.INDEXER, 2, 2 * 132)]
    packed = groups(sparse, kv_cache_dtype="fp8_ds_mla")
    assert packed[0] == (LayerKind.MLA, 2, 2 * 656)
    some = {**sparse, "num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert [layers for _, layers, _ in groups(some)] == [9, 4]  # layers 0, 1, 2 and 6
    with pytest.raises(ModelConfigError, match="sparse latent attention only"):
        read_shape(TINY_QWEN2, kv_cache_dtype="fp8_ds_mla")


@pytest.mark.parametrize(
    ("config", "windows", "full"),
    [(window_models.MISTRAL, 4, 0), (window_models.GEMMA3, 4, 2), (window_models.GPT_OSS, 2, 2)],
    ids=["mistral", "gemma3", "gpt_oss"],
)
def test_windows(config: dict[str, Any], windows: int, full: int) -> None:
    for listed in (config, {k: v for k, v in config.items() if k != "layer_types"}):
        shape = read_shape(
            {**listed, "sliding_window_pattern": 3} if full == 2 < windows else listed
        )
        assert {g.kind: (g.layers, g.window) for g in shape.groups} == {
            kind: size
            for kind, size in {
                LayerKind.WINDOW: (windows, window_models.WINDOW),
                LayerKind.FULL: (full, None),
            }.items()
            if size[0]
        }


def test_disabled_window_is_no_window() -> None:
    assert groups({**TINY_QWEN2, "sliding_window": 512})[0][0] is LayerKind.FULL
    off = {**TINY_LLAMA, "sliding_window": 512, "use_sliding_window": False}
    assert groups(off)[0][0] is LayerKind.FULL
    on = {**TINY_QWEN2, "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}
    assert [(kind, layers) for kind, layers, _ in groups(on)] == [
        (LayerKind.FULL, 1),
        (LayerKind.WINDOW, 3),
    ]


def test_layers_that_share_a_cache_add_nothing() -> None:
    shape = read_shape(TINY_GEMMA3N)
    assert [(g.kind, g.layers) for g in shape.groups] == [(LayerKind.FULL, 4)]
    assert any("2 layers use the KV cache of others" in note for note in shape.notes)


def test_global_layers_of_gemma4_have_heads_of_their_own() -> None:
    config = {
        **window_models.GEMMA3,
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention"] * 6,  # the last is full, whatever the list says
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }
    assert groups(config) == [
        (LayerKind.WINDOW, 5, 5 * 2 * 2 * 32 * 2),
        (LayerKind.FULL, 1, 2 * 64 * 2),
    ]


def test_chunked_attention_is_counted_as_full() -> None:
    config = {**TINY_LLAMA, "model_type": "llama4_text", "attention_chunk_size": 64}
    answer = check(config)
    assert [(g.kind, g.layers) for g in answer.shape.groups] == [
        (LayerKind.CHUNKED, 3),
        (LayerKind.FULL, 1),
    ]
    assert answer.token_bytes == check(TINY_LLAMA).token_bytes


def test_recurrent_state_is_counted_per_snapshot() -> None:
    (state, attention) = groups(window_models.QWEN3_NEXT)
    conv, recurrent = (2 * 1 * 128 + 2 * 128) * 3, 2 * 128 * 128
    assert state == (LayerKind.RECURRENT, 3, 3 * (conv + recurrent) * 2)
    assert attention == (LayerKind.FULL, 1, 2 * 4 * 64 * 2)
    answer = check(window_models.QWEN3_NEXT, 2)
    assert answer.snapshot_bytes == state[2]
    assert answer.token_bytes == attention[2]


def test_layers_listed_in_other_ways() -> None:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
    nemotron = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 1, "ssm_state_size": 16}
    jamba = {"mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4}
    for model_type, fields, layers in (
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, **mamba}, (2, 2)),
        ("falcon_h1", mamba, (4, 4)),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*", **nemotron}, (2, 1)),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention"], **nemotron}, (1, 1)),
        ("jamba", {"attn_layer_period": 4, "attn_layer_offset": 1, **jamba}, (3, 1)),
        ("lfm2", {"full_attn_idxs": [2], "conv_L_cache": 3}, (3, 1)),
    ):
        config = {**TINY_LLAMA, "model_type": model_type, "mamba_d_conv": 4, "conv_kernel": 4}
        found = {kind: count for kind, count, _ in groups({**config, **fields})}
        assert (found[LayerKind.RECURRENT], found[LayerKind.FULL]) == layers


def test_text_part_of_a_multimodal_model_is_read() -> None:
    outer = {"architectures": ["SomeVLForConditionalGeneration"], "model_type": "some_vl"}
    for name in ("text_config", "llm_config"):
        assert groups({**outer, name: TINY_QWEN2}) == groups(TINY_QWEN2)
    assert groups({**outer, "thinker_config": {"text_config": TINY_QWEN2}}) == groups(TINY_QWEN2)


def test_defaults_of_transformers_are_named() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "hidden_size": 2560,
        },
    }
    answer = check(config)
    assert answer.token_bytes == 34 * 2 * 4 * 256 * 2
    assert any("num_key_value_heads is not in the file" in note for note in answer.notes())
    assert not answer.shape.guesses


def test_unknown_architecture_is_a_guess() -> None:
    config = {**TINY_LLAMA, "architectures": ["NewForCausalLM"], "model_type": "new"}
    answer = check(config)
    assert answer.token_bytes == check(TINY_LLAMA).token_bytes
    assert answer.shape.guesses == (
        "unknown architecture NewForCausalLM: assumed 4 layers with full attention",
    )
    assert "cached: probably, a guess (see below)" in answer.lines()
    odd = read_shape({**config, "layer_types": ["full_attention", "new_attention"]})
    assert "unknown layers new_attention" in " ".join(odd.guesses)
    latent = read_shape({**TINY_MLA, "model_type": "new"})
    assert any("latent KV of an unknown model type" in guess for guess in latent.guesses)


def test_tokens_that_fit_are_whole_blocks() -> None:
    token = check(TINY_LLAMA).token_bytes
    assert check(TINY_LLAMA, memory=token * 50).tokens == 48
    assert check(TINY_LLAMA, memory=token).tokens == 0


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (TINY_BERT, LayerKind.ENCODER),
        ({**TINY_LLAMA, "use_bidirectional_attention": True}, LayerKind.ENCODER),
        ({"model_type": "whisper", "is_encoder_decoder": True}, LayerKind.CROSS),
        ({"model_type": "t5", "is_encoder_decoder": True}, LayerKind.CROSS),
        ({**TINY_LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}, LayerKind.DRAFT),
        ({**TINY_MLA, "architectures": ["DeepSeekMTPModel"]}, LayerKind.DRAFT),
        (
            {**TINY_MLA, "model_type": "deepseek_v4", "compress_ratios": [4]},
            LayerKind.LATENT_WINDOW,
        ),
        (
            {**TINY_MLA, "model_type": "deepseek_v41", "compress_ratios": [4]},
            LayerKind.REPLAYED_WINDOW,
        ),
        ({**TINY_LLAMA, "architectures": ["DiffusionGemmaModel"]}, LayerKind.DIFFUSION),
    ],
)
def test_models_without_bytes_have_a_verdict(config: dict[str, Any], kind: LayerKind) -> None:
    answer = check(config)
    assert answer.shape.kinds == (kind,)
    assert answer.is_cached == VERDICTS[kind].is_cached
    assert answer.reasons == ([] if answer.is_cached else [VERDICTS[kind].why])


def test_draft_layers_in_a_checkpoint_are_mentioned() -> None:
    answer = check({**TINY_LLAMA, "num_nextn_predict_layers": 1})
    said = any("speculative decoding" in note for note in answer.notes())
    assert answer.is_cached
    assert said


@pytest.mark.parametrize("kind", [k for k, v in VERDICTS.items() if v.spec], ids=lambda k: k.name)
def test_verdicts_are_those_of_a_running_engine(kind: LayerKind) -> None:
    """`connector/support.py` refuses a kind by the name of vLLM's class."""
    assert VERDICTS[kind].is_cached == (VERDICTS[kind].spec not in support._UNSUPPORTED)


def test_every_class_that_is_refused_by_name_is_known_or_cannot_be_read_from_a_file() -> None:
    only_at_run_time = {  # an environment variable, or back-ends of single models
        "SinkFullAttentionSpec",
        "RSWASpec",
        "CircularBufferSpec",
    }
    known = {verdict.spec for verdict in VERDICTS.values()}
    assert set(support._UNSUPPORTED) <= known | only_at_run_time


def test_verdict_of_drafts_is_that_of_a_running_engine() -> None:
    assert VERDICTS[LayerKind.DRAFT].is_cached == (
        {"eagle", "eagle3", "mtp", "draft_model"} <= support._SPECULATIVE_METHODS
    )


def test_every_kind_has_a_verdict_and_a_no_has_a_reason() -> None:
    assert set(VERDICTS) == set(LayerKind)
    assert all(verdict.why for verdict in VERDICTS.values() if not verdict.is_cached)


# ---- models by name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        ("Llama-3.1-8B", 128),
        ("Llama-3.1-70B", 320),
        ("Qwen3-8B", 144),
        ("DeepSeek-V3, R1", 68.625),
        ("gpt-oss-120b", 72),
    ],
)
def test_published_shapes_have_their_known_sizes(name: str, kib: float) -> None:
    (config,) = [model.config for model in NAMED if model.name == name]
    assert check(config).token_bytes == kib * 1024


@pytest.mark.parametrize("model", NAMED, ids=lambda model: model.name)
def test_published_shapes_need_no_guess_unless_they_say_so(model: Any) -> None:
    shape = read_shape(model.config)
    assert shape.is_known


# ---- the command --------------------------------------------------------------------------------


def test_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, window_models.GPT_OSS)
    assert main(["model", str(folder), "--memory", "1MiB", "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["GptOssForCausalLM, 4 layers, KV cache in bfloat16", "cached: yes"]
    assert [line.split() for line in lines if "per token" in line] == [
        ["sliding", "window", "of", "96", "tokens", "2", "0.5", "0.5", "per", "token"],
        ["full", "attention", "2", "0.5", "0.5", "per", "token"],
        ["in", "all", "1", "1", "per", "token"],
    ]
    assert "1MiB hold 1,024 tokens (blocks of 16 tokens, 16 KiB each)" in lines


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path, TINY_MLA) / "config.json"
    arguments = ["model", str(file), "--json", "--tensor-parallel", "8", "--block-size", "64"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cached"] is said["known_architecture"] is True
    assert said["stored_bytes_per_token"] == said["rank_bytes_per_token"] == 2304
    assert said["tokens"] == 100 * GIB // (2304 * 64) * 64
    assert said["groups"][0]["kind"] == "mla"


def test_model_that_is_not_cached_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", str(write_config(tmp_path, TINY_BERT))]) == 1
    said = capsys.readouterr().out
    assert "cached: no, because an encoder has no KV cache to keep" in said
    assert "hold" not in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "does not contain a JSON object"),
        ("{}", "neither architectures nor model_type"),
        ('{"model_type": "llama"}', "no number num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": 2}', "no number num_attention_heads"),
        ('{"model_type": "llama", "num_hidden_layers": "2"}', "no number num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": -2}', "num_hidden_layers is -2"),
        ('{"model_type": "llama", "num_hidden_layers": 99999999}', "cannot be right"),
        (
            '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 3, '
            '"hidden_size": 128}',
            "no multiple of 3 attention heads",
        ),
        ('{"model_type": "new", "num_hidden_layers": 1, "layer_types": ["mamba"]}', "not known"),
    ],
)
def test_bad_files_are_one_line_and_status_two(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["model", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.startswith("tiered-kv: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


_FIELDS = sorted(
    {name for model in NAMED for name in model.config}
    | {"text_config", "quantization_config", "block_configs", "attn_type_list", "full_attn_idxs"}
    | {"layers_block_type", "attn_config", "conv_L_cache", "no_rope_layers", "torch_dtype"}
)
_WORDS = ["", "x", "M*", "bfloat16", "full_attention", "mamba"]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_FIELDS), inner),
    max_leaves=4,
)


@given(
    st.sampled_from([dict(model.config) for model in NAMED]),
    st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3),
    st.integers(1, 8),
)
def test_whatever_a_file_contains_ends_in_an_answer_or_an_error(
    config: dict[str, Any], changes: dict[str, Any], ranks: int
) -> None:
    try:
        answer = check({**config, **changes}, ranks)
    except ModelConfigError:
        return
    assert answer.lines()
    assert json.dumps(answer.as_json())
    assert answer.token_bytes >= 0


def test_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"Qwen3-8B does not exist; give a local"):
        read_config(tmp_path / "Qwen" / "Qwen3-8B")
    with pytest.raises(ModelConfigError, match=rf"^{re.escape(str(tmp_path))} has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="Mistral's format"):
        read_config(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelConfigError, match="is not JSON"):
        read_config(tmp_path / "model.bin")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 << 20)
    with pytest.raises(ModelConfigError, match="too large"):
        read_config(tmp_path / "large")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "lots"], "is not a size"),
        (["--block-size", "0"], "at least 1"),
        (["--kv-cache-dtype", "fp4"], "invalid choice"),
    ],
)
def test_bad_options_are_explained(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["model", str(write_config(tmp_path, TINY_LLAMA)), *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_it_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    folder = write_config(tmp_path, TINY_LLAMA)
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from vllm_tiered_kv.api.cli import main\n"
        f"sys.exit(main(['model', {str(folder)!r}]))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
