"""Our connector, one rank of which fails for as long as a file says so.

vLLM is told of it by `kv_connector_module_path`. What fails is what is below the connector: the
copies of the device, and the connection to a daemon.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.errors import ConnectionLost, CudaError
from vllm_tiered_kv.native import cpu as native
from vllm_tiered_kv.remote.connection import Connection

FAULT_FILE = "BAD_RANK_FAULT_FILE"
"""The variable that names the file, for all processes of the engine."""

BAD_RANK = 1


class Fault(str, enum.Enum):
    """What the file may hold."""

    LOADS_FAIL = "loads fail"
    LOADS_LIE = "loads lie"  # wrong bytes, and no error
    STORES_FAIL = "stores fail"
    DAEMON_LOST = "daemon lost"


class BadRankConnector(TieredKVConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER and vllm_config.parallel_config.rank == BAD_RANK:
            plant(Path(os.environ[FAULT_FILE]))


def plant(file: Path) -> None:
    """In the process of the worker that is to fail."""
    gather, scatter, open_connection = native.gather, native.scatter, Connection.open

    def fault() -> Fault | None:
        try:
            return Fault(file.read_text())
        except FileNotFoundError:
            return None

    # A copy that fails copies the first block to all places. Not nothing: the right bytes may still
    # lie there from an earlier request. And not all blocks in another order: attention would hardly
    # notice.

    def gather_or_fail(
        layout: Any, block_ids: Any, region: Any, slot_offsets: Any, threads: int
    ) -> None:
        fails = fault() is Fault.STORES_FAIL
        if fails:
            block_ids = np.full_like(block_ids, block_ids[0])
        gather(layout, block_ids, region, slot_offsets, threads)
        if fails:
            raise CudaError("planted")

    def scatter_or_fail(
        layout: Any, block_ids: Any, region: Any, slot_offsets: Any, threads: int
    ) -> None:
        now = fault()
        if now in (Fault.LOADS_FAIL, Fault.LOADS_LIE):
            slot_offsets = np.full_like(slot_offsets, slot_offsets[0])
        scatter(layout, block_ids, region, slot_offsets, threads)
        if now is Fault.LOADS_FAIL:
            raise CudaError("planted")

    def open_or_fail(connection: Connection, deadline: float) -> None:
        if fault() is Fault.DAEMON_LOST:
            raise ConnectionLost("planted")
        open_connection(connection, deadline)

    mock.patch.object(native, "gather", gather_or_fail).start()
    mock.patch.object(native, "scatter", scatter_or_fail).start()
    mock.patch.object(Connection, "open", open_or_fail).start()
