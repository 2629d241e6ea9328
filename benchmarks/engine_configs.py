"""The ways to run vLLM that `connectors.py` and `chats.py` compare: which engine each one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chat_workloads import Workload
from benchmarks.engine_process import EngineSpec
from tests.models import QWEN2_7B, TINY_QWEN2

GIB = 1 << 30

# In the order in which they are put into groups: what the goals compare comes first.
CONNECTOR_MODES = (
    "vllm",
    "tiered",
    "nothing",
    "offloading",
    "offloading_blhnc",
    "simple",
    "tiered_layerwise",
    "tiered_no_early_loads",
    "hash_only",
    "offloading_fs",
)
ANCHORS = ("vllm", "tiered")
"""In every group: what the others of that group are compared with."""
WITHOUT_TIER = ("vllm", "nothing", "hash_only")
ON_A_CPU = (
    "vllm",
    "tiered",
    "nothing",
    "tiered_layerwise",
    "tiered_no_early_loads",
    "hash_only",
    "tiered_daemon",
    "tiered_daemon_tcp",
    "limit",
    "limit_seqs",
)
"""vLLM's own connectors need a GPU."""


@dataclass(frozen=True)
class Scale:
    """One size of the whole comparison: model, prompts and memory."""

    model: dict[str, Any]
    prompt_tokens: int
    batch: int
    tier_bytes: int
    device_bytes: int

    @property
    def prompt_bytes(self) -> int:
        """KV bytes of one prompt, in bfloat16."""
        shape = {**TINY_QWEN2, **self.model}
        head = shape["hidden_size"] // shape["num_attention_heads"]
        token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 2
        return int(token * self.prompt_tokens)


def available(modes: Sequence[str], gpu: bool) -> list[str]:
    """Those of `modes` that run here, in the order of `CONNECTOR_MODES`."""
    return [mode for mode in CONNECTOR_MODES if mode in modes and (gpu or mode in ON_A_CPU)]


def groups(modes: Sequence[str], most: int) -> list[list[str]]:
    """Modes that run side by side, at most so many; the anchors are in each group."""
    anchors = [mode for mode in ANCHORS if mode in modes]
    others = [mode for mode in modes if mode not in anchors]
    room = max(most - len(anchors), 1)
    parts = [others[at : at + room] for at in range(0, len(others), room)] or [[]]
    return [[*anchors, *part] for part in parts]


def connector_spec(mode: str, scale: Scale, folder: Path) -> EngineSpec:
    options = {
        "kv_cache_memory_bytes": scale.device_bytes,
        "max_model_len": max(1024, scale.prompt_tokens + 1024),
    }
    return EngineSpec(
        name=mode,
        model=scale.model,
        transfer=_transfer(mode, scale, folder),
        environment=_environment(mode),
        options=options,
    )


def _transfer(mode: str, scale: Scale, folder: Path) -> dict[str, Any] | None:
    tier = scale.tier_bytes
    if mode == "vllm":
        return None
    if mode == "nothing":
        return _ours(mode="naive")
    if mode == "hash_only":
        return _ours(mode="hash_only")
    if mode == "tiered":
        return _ours(cpu_memory=tier, **_always(scale))
    if mode == "tiered_no_early_loads":
        found = _ours(cpu_memory=tier, **_always(scale))
        return {**found, "kv_connector_module_path": "benchmarks.no_early_loads"}
    if mode == "tiered_layerwise":
        return _ours(cpu_memory=tier, block_layout="any", **_always(scale))
    if mode == "simple":
        return _connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=tier)
    if mode == "offloading_fs":
        return _connector(
            "OffloadingConnector",
            spec_name="TieringOffloadingSpec",
            cpu_bytes_to_use=2 * GIB,
            secondary_tiers=[{"type": "fs", "root_dir": str(folder / "fs")}],
        )
    if mode.startswith("offloading"):
        return _connector("OffloadingConnector", cpu_bytes_to_use=tier)
    raise ValueError(f"no mode {mode!r}; there are {', '.join(CONNECTOR_MODES)}")


def _always(scale: Scale) -> dict[str, Any]:
    """The tiny model computes faster than anything loads: its tier would never be asked."""
    return {} if scale.model else {"load_policy": "always"}


def _ours(**extra: Any) -> dict[str, Any]:
    path = "vllm_tiered_kv.connector.connector"
    return {**_connector("TieredKVConnector", **extra), "kv_connector_module_path": path}


def _connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _environment(mode: str) -> dict[str, str]:
    if mode == "offloading_blhnc":
        return {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}
    return {}


# Those that the goals compare with each other are neighbours: machines drift.
CHAT_MODES = (
    "tiered_daemon",
    "tiered_daemon_tcp",
    "tiered",
    "offloading_blhnc",
    "limit",
    "limit_seqs",
    "vllm",
    "offloading",
    "simple",
)
CHAT_BASELINES = ("offloading_blhnc", "offloading", "simple", "vllm")

DAEMON_MODES = ("tiered_daemon", "tiered_daemon_tcp")

_TINY_TIER = 256 << 20
_TINY_DAEMON_TIER = 4 << 20
MAX_MODEL_LEN = 32_768
TINY_MAX_MODEL_LEN = 2_048


def why_not(mode: str, workload: Workload, gpu: bool) -> str | None:
    """Why this mode does not run this workload here; None: it does."""
    if not gpu and mode not in ON_A_CPU:
        return "vLLM's own connectors need a GPU"
    if mode == "limit_seqs" and (workload.kind != "chats" or workload.shared_tokens):
        return "how many requests fit is known for chats that share nothing"
    if workload.kind == "prefill" and mode == "limit":
        return "prompts are distinct: a larger GPU cache holds nothing that is asked again"
    if workload.kill_after_turn is not None and mode not in DAEMON_MODES:
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


def chat_spec(
    mode: str,
    cache_tokens: int,
    tiny: bool,
    cpu_gib: float,
    daemon_cpu_gib: float,
    daemon: str | None,
    max_num_seqs: int | None = None,
    shares_device: bool = False,
) -> EngineSpec:
    """`cpu_gib` is the CPU tier of every mode, or the memory of its daemon. `shares_device`:
    engines start side by side, so none can measure how much memory is free."""
    model = {} if tiny else QWEN2_7B
    tier = _TINY_TIER if tiny else int(cpu_gib * GIB)
    bases = {"limit": "vllm", "limit_seqs": "vllm", **dict.fromkeys(DAEMON_MODES, "tiered")}
    base = bases.get(mode, mode)
    found = connector_spec(base, Scale(model, 0, 0, tier, 0), Path())
    if mode in DAEMON_MODES:
        assert found.transfer is not None
        found.transfer["kv_connector_extra_config"] |= {
            "cpu_memory": _TINY_DAEMON_TIER if tiny else int(daemon_cpu_gib * GIB),
            "remote": daemon,
            # Two busy cores may take long to answer; a GPU machine runs with the default.
            **({"remote_lookup_timeout": 5} if tiny else {}),
        }
    options = _options(cache_tokens, tiny)
    if max_num_seqs is not None:
        options["max_num_seqs"] = max_num_seqs
    if shares_device and not tiny:
        blocks = options["num_gpu_blocks_override"]
        options["gpu_memory_utilization"] = 0.05
        options["kv_cache_memory_bytes"] = Scale(
            model, blocks * block_size(tiny), 0, 0, 0
        ).prompt_bytes
    return EngineSpec(mode, model, found.transfer, found.environment, options)


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
