"""How vLLM comes to know the connector: by entry point, once, and never in another's way."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vllm_tiered_kv.connector import plugin
from vllm_tiered_kv.connector.plugin import CONNECTOR_NAME, MODULE_PATH, register
from vllm_tiered_kv.errors import UnsupportedError


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    """vLLM's registry as it is before plugins are loaded."""
    known = {
        name: load for name, load in KVConnectorFactory._registry.items() if name != CONNECTOR_NAME
    }
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)
    monkeypatch.setattr(plugin, "_registered", False)
    return known


def test_registering_twice_is_fine(registry: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(registry)
    register()
    register()
    # As in a process where the module was imported anew, but vLLM's was not.
    monkeypatch.setattr(plugin, "_registered", False)
    register()
    assert len(registry) == before + 1
    from vllm_tiered_kv.connector.connector import TieredKVConnector

    assert registry[CONNECTOR_NAME]() is TieredKVConnector


def test_registering_leaves_the_connector_for_when_it_is_asked_for(
    registry: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, MODULE_PATH, raising=False)
        register()
        assert MODULE_PATH not in sys.modules
    config = KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config).__module__ == MODULE_PATH
    assert KVConnectorFactory.supports_hma_config(config)


def test_other_connectors_stay(registry: dict) -> None:
    before = dict(registry)
    register()
    assert {name: registry[name] for name in before} == before


def test_foreign_connector_under_our_name_is_an_error(registry: dict) -> None:
    foreign = type("Theirs", (), {"__module__": "somebody.elses"})
    registry[CONNECTOR_NAME] = lambda: foreign
    for _ in range(2):  # it stays one
        with pytest.raises(ValueError, match=r"TieredKVConnector \(somebody\.elses\)") as caught:
            register()
        assert "\n" not in str(caught.value)
    assert registry[CONNECTOR_NAME]() is foreign


def test_installed_entry_point_is_register() -> None:
    (entry,) = metadata.distribution("vllm-tiered-kv").entry_points.select(
        group="vllm.general_plugins"
    )
    assert entry.name == "tiered_kv"
    assert entry.load() is register


@pytest.mark.slow
def test_vllm_finds_the_connector_by_name_in_a_fresh_process() -> None:
    """The plugins are loaded as vLLM does it, twice; the connector itself comes when asked for."""
    program = f"""
import sys
import vllm.plugins
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

for _ in range(2):
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
assert {MODULE_PATH!r} not in sys.modules, "registering imported the connector"
config = KVTransferConfig(kv_connector={CONNECTOR_NAME!r}, kv_role="kv_both")
connector = KVConnectorFactory.get_connector_class(config)
assert connector.__module__ == {MODULE_PATH!r}
assert connector is KVConnectorFactory.get_connector_class_by_name({CONNECTOR_NAME!r})
assert KVConnectorFactory.supports_hma_config(config)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("role", KVConnectorRole)
@pytest.mark.parametrize("version", ["0.26.0", "0.30.4+cpu"])
def test_vllm_that_is_too_old_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str, role: KVConnectorRole
) -> None:
    from vllm_tiered_kv.connector.connector import TieredKVConnector

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedError) as caught:
        TieredKVConnector(SimpleNamespace(), role, SimpleNamespace())
    sentence = str(caught.value)
    assert f"needs vLLM 0.31 or newer, this is {version};" in sentence
    assert "\n" not in sentence


@pytest.mark.slow
def test_vllm_without_our_hooks_is_refused_before_it_breaks_an_import() -> None:
    program = f"""
import vllm.distributed.kv_transfer.kv_connector.v1.base as base
del base.KVConnectorTransferResults, base.KVConnectorBase_V1.get_transfer_results
from vllm_tiered_kv.connector.plugin import register
from vllm_tiered_kv.errors import UnsupportedError
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
try:
    KVConnectorFactory.get_connector_class_by_name({CONNECTOR_NAME!r})
except UnsupportedError as refusal:
    print(refusal)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("vllm-tiered-kv needs vLLM 0.31 or newer"), done.stderr[-3000:]


def test_newer_vllm_is_tried_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.engine.made_configs import engine_config, one_group
    from tests.models import write_model
    from vllm_tiered_kv.connector.connector import TieredKVConnector

    config = engine_config(
        write_model(tmp_path / "model"),
        kv_transfer_config={
            "kv_connector": CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": "1MiB"},
        },
    )
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    connector = TieredKVConnector(config, KVConnectorRole.SCHEDULER, one_group())
    assert connector.scheduler_half is not None
    assert [r.message for r in caplog.records if "tested with vLLM" in r.message] == [
        "vllm-tiered-kv was tested with vLLM up to 0.32, this is 0.99.1"
    ]
