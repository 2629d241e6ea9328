"""Entry point of the `vllm.general_plugins` group: registers the connector by name.

vLLM calls this in every process, sometimes more than once, so it must be cheap (the connector
itself is imported only when used) and idempotent. Another connector under our name is an error.
"""

from __future__ import annotations

CONNECTOR_NAME = "TieredKVConnector"
MODULE_PATH = "vllm_tiered_kv.connector.connector"

_registered = False


def register() -> None:
    """Registers TieredKVConnector with vLLM's factory, once."""
    global _registered
    if _registered:
        return
    # An unsupported vLLM is refused when the connector is loaded, not here: an installed plugin
    # must not disturb engines that do not use it.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = KVConnectorFactory._registry
    if CONNECTOR_NAME in known:
        connector = known[CONNECTOR_NAME]()
        if connector.__module__ != MODULE_PATH:
            raise ValueError(
                f"another plugin has registered a KV connector named {CONNECTOR_NAME} "
                f"({connector.__module__}); uninstall one of the two"
            )
    else:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, MODULE_PATH, CONNECTOR_NAME)
    _registered = True
