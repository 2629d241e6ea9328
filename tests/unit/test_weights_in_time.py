"""Weights that are replaced while an engine loads them: the files may tell of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv.connector.identity import model_fingerprint
from vllm_tiered_kv.connector.identity.model_fingerprint import changed_since_start

WEIGHTS = "model.safetensors"


def write_model(folder: Path, content: bytes = b"1" * 64) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(content)
    (folder / "notes.txt").write_text("")
    return folder


def config(model: Path | str, **load: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None),
        load_config=SimpleNamespace(**{"load_format": "auto", "download_dir": None, **load}),
        speculative_config=None,
    )


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def starts_now() -> None:
        began = time.time_ns() + model_fingerprint._CLOCK_SKEW_NS  # what was just written is old
        monkeypatch.setattr(model_fingerprint, "_process_start_ns", lambda: began)
        time.sleep(0.02)  # files have their times from a clock that ticks less often

    return starts_now


def write_again(folder: Path) -> None:
    """As large as before, and with its time."""
    file = folder / WEIGHTS
    was = file.stat()
    file.write_bytes(b"2" * 64)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def move_there(folder: Path) -> None:
    (folder.parent / "other" / WEIGHTS).rename(folder / WEIGHTS)


def other_folder(folder: Path) -> None:
    """The folder's name is a link: nothing in either folder is new."""
    link = folder.parent / "new"
    link.symlink_to(folder.parent / "other")
    link.rename(folder)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "written again": write_again,
    "another moved there": move_there,
    "the folder's link": other_folder,
    "one more": lambda folder: (folder / "more.safetensors").write_bytes(b""),
    "one less": lambda folder: (folder / "config.json").unlink(),
    "touched": lambda folder: (folder / WEIGHTS).touch(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_since_the_process_began_is_noticed(
    tmp_path: Path, start: Callable[[], None], change: str
) -> None:
    write_model(tmp_path / "model")
    write_model(tmp_path / "other", b"2" * 64)
    served = tmp_path / "served"
    served.symlink_to("model")
    start()
    (tmp_path / "another model").mkdir()
    (served / "notes.txt").write_text("read")
    assert changed_since_start(config(served)) is None
    CHANGES[change](served)
    assert changed_since_start(config(served)) is not None
    assert changed_since_start(config(served, load_format="dummy")) is None
    start()
    assert changed_since_start(config(served)) is None


def test_hub_that_has_something_newer(
    tmp_path: Path, start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fetched while the engine starts is what it loads, if there was nothing before."""
    refs = tmp_path / "refs"

    def fetch(commit: str) -> None:
        write_model(tmp_path / "snapshots" / commit)
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(commit)

    def snapshot(*repository: Any) -> Path:
        return tmp_path / "snapshots" / (refs / "main").read_text()

    monkeypatch.setattr(model_fingerprint, "_snapshot", snapshot)
    start()
    fetch("1")
    assert changed_since_start(config("some/model")) is None
    fetch("2")
    assert changed_since_start(config("some/model")) == refs / "main"
    start()
    assert changed_since_start(config("some/model")) is None


def test_start_time_of_a_process_is_read() -> None:
    before = time.time_ns()
    program = (
        "from vllm_tiered_kv.connector.identity import model_fingerprint as m\n"
        "print(m._process_start_ns())"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    tick = 20_000_000  # the kernel counts in hundredths of a second
    assert before - tick <= int(out) <= time.time_ns()
