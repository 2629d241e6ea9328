"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.eviction.base import EvictionPolicy
from vllm_tiered_kv.eviction.lru import LRUPolicy
from vllm_tiered_kv.eviction.s3fifo import S3FIFOPolicy

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LRUPolicy,
    "s3fifo": S3FIFOPolicy,
}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """A fresh policy for at most `capacity` slots."""
    return POLICIES[name](capacity)
