"""An adapter is what is in its files, read again when one of them may have changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_tiered_kv.connector.identity import model_fingerprint
from vllm_tiered_kv.connector.identity.model_fingerprint import adapter_digest
from vllm_tiered_kv.errors import UnsupportedError


def write_adapter(folder: Path, weights: bytes = bytes(100)) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose files were read, one entry per reading."""
    seen: list[Path] = []
    read = model_fingerprint._add_file

    def count(digest: Any, file: Path, whole: bool = False) -> None:
        if file.stem == "adapter_model":
            seen.append(file.parent)
        read(digest, file, whole)

    monkeypatch.setattr(model_fingerprint, "_add_file", count)
    return seen


def test_adapter_is_read_once_until_it_changes(tmp_path: Path, readings: list[Path]) -> None:
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    os.utime(weights, (1, 1))
    first = adapter_digest("a", str(folder))
    assert [adapter_digest("a", str(folder)) for _ in range(5)] == [first] * 5
    assert readings == [folder]

    weights.write_bytes(b"\1" * 100)  # in place, of the same size
    os.utime(weights, (2, 2))
    changed = adapter_digest("a", str(folder))
    assert changed != first
    assert readings == [folder] * 2

    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')
    assert len({first, changed, adapter_digest("a", str(folder))}) == 3


def test_adapter_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    """As those are that come out of an archive made to be reproducible."""
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    os.utime(weights, (1, 1))
    first = adapter_digest("a", str(folder))
    new = tmp_path / "new"
    new.write_bytes(b"\1" * 100)
    os.utime(new, (1, 1))
    new.replace(weights)
    assert adapter_digest("a", str(folder)) != first


def test_training_files_beside_an_adapter_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests would wait for it: the state of an optimiser is many times as large."""
    read: list[str] = []
    add_file = model_fingerprint._add_file

    def listen(digest: Any, file: Path, whole: bool = False) -> None:
        read.append(file.name)
        add_file(digest, file, whole)

    monkeypatch.setattr(model_fingerprint, "_add_file", listen)
    alone, checkpoint = (write_adapter(tmp_path / name) for name in ("alone", "checkpoint-5"))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"):
        (checkpoint / name).write_bytes(bytes(100))
    for name in ("training_args.bin", "trainer_state.json", "tokenizer_config.json"):
        (checkpoint / name).write_bytes(b"{}")
    assert adapter_digest("a", str(checkpoint)) == adapter_digest("a", str(alone))
    assert read == ["adapter_config.json", "adapter_model.safetensors"] * 2


def test_adapters_are_their_files_not_their_names(tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one")
    two = write_adapter(tmp_path / "two")
    other = write_adapter(tmp_path / "other", b"\2" * 100)
    assert adapter_digest("x", str(one)) == adapter_digest("y", str(two))
    assert adapter_digest("x", str(one)) != adapter_digest("x", str(other))


def test_every_byte_of_an_adapter_counts(tmp_path: Path) -> None:
    weights = bytearray(b"\3" * (4 << 20))
    folder = write_adapter(tmp_path / "a", bytes(weights))
    seen = {adapter_digest("a", str(folder))}
    for turn, at in enumerate((0, 1 << 20, (3 << 20) + 77, (4 << 20) - 1), 1):
        weights[at] ^= 1
        (folder / "adapter_model.safetensors").write_bytes(weights)
        os.utime(folder / "adapter_model.safetensors", (turn, turn))
        seen.add(adapter_digest("a", str(folder)))
    assert len(seen) == 5


def test_adapter_that_is_not_here_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub's may be another one tomorrow under the same name."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"x")
    for path in (
        *(str(tmp_path / "missing"), "~/nobody/has-this", "~nobody-here/x", "nobody/has-this"),
        *(str(empty), str(file)),
    ):
        with pytest.raises(UnsupportedError, match="contents cannot be identified"):
            adapter_digest("a", path)
    folder = write_adapter(tmp_path / "snapshot")
    monkeypatch.setattr(
        model_fingerprint, "_snapshot", lambda name: folder if name == "hub/a" else None
    )
    monkeypatch.setattr(model_fingerprint, "_hub_is_asked", lambda: False)
    assert adapter_digest("a", "hub/a") == adapter_digest("b", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapter_digest("a", "~/snapshot") == adapter_digest("a", str(folder))
