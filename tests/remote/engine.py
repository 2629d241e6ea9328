"""An engine as a daemon sees it: an identity, block keys and block contents."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import PutItem, StoreKey, store_key
from vllm_tiered_kv.remote.address import EngineIdentity

NBYTES = 96 << 10  # above the size from which zmq sends without a copy
NAMESPACE = random.Random("namespace").randbytes(32)
IDENTITY = EngineIdentity(NAMESPACE, (NBYTES,), "layers first", "test engine")
RANK = RankTag()


def identity(*block_bytes: int, name: str = "namespace") -> EngineIdentity:
    namespace = random.Random(name).randbytes(32)
    return EngineIdentity(namespace, block_bytes or (NBYTES,), "layers first", "test engine")


def block_keys(name: str, count: int) -> list[BlockKey]:
    rng = random.Random(name)
    return [BlockKey(rng.randbytes(16) + b"\0") for _ in range(count)]


def keys(
    name: str, count: int, rank: RankTag = RANK, of: EngineIdentity = IDENTITY
) -> list[StoreKey]:
    return [store_key(of.namespace, key, rank) for key in block_keys(name, count)]


def content(key: StoreKey, nbytes: int = NBYTES) -> bytes:
    return random.Random(key).randbytes(nbytes)


def items(chain: Sequence[StoreKey], nbytes: int = NBYTES) -> list[PutItem]:
    parents = [None, *chain[:-1]]
    return [
        PutItem(key, parent, memoryview(content(key, nbytes)))
        for key, parent in zip(chain, parents, strict=True)
    ]


def buffers(count: int, nbytes: int = NBYTES) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for _ in range(count)]


def within(seconds: float) -> float:
    """Returns a deadline this many seconds from now."""
    return time.monotonic() + seconds
