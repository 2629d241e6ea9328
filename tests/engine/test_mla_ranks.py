"""MLA over two tensor-parallel ranks: both hold the same KV, the CPU tier and the daemon hold it
once.

The heads of the model are divided between the ranks, so an answer is right only if each of them
found the right latent KV.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.engine_apart import run_apart
from tests.engine.made_models import write_weights
from tests.engine.replicated_run import BLOCK, LAYERS, LENGTHS
from tests.models import TINY_MLA, write_config
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.store import RemoteStore

pytestmark = pytest.mark.engine


@pytest.mark.slow
def test_two_ranks_of_mla_share_one_copy(tmp_path: Path) -> None:
    model = write_weights(write_config(tmp_path / "model", TINY_MLA))
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
        DaemonProcess(Path(folder), "--memory", "64MiB") as daemon,
    ):
        report = run_apart(
            "replicated_run",
            str(model),
            daemon.endpoint,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            # To look at arenas inside the workers; the cache itself unpickles nothing.
            VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        )
        anyone = EngineIdentity(bytes(32), (BLOCK,), "layout", "test")
        store = RemoteStore(daemon.endpoint, anyone)
        held = store.usage()
        store.close()

    block_bytes = LAYERS * BLOCK * 576 * 4
    assert report["block_bytes"] == [block_bytes]
    stored = sum(length // BLOCK for length in LENGTHS)
    assert report["stored"] == stored
    assert held.blocks == stored  # and not twice as many
    assert held.used_bytes == stored * block_bytes

    # Two processes, one memory: all of cpu_memory, and each block in it once.
    first, second = report["arenas"]
    assert first.pop("pid") != second.pop("pid")
    assert first == second
    assert first["file"][2].startswith("/memfd:tiered-kv-replicas")
    assert report["capacity"] == first["nbytes"] == 64 << 20
    assert report["used_bytes"] == stored * block_bytes

    whole = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert [answer["cached"] for answer in report["cold"]] == [0] * len(LENGTHS)
    assert [answer["cached"] for answer in report["daemon"]] == whole
    assert len({tuple(answer["tokens"]) for answer in report["cold"]}) == len(LENGTHS)
    assert report["daemon"] == report["tier"]  # tokens, logprobs and cached tokens
    # vLLM rounds the context it finds to bfloat16 with these kernels, and answers drift from there.
    for found, cold in zip(report["tier"], report["cold"], strict=True):
        assert found["tokens"][0] == cold["tokens"][0]
        assert found["logprobs"][0] == pytest.approx(cold["logprobs"][0], abs=0.1)
    # What one rank spoils both read.
    for spoiled, right in zip(report["spoiled"], report["tier"], strict=True):
        assert spoiled["cached"] == right["cached"]
        assert spoiled["logprobs"] != right["logprobs"]
    assert report["loaded"] == sum(whole) // BLOCK
    assert report["failures"] == report["pinned"] == 0


@pytest.mark.parametrize("where", ["allocation", "meeting of the first"])
@pytest.mark.slow
def test_start_that_fails_on_one_rank_does_not_hang(tmp_path: Path, where: str) -> None:
    """The other one must not wait for it, be it that their memory is shared already or not yet."""
    model = write_weights(write_config(tmp_path / "model", TINY_MLA))
    report = run_apart(
        "failing_rank_run",
        str(model),
        FAIL_AT=where,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert "planted" in report["error"] or "could not agree" in report["error"]
