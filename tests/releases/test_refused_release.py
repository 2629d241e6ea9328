"""On a vLLM that is too old: engines that do not ask for the cache run as if it were not there,
and those that do end with one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import write_model

vllm = pytest.importorskip("vllm")

from vllm_tiered_kv.core.vllm_releases import OLDEST_VLLM, parse_version  # noqa: E402

ROOT = Path(__file__).parents[2]
SENTENCE = (
    f"vllm-tiered-kv needs vLLM {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or newer, this is "
    f"{vllm.__version__}; upgrade vLLM or remove TieredKVConnector from --kv-transfer-config"
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        (parse_version(vllm.__version__) or OLDEST_VLLM) >= OLDEST_VLLM,
        reason="this vLLM is served",
    ),
]


def run_engine(folder: Path, transfer: dict[str, Any] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.releases.engine_run",
            str(write_model(folder / "model")),
            json.dumps(transfer),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )


def test_engine_that_does_not_ask_for_the_cache_runs(tmp_path: Path) -> None:
    done = run_engine(tmp_path, None)
    assert done.returncode == 0, done.stdout[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert len(result["tokens"]) == 4
    assert result["registered"], "the plugin was not even loaded"


@pytest.mark.parametrize("how", ["by_name", "by_module"])
def test_engine_with_the_connector_ends_with_one_sentence(tmp_path: Path, how: str) -> None:
    transfer = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both"}
    if how == "by_module":
        transfer["kv_connector_module_path"] = "vllm_tiered_kv.connector.connector"
    done = run_engine(tmp_path, transfer)
    assert done.returncode != 0
    assert "RESULT" not in done.stdout
    assert f"UnsupportedError: {SENTENCE}" in done.stdout, done.stdout[-4000:]
    # The first thing that went wrong, not something that followed from another error.
    causes = [line for line in done.stdout.splitlines() if "Error: " in line]
    assert SENTENCE in causes[0], causes
