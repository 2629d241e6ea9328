"""A model is what is in its files: every change counts, names and paperwork do not."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv.connector.identity import model_fingerprint
from vllm_tiered_kv.connector.identity.model_fingerprint import model_digest

CONFIG = {"model_type": "qwen2", "hidden_size": 128, "_name_or_path": "here"}
TENSOR_BYTES = 300_000
NAMES = ("embed", "layers.0.q", "layers.0.k", "layers.0.v", "norm")
BETWEEN = TENSOR_BYTES // 4  # a byte of a tensor that lies between its samples


def tensor_bytes(number: int) -> bytes:
    return bytes((number * 31 + at * 7) % 251 for at in range(1000)) * (TENSOR_BYTES // 1000)


def safetensors(names: tuple[str, ...] = NAMES, extra: bytes = b"") -> bytes:
    """More than 1 MiB, so that it is sampled and not read whole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(names):
        offsets = [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES]
        header[name] = {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": offsets}
    text = json.dumps(header).encode()
    data = b"".join(tensor_bytes(number) for number in range(len(names)))
    content = struct.pack("<Q", len(text)) + text + data + extra
    assert len(content) > model_fingerprint._SMALL_FILE
    return content


def byte_of_tensor(content: bytes, number: int, at: int) -> int:
    """Where byte `at` of a tensor lies in the file."""
    (header_bytes,) = struct.unpack_from("<Q", content)
    return 8 + header_bytes + number * TENSOR_BYTES + at


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def digest(
    folder: Path | str,
    config: dict[str, Any] | None = None,
    overrides: Any = None,
    load_format: str = "auto",
    seed: int = 0,
    revision: str | None = None,
    max_model_len: int = 1024,
    processor: dict[str, Any] | None = None,
    has_media: bool = True,
) -> str:
    """The digest of an engine that opened `folder`; the config comes from there unless given."""
    if config is None:
        file = Path(folder) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else CONFIG
    loaded = {**config, "_name_or_path": str(folder)}  # as transformers does
    model = SimpleNamespace(
        model=str(folder),
        revision=revision,
        hf_config=SimpleNamespace(to_dict=lambda: loaded),
        hf_overrides=overrides or {},
        seed=seed,
        max_model_len=max_model_len,
        multimodal_config=SimpleNamespace(mm_processor_kwargs=processor) if has_media else None,
    )
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    engine = SimpleNamespace(model_config=model, load_config=load, speculative_config=None)
    return model_digest(engine)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def edit_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def flip_middle(model: Path, number: int = 2) -> None:
    file = model / "model.safetensors"
    flip(file, byte_of_tensor(file.read_bytes(), number, TENSOR_BYTES // 2))


def rename_tensor(model: Path) -> None:
    names = (*NAMES[:-1], "Norm")
    (model / "model.safetensors").write_bytes(safetensors(names))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte of the first tensor": lambda model: flip_middle(model, 0),
    "a byte of a tensor in the middle": lambda model: flip_middle(model, 2),
    "a byte of the last tensor": lambda model: flip_middle(model, 4),
    "a tensor's name": rename_tensor,
    "a tensor more": lambda model: (model / "model.safetensors").write_bytes(
        safetensors((*NAMES, "head"))
    ),
    "the size": lambda model: (model / "model.safetensors").write_bytes(safetensors(extra=b"\0")),
    "another weight file": lambda model: (model / "more.safetensors").write_bytes(b"x" * 64),
    "an empty weight file": lambda model: (model / "more.safetensors").touch(),
    "a weight file in a subfolder": lambda model: (
        shutil.copytree(model, model.parent / "copy"),
        shutil.move(model.parent / "copy", model / "part"),
    ),
    "a weight file's name": lambda model: (model / "model.safetensors").rename(
        model / "model-1.safetensors"
    ),
    "a value of the config": lambda model: edit_config(model, hidden_size=256),
    "a new value of the config": lambda model: edit_config(model, rope_theta=5e5),
    "quantisation settings": lambda model: (model / "hf_quant_config.json").write_text("{}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_content_is_another_model(model: Path, name: str) -> None:
    before = digest(model)
    CHANGES[name](model)
    assert digest(model) != before


IRRELEVANT: dict[str, Callable[[Path], object]] = {
    "a README": lambda model: (model / "README.md").write_text("hello"),
    "a licence": lambda model: (model / "LICENSE").write_text("free"),
    "a new time stamp": lambda model: os.utime(model / "model.safetensors", (1, 1)),
    "where it was saved": lambda model: edit_config(model, _name_or_path="/somewhere/else"),
    "what saved it": lambda model: edit_config(model, transformers_version="9.9"),
    "a second copy as .bin": lambda model: (model / "pytorch_model.bin").write_bytes(b"x" * 99),
    "an original as .pth": lambda model: (
        (model / "original").mkdir(),
        (model / "original" / "consolidated.00.pth").write_bytes(b"x" * 99),
    ),
    # A repository that somebody has fetched whole; vLLM fetches what it loads.
    "an original with its configs": lambda model: (
        (model / "original").mkdir(),
        (model / "original" / "model.safetensors").write_bytes(b"x" * 99),
        (model / "original" / "params.json").write_text("{}"),
    ),
    "a tokenizer": lambda model: [
        (model / name).write_text("{}")
        for name in ("tokenizer.json", "vocab.json", "special_tokens_map.json")
    ],
    "a chat template": lambda model: (model / "chat_template.json").write_text("{}"),
    "how to sample": lambda model: (model / "generation_config.json").write_text("{}"),
    "the state of a training": lambda model: (model / "trainer_state.json").write_text("{}"),
}


@pytest.mark.parametrize("name", IRRELEVANT)
def test_paperwork_changes_nothing(model: Path, name: str) -> None:
    before = digest(model)
    IRRELEVANT[name](model)
    assert digest(model) == before


def test_tokenizer_settings_count_where_they_may_name_a_processor(model: Path) -> None:
    before = digest(model), digest(model, has_media=False)
    (model / "tokenizer_config.json").write_text('{"processor_class": "Other"}')
    assert digest(model) != before[0]
    assert digest(model, has_media=False) == before[1]


def test_folders_with_equal_content_are_one_model(tmp_path: Path, model: Path) -> None:
    other = write_model(tmp_path / "elsewhere" / "under another name")
    (tmp_path / "link").symlink_to(model)
    assert digest(other) == digest(model) == digest(tmp_path / "link")


def test_settings_that_change_what_weights_compute_count(model: Path) -> None:
    digests = {
        digest(model),
        digest(model, config={**CONFIG, "hidden_size": 64}),
        digest(model, overrides={"rope_theta": 1.0}),
        digest(model, overrides={"rope_theta": 2.0}),
        digest(model, load_format="safetensors"),
        digest(model, load_format="dummy"),
    }
    assert len(digests) == 6


def test_dummy_weights_are_their_config_and_seed(tmp_path: Path, model: Path) -> None:
    assert digest(model, load_format="dummy", seed=1) != digest(model, load_format="dummy", seed=2)
    assert digest(model, seed=1) == digest(model, seed=2)  # a sampling seed otherwise
    empty = tmp_path / "no weights"
    empty.mkdir()
    (empty / "config.json").write_text(json.dumps(CONFIG))
    assert digest(empty, load_format="dummy") == digest(model, load_format="dummy")


def test_large_tensor_is_sampled(model: Path) -> None:
    """Not a promise, but what keeps starting fast: and it shows that sampling is what ran."""
    before = digest(model)
    file = model / "model.safetensors"
    flip(file, byte_of_tensor(file.read_bytes(), 2, BETWEEN))
    assert digest(model) == before


@pytest.mark.parametrize("at", [0, 1, TENSOR_BYTES - 1])
def test_ends_of_a_tensor_count(model: Path, at: int) -> None:
    before = digest(model)
    file = model / "model.safetensors"
    flip(file, byte_of_tensor(file.read_bytes(), 2, at))
    assert digest(model) != before


def test_single_row_of_an_embedding_counts(model: Path) -> None:
    """New tokens are often all that is trained."""
    before = digest(model)
    file = model / "model.safetensors"
    assert NAMES[0] == "embed"
    for at in random.Random(1).sample(range(TENSOR_BYTES), 20):
        content = file.read_bytes()
        flip(file, byte_of_tensor(content, 0, at))
        assert digest(model) != before
        file.write_bytes(content)


def test_which_factors_a_long_rope_takes_counts(model: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for config in (
        {"rope_parameters": rope},
        {"text_config": {"rope_scaling": {**rope, "type": "su"}}},
    ):
        short = digest(model, config={**CONFIG, **config}, max_model_len=4096)
        assert short == digest(model, config={**CONFIG, **config}, max_model_len=512)
        assert short != digest(model, config={**CONFIG, **config}, max_model_len=4097)
    assert digest(model, max_model_len=512) == digest(model, max_model_len=5000)


def test_settings_that_depend_on_the_longest_context_count(model: Path) -> None:
    dynamic = {**CONFIG, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert digest(model, config=dynamic, max_model_len=1) != digest(model, config=dynamic)
    llama4 = {**CONFIG, "model_type": "llama4", "text_config": {"model_type": "llama4_text"}}
    short = digest(model, config=llama4, max_model_len=32768)
    assert short == digest(model, config=llama4, max_model_len=512)
    assert short != digest(model, config=llama4, max_model_len=32769)


def test_arguments_of_the_processor_count(model: Path) -> None:
    digests = [digest(model, processor=p) for p in (None, {}, {"crops": 4}, {"crops": 5})]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_pytorch_weights_count_where_there_are_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(bytes(3 << 20))
    before = digest(folder)
    flip(folder / "pytorch_model.bin", (3 << 20) - 1)
    assert digest(folder) != before
    # vLLM looks for safetensors beside the config, not below: these weights are still the model's.
    (folder / "tower").mkdir()
    (folder / "tower" / "model.safetensors").write_bytes(b"x" * 64)
    before = digest(folder)
    flip(folder / "pytorch_model.bin", (3 << 20) - 1)
    assert digest(folder) != before


def test_single_file_is_a_model_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(2 << 20))
    before = digest(file)
    shutil.copy(file, tmp_path / "other.gguf")
    assert digest(tmp_path / "other.gguf") == before
    flip(file, 0)
    assert digest(file) != before


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_tiny_weight_files(tmp_path: Path, size: int, suffix: str) -> None:
    file = tmp_path / f"model.{suffix}"
    file.write_bytes(bytes(size))
    before = digest(tmp_path)
    file.write_bytes(bytes(size + 1))
    longer = digest(tmp_path)
    assert longer != before
    flip(file, size)
    assert digest(tmp_path) != longer


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_files_at_the_size_where_sampling_begins(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(model_fingerprint._SMALL_FILE + size))
    before = digest(tmp_path)
    for at in (0, model_fingerprint._SMALL_FILE // 2, model_fingerprint._SMALL_FILE + size - 1):
        flip(file, at)
        assert digest(tmp_path) != before
        before = digest(tmp_path)


def with_header(header: bytes, length: int | None = None) -> bytes:
    announced = len(header) if length is None else length
    return struct.pack("<Q", announced) + header + bytes(2 << 20)


def with_offsets(*offsets: Any) -> bytes:
    tensors = {f"t{i}": {"data_offsets": value} for i, value in enumerate(offsets)}
    return with_header(json.dumps(tensors).encode())


CORRUPT = {
    "a length beyond all bounds": with_header(b"{}", (1 << 64) - 1),
    "a length beyond the file": with_header(b"{}", 4 << 20),
    "a length that is the file's": with_header(b"{}", (2 << 20) + 10),
    "a length of zero": with_header(b"", 0),
    "no JSON": with_header(b"this is not JSON"),
    "no text": with_header(b"\xff\xfe\xfd"),
    "an unfinished header": with_header(b'{"t0": {"data_offsets": [0'),
    "JSON without end": with_header(b"[" * 200_000),
    "a list": with_header(b"[1, 2, 3]"),
    "a number": with_header(b"7"),
    "tensors that are none": with_header(b'{"t0": 1}'),
    "tensors without offsets": with_header(b'{"t0": {"dtype": "F32"}}'),
    "offsets of no use": with_offsets(7),
    "one offset": with_offsets([7]),
    "three offsets": with_offsets([1, 2, 3]),
    "offsets in words": with_offsets(["a", "b"]),
    "offsets of mixed kinds": with_offsets([0, 8], ["a", "b"]),
    "endless offsets": with_offsets([0, float("inf")]),
    "negative offsets": with_offsets([-(1 << 40), 8]),
    "offsets back to front": with_offsets([4096, 0]),
    "offsets beyond the file": with_offsets([0, 1 << 62]),
    "huge offsets": with_offsets([1 << 70, 1 << 71]),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_broken_index_is_sampled_evenly(tmp_path: Path, name: str) -> None:
    """Whether vLLM can load such a file is not for us to say; an engine never ends here."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(CORRUPT[name])
    size = file.stat().st_size
    with file.open("rb") as stream:
        ranges = list(model_fingerprint._sampled_ranges(stream, size, file.suffix))
    assert len(ranges) == 1024
    assert ranges[0] == (0, 4096)
    assert ranges[-1] == (size - 4096, 4096)
    before = digest(tmp_path)
    for at in (0, 8, size // 2, size - 1):
        flip(file, at)
        assert digest(tmp_path) != before, f"byte {at}"
        flip(file, at)
    assert digest(tmp_path) == before


def test_index_without_tensors_is_an_index(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(with_header(b"{}"))
    with file.open("rb") as stream:
        ranges = list(model_fingerprint._sampled_ranges(stream, file.stat().st_size, file.suffix))
    assert ranges == [(0, 10)]


def test_empty_and_small_tensors_are_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(with_offsets([0, 0], [0, 10], [10, 12298], [12298, 24587]))
    with file.open("rb") as stream:
        ranges = list(model_fingerprint._sampled_ranges(stream, file.stat().st_size, file.suffix))
    data = ranges[0][1]
    spans = [(offset - data, length) for offset, length in ranges[1:]]
    assert spans[:3] == [(0, 0), (0, 10), (10, 12288)]
    assert spans[3:] == [(12298, 4096), (16394, 4096), (20491, 4096)]


def test_model_without_files_is_identified_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    name = "nobody/has-this-model"
    first = digest(name)
    assert "keyed by name and revision" in caplog.text
    assert first == digest(name)
    assert first != digest("nobody/has-another-model")
    assert first != digest(name, revision="other")
