"""TieredKVConnector without early loads, so that `connectors.py` can measure what these gain."""

from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.connector.scheduler import early_loads

__all__ = ["TieredKVConnector"]

early_loads.is_possible = lambda vllm_config, steps_zero_blocks: False
