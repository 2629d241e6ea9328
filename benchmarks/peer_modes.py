"""The ways to run vLLM that `peers.py` compares: what engine each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineSpec

GIB = 1 << 30

# In the order in which they are put into groups: what the goals compare comes first.
MODES = (
    "vllm",
    "tiered",
    "nothing",
    "offloading",
    "offloading_blhnc",
    "simple",
    "tiered_layerwise",
    "hash_only",
    "offloading_fs",
)
ANCHORS = ("vllm", "tiered")
"""In every group: what the others of that group are compared with."""
WITHOUT_TIER = ("vllm", "nothing", "hash_only")
ON_A_CPU = ("vllm", "tiered", "nothing", "tiered_layerwise", "hash_only")
"""vLLM's own connectors need a GPU."""


@dataclass(frozen=True)
class Scale:
    """One size of the whole comparison."""

    model: dict[str, Any]
    prompt_tokens: int
    batch: int
    tier_bytes: int
    device_bytes: int

    @property
    def prompt_bytes(self) -> int:
        """KV bytes of one prompt, in bfloat16."""
        from tests.models import TINY_QWEN2

        shape = {**TINY_QWEN2, **self.model}
        head = shape["hidden_size"] // shape["num_attention_heads"]
        token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 2
        return int(token * self.prompt_tokens)


def available(modes: Sequence[str], gpu: bool) -> list[str]:
    """Those of `modes` that run here, in the order of `MODES`."""
    return [mode for mode in MODES if mode in modes and (gpu or mode in ON_A_CPU)]


def groups(modes: Sequence[str], most: int) -> list[list[str]]:
    """Modes that run side by side, at most so many; the anchors are in each group."""
    anchors = [mode for mode in ANCHORS if mode in modes]
    others = [mode for mode in modes if mode not in anchors]
    room = max(most - len(anchors), 1)
    parts = [others[at : at + room] for at in range(0, len(others), room)] or [[]]
    return [[*anchors, *part] for part in parts]


def spec(mode: str, scale: Scale, folder: Path) -> EngineSpec:
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
    raise ValueError(f"no mode {mode!r}; there are {', '.join(MODES)}")


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
