"""Weights that are not in the model's folder: other weights never share a key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_model_fingerprint import CONFIG, flip, safetensors, write_model
from vllm_tiered_kv.connector.identity.model_fingerprint import adapter_digest, model_digest
from vllm_tiered_kv.errors import UnsupportedError

WARNING = "keyed by name and revision"


def configs_alone(folder: Path) -> Path:
    """What vLLM makes of a model in an object store: its folder has no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def digest(
    folder: Path,
    weights: str = "",
    load_format: str = "runai_streamer",
    loader: dict[str, Any] | None = None,
    **settings: Any,
) -> str:
    model = SimpleNamespace(
        model=str(folder),
        model_weights=weights,
        revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: CONFIG),
        max_model_len=1024,
        **settings,
    )
    load = SimpleNamespace(
        load_format=load_format, download_dir=None, model_loader_extra_config=loader or {}
    )
    engine = SimpleNamespace(model_config=model, load_config=load, speculative_config=None)
    return model_digest(engine)


@pytest.mark.parametrize("load_format", ["runai_streamer", "sharded_state", "auto"])
def test_models_of_an_object_store_go_by_their_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    here, there = (configs_alone(tmp_path / name) for name in ("a1", "b2"))
    base = digest(here, "s3://bucket/base", load_format)
    assert WARNING in caplog.text
    assert "s3://bucket/base" in caplog.text
    assert base == digest(there, "s3://bucket/base", load_format)  # the folder is a temporary one
    assert base != digest(here, "s3://bucket/fine-tune", load_format)
    (there / "tokenizer.json").write_text('{"other": 1}')
    assert base != digest(there, "s3://bucket/base", load_format)


def test_folder_without_weights_is_identified_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (configs_alone(tmp_path / name) for name in ("one", "two"))
    assert digest(one, load_format="auto") != digest(two, load_format="auto")
    assert WARNING in caplog.text
    (one / "training_args.bin").write_bytes(b"x")
    (two / "training_args.bin").write_bytes(b"x")
    assert digest(one, load_format="auto") != digest(two, load_format="auto")


def test_weights_in_another_folder_are_read_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = configs_alone(tmp_path / "configs")
    one, two = (write_model(tmp_path / name) for name in ("one", "two"))
    assert digest(configs, str(one)) == digest(configs, str(two))
    assert WARNING not in caplog.text
    flip(two / "model.safetensors", len(safetensors()) - 1)
    assert digest(configs, str(one)) != digest(configs, str(two))


def tensorized(uri: str, **options: Any) -> dict[str, Any]:
    return {"tensorizer_config": {"tensorizer_uri": uri, **options}}


def test_tensorized_weights_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not those of the folder, which nobody loads."""
    folder = write_model(tmp_path / "model")
    base = digest(folder, load_format="tensorizer", loader=tensorized("s3://a"))
    assert WARNING in caplog.text
    assert base != digest(folder, load_format="tensorizer", loader=tensorized("s3://b"))
    flat = {"tensorizer_uri": "s3://a"}
    assert base == digest(folder, load_format="tensorizer", loader=flat)
    in_folder = {"tensorizer_dir": "s3://a"}
    assert base != digest(folder, load_format="tensorizer", loader=in_folder)
    secret = tensorized("s3://a", s3_secret_access_key="new", num_readers=4)
    assert base == digest(folder, load_format="tensorizer", loader=secret)


def test_tensorized_weights_of_this_host_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = configs_alone(tmp_path / "configs")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.tensors").write_bytes(bytes(2 << 20))

    def of(name: str) -> str:
        loader = tensorized(str(tmp_path / name / "model.tensors"))
        return digest(configs, load_format="tensorizer", loader=loader)

    assert of("one") == of("two")
    in_folder = {"tensorizer_config": {"tensorizer_dir": str(tmp_path / "two")}}
    assert of("one") == digest(configs, load_format="tensorizer", loader=in_folder)
    assert WARNING not in caplog.text
    flip(tmp_path / "two" / "model.tensors", 0)
    assert of("one") != of("two")


def test_settings_of_a_loader_count(tmp_path: Path) -> None:
    """Of a plugin, too: nobody here knows what it makes of it."""
    folder = write_model(tmp_path / "model")
    base = digest(folder)
    assert base != digest(folder, loader={"pattern": "model-rank-{rank}.safetensors"})
    plain = digest(folder, load_format="mine", loader={"tensorizer_uri": "a"})
    assert plain != digest(folder, load_format="mine", loader={"tensorizer_uri": "b"})
    assert base == digest(folder, loader={"concurrency": 8, "memory_limit": 1 << 30})


def test_code_counts_where_it_is_trusted(tmp_path: Path) -> None:
    one, two = (write_model(tmp_path / name) for name in ("one", "two"))
    for folder, body in ((one, "a = 1"), (two, "a = 2")):
        (folder / "modeling_mine.py").write_text(body)
    assert digest(one) == digest(two)
    assert digest(one, trust_remote_code=True) != digest(two, trust_remote_code=True)
    (two / "modeling_mine.py").write_text("a = 1")
    assert digest(one, trust_remote_code=True) == digest(two, trust_remote_code=True)


@pytest.mark.parametrize("is_modelscope", [False, True])
def test_files_are_those_of_the_hub_that_vllm_loads_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_modelscope: bool
) -> None:
    """Both have a repository of this name on this host; what they hold is not the same."""
    folders = {}
    for number, hub in enumerate(("huggingface_hub", "modelscope.hub.snapshot_download")):
        folders[hub] = configs_alone(tmp_path / str(number))
        (folders[hub] / "adapter_model.safetensors").write_bytes(bytes([number]))
        library = SimpleNamespace(
            snapshot_download=lambda repository, *, hub=hub, **options: str(folders[hub]),
            constants=SimpleNamespace(HF_HUB_OFFLINE=True),
        )
        monkeypatch.setitem(sys.modules, hub, library)
    for package in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    settings = SimpleNamespace(VLLM_USE_MODELSCOPE=is_modelscope)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=settings))
    loaded = folders["modelscope.hub.snapshot_download" if is_modelscope else "huggingface_hub"]
    if is_modelscope:
        with pytest.raises(UnsupportedError, match="asks a hub"):
            adapter_digest("a", "some/adapter")
    else:
        assert adapter_digest("a", "some/adapter") == adapter_digest("a", str(loaded))
    assert digest(Path("some/model"), load_format="auto") == digest(loaded, load_format="auto")
