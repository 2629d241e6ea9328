"""The examples of TokenCache in the documentation work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess

ROOT = Path(__file__).parents[2]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", "128MiB") as running:
        yield running


def test_python_api_page_examples_run(daemon: DaemonProcess) -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 1
    assert examples[0].count("ipc:///run/kv/kv.sock") == 1
    exec(examples[0].replace("ipc:///run/kv/kv.sock", daemon.ipc), {})


def test_example_second_run_computes_nothing(daemon: DaemonProcess) -> None:
    program = [sys.executable, "examples/token_cache.py", daemon.ipc]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = [
        subprocess.run(
            program,
            cwd=ROOT,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for _ in range(2)
    ]
    assert [text.count("computing") for text in said] == [4, 0]
    assert "computing 21 tokens" in said[0], "only what is new"


def test_example_without_arguments_prints_usage() -> None:
    done = subprocess.run(
        [sys.executable, "examples/token_cache.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "expected at least one address" in done.stderr
    assert "python examples/token_cache.py ipc:///tmp/kv.sock" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["memory", "files"])
def test_vineyard_samples_run(daemon: DaemonProcess, tmp_path: Path, name: str) -> None:
    text = (ROOT / "examples" / f"vineyard_{name}.py").read_text()
    place, ours = {
        "memory": ("ipc:///tmp/kv.sock", daemon.ipc),
        "files": ("/tmp/vineyard/llm_cache", str(tmp_path / "vineyard" / "llm_cache")),
    }[name]
    assert text.count(f'"{place}"') == 1
    found: dict[str, Any] = {}
    exec(text.replace(f'"{place}"', repr(ours)), found)
    if name == "files":  # vineyard's program does not look at the result of its comparison
        pairs = zip(found["original_kv_tensors"], found["kv_tensors_from_cache"], strict=True)
        assert all(np.array_equal(stored, queried) for stored, queried in pairs)
