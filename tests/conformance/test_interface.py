"""The connector's face, held against the vLLM that is installed."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.core.vllm_releases import parse_version

BASES = (KVConnectorBase_V1, SupportsHMA)
OVERRIDDEN = sorted(
    name
    for name, member in vars(TieredKVConnector).items()
    if not name.startswith("_")
    and (callable(member) or isinstance(member, (classmethod, property)))
)
NEW_IN_0_32 = {"get_external_cache_hit_sources"}
CALLERS = (
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.worker.gpu.kv_connector",
    "vllm.v1.worker.gpu_worker",
    "vllm.distributed.kv_transfer.kv_transfer_state",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
_CALL = re.compile(
    r"(?:\bself\.connector|\bkv_connector|\bself\.kv_connector|\bconnector_cls|"
    r"get_kv_transfer_group\(\)|get_kv_connector\(\))\.([a-z_]+)\("
)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_have_the_signatures_of_the_base_class(name: str) -> None:
    """A parameter vLLM renamed, added or dropped shows here before it shows in an engine."""
    if name in NEW_IN_0_32 and (parse_version(vllm.__version__) or (9, 9)) < (0, 32):
        pytest.skip("vLLM calls it since 0.32")
    base = next((base for base in BASES if name in vars(base)), None)
    assert base is not None, f"vLLM knows no {name}: it would never be called"
    theirs, mine = vars(base)[name], vars(TieredKVConnector)[name]
    assert type(mine) is type(theirs)
    if not isinstance(mine, property):
        assert _parameters(getattr(TieredKVConnector, name)) == _parameters(getattr(base, name))


def _parameters(function: object) -> list[tuple[str, object, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def test_connector_implements_all_abstract_methods() -> None:
    assert not inspect.isabstract(TieredKVConnector)


def test_constructor_takes_what_the_factory_gives() -> None:
    assert list(inspect.signature(TieredKVConnector).parameters) == [
        "vllm_config",
        "role",
        "kv_cache_config",
    ]


@pytest.mark.parametrize("module", CALLERS)
def test_every_hook_vllm_calls_is_there(module: str) -> None:
    """Read from vLLM's own sources: a hook the base class lacks would be found here too."""
    called = set(_CALL.findall(inspect.getsource(importlib.import_module(module))))
    missing = {name for name in called if not hasattr(TieredKVConnector, name)}
    assert not missing


def test_callers_are_the_right_ones() -> None:
    """The search above finds something: the calls without which there is no cache."""
    found = {
        name
        for module in CALLERS
        for name in _CALL.findall(inspect.getsource(importlib.import_module(module)))
    }
    assert found >= {
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "update_connector_output",
        "on_new_request",
        "start_load_kv",
        "wait_for_save",
        "get_transfer_results",
        "build_connector_worker_meta",
        "reset_cache",
    }
