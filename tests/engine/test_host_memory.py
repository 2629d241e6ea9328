"""All workers of a host together must not take more memory than it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.errors import ConfigError

pytestmark = pytest.mark.engine

GIB = 1 << 30


def parallel(**settings: Any) -> SimpleNamespace:
    usual = {
        "distributed_executor_backend": "mp",
        "nnodes_within_dp": 1,
        "data_parallel_size_local": 1,
    }
    return SimpleNamespace(**{**usual, **settings})


@pytest.mark.parametrize(
    ("gib", "settings", "fits"),
    [
        (128, {}, True),
        (129, {}, False),
        (129, {"distributed_executor_backend": None}, False),
        (256, {"nnodes_within_dp": 2}, True),
        (258, {"nnodes_within_dp": 2}, False),
        (64, {"data_parallel_size_local": 2}, True),
        (65, {"data_parallel_size_local": 2}, False),
        (200, {"distributed_executor_backend": "ray"}, True),  # they may be on any host
    ],
)
def test_memory_of_all_workers_is_checked_together(
    monkeypatch: pytest.MonkeyPatch, gib: int, settings: dict[str, Any], fits: bool
) -> None:
    monkeypatch.setattr(assembly, "memory_limit", lambda: 128 * GIB)
    if fits:
        assembly._require_room_on_this_host(gib * GIB, parallel(**settings))
        return
    with pytest.raises(
        ConfigError, match=r"cpu_memory.*all workers of this host.*set a smaller value"
    ):
        assembly._require_room_on_this_host(gib * GIB, parallel(**settings))
