"""The ways to run vLLM that `chats.py` compares: what engine each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peer_modes
from benchmarks.chat_workloads import Workload
from benchmarks.engine_process import EngineSpec
from benchmarks.peer_modes import GIB, Scale
from tests.models import QWEN2_7B, TINY_QWEN2

# Those that the goals compare with each other are neighbours: machines drift.
MODES = (
    "tiered_daemon",
    "tiered",
    "offloading_blhnc",
    "limit",
    "vllm",
    "offloading",
    "simple",
)
ON_A_CPU = ("tiered_daemon", "tiered", "limit", "vllm")
PEERS = ("offloading_blhnc", "offloading", "simple", "vllm")

_TINY_TIER = 256 << 20
_TINY_DAEMON_TIER = 4 << 20
MAX_MODEL_LEN = 32_768
TINY_MAX_MODEL_LEN = 2_048


def why_not(mode: str, workload: Workload, gpu: bool) -> str | None:
    """Why this mode does not run this workload here; None: it does."""
    if not gpu and mode not in ON_A_CPU:
        return "vLLM's own connectors need a GPU"
    if workload.kind == "prefill" and mode == "limit":
        return "prompts are distinct: a larger GPU cache holds nothing that is asked again"
    if workload.kill_after_turn is not None and mode != "tiered_daemon":
        return "only a daemon outlives the engine"
    return None


def max_model_len(tiny: bool) -> int:
    """The same for all workloads, as it is part of vLLM's compile cache key."""
    return TINY_MAX_MODEL_LEN if tiny else MAX_MODEL_LEN


def block_size(tiny: bool) -> int:
    return 32 if tiny else 16  # vLLM's CPU kernels want multiples of 32


def vocabulary(tiny: bool) -> int:
    return int((TINY_QWEN2 if tiny else QWEN2_7B)["vocab_size"])


def daemon_arguments(tiny: bool, cpu_gib: float) -> Sequence[str]:
    return ("--memory", str(_TINY_TIER if tiny else int(cpu_gib * GIB)))


def spec(
    mode: str,
    cache_tokens: int,
    tiny: bool,
    cpu_gib: float,
    daemon_cpu_gib: float,
    daemon: str | None,
) -> EngineSpec:
    """`cpu_gib` is the CPU tier of every mode, or the memory of its daemon."""
    model = {} if tiny else QWEN2_7B
    tier = _TINY_TIER if tiny else int(cpu_gib * GIB)
    base = {"limit": "vllm", "tiered_daemon": "tiered"}.get(mode, mode)
    found = peer_modes.spec(base, Scale(model, 0, 0, tier, 0), Path())
    if mode == "tiered_daemon":
        assert found.transfer is not None
        found.transfer["kv_connector_extra_config"] |= {
            "cpu_memory": _TINY_DAEMON_TIER if tiny else int(daemon_cpu_gib * GIB),
            "remote": daemon,
            # Two busy cores may take long to answer; a GPU machine runs with the default.
            **({"remote_lookup_timeout": 5} if tiny else {}),
        }
    return EngineSpec(mode, model, found.transfer, found.environment, _options(cache_tokens, tiny))


def _options(cache_tokens: int, tiny: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "block_size": block_size(tiny),
        "num_gpu_blocks_override": -(-cache_tokens // block_size(tiny)) + 1,  # one is never used
        "max_model_len": max_model_len(tiny),
        "enable_prefix_caching": True,
    }
    if tiny:
        return {**options, "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    return {
        **options,
        "max_num_batched_tokens": 8_192,
        "max_num_seqs": 64,  # fewer graphs to capture: a faster start
    }
