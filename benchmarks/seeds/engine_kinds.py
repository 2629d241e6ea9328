"""The kinds of engines the tables compare: vLLM alone, with our connector, with a daemon behind."""

from __future__ import annotations

from typing import Any

from benchmarks.engine_process import EngineSpec
from benchmarks.seeds.shapes import Shape

SCHEDULING = {"sync": False, "async": True}
CHUNK = 1024
_LOOKUP_TIMEOUT_S = 5
_LOAD_TIMEOUT_S = 120


def connector(mode: str = "tiered", **options: Any) -> dict[str, Any]:
    """Our connector, for `kv_transfer_config`. It loads whatever a tier holds: tables show how fast
    a tier is, also where computing again would be faster."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": mode, "load_policy": "always", **options},
    }


def with_tails(cpu_memory: int) -> dict[str, Any]:
    """The seeds' "you only compute once"."""
    return connector(cpu_memory=cpu_memory, reuse_partial_tail=True)


def with_daemon(address: str, cpu_memory: int) -> dict[str, Any]:
    """Patient: tables measure how fast a tier is, not how soon it is given up."""
    return connector(
        cpu_memory=cpu_memory,
        remote=address,
        remote_lookup_timeout=_LOOKUP_TIMEOUT_S,
        remote_load_timeout=_LOAD_TIMEOUT_S,
    )


def daemon_of(spec: EngineSpec) -> str | None:
    """The address of the daemon behind an engine."""
    options = (spec.transfer or {}).get("kv_connector_extra_config", {})
    address: str | None = options.get("remote")
    return address


def engine(
    shape: Shape,
    system: str,
    transfer: dict[str, Any] | None,
    *,
    gpu_cache: bool,
    kv_bytes: int,
    scheduling: str | None = None,
) -> EngineSpec:
    """`scheduling` None is what vLLM chooses by itself."""
    cache = "cache" if gpu_cache else "nocache"
    options: dict[str, Any] = {
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": shape.sequences,
        "block_size": shape.block_tokens,
        "enable_prefix_caching": gpu_cache,
        "kv_cache_memory_bytes": kv_bytes,
    }
    if scheduling is not None:
        options["async_scheduling"] = SCHEDULING[scheduling]
    return EngineSpec(
        name="-".join([shape.name, system, scheduling or "default", cache]),
        model=shape.model,
        transfer=transfer,
        options=options,
    )
