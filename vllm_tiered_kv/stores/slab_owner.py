"""Whose slabs a block lies in.

A quota is kept in whole slabs, so a namespace that has one does not share them. All others do, or
each of them would take a whole slab for its first block: docs/adr/0005.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.core.store import StoreKey, namespace_of

HasQuota = Callable[[bytes], bool]  # asked of a namespace, before its first block and ever after
QuotaOf = Callable[[bytes], "int | None"]  # the bytes; of those that have one

SHARED = b""


def any_may(namespace: bytes) -> bool:
    """Quotas may be set for every namespace."""
    return True


def all_share(namespace: bytes) -> bool:
    """There are no quotas."""
    return False


def owner_of(key: bytes, has_quota: HasQuota) -> bytes:
    namespace = namespace_of(StoreKey(key))
    return namespace if has_quota(namespace) else SHARED


def require_own(namespace: bytes, has_quota: HasQuota) -> None:
    if not has_quota(namespace):
        raise ValueError(f"namespace {namespace.hex()} shares its slabs: it cannot have a quota")
