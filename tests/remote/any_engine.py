"""A store for arbitrary keys over the remote client: one client per namespace and key length.

A session has one namespace, one key length and a few block lengths, like an engine. The contract
suite mixes them, so `AnyEngine` distributes its calls over sessions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.stores.contract import KIB, MIB, SIZES
from vllm_tiered_kv.core.store import (
    NAMESPACE_BYTES,
    Durability,
    PutItem,
    PutResult,
    StoreKey,
    StoreUsage,
)
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.messages import Hello

LENGTHS = sorted(
    {*SIZES, 64, 100, 1000, 5000, 4 * KIB, 8 * KIB, 16 * KIB, 2 * MIB}
    | {1 + 977 * at for at in range(32)}
)
_T = TypeVar("_T")


class _AnyIdentity(EngineIdentity):
    """Sends its full namespace in `hello`; an engine's namespace has one key length only."""

    __slots__ = ()

    def hello(self, arena_token: bytes = b"") -> Hello:
        return dataclasses.replace(super().hello(arena_token), namespace=self.namespace)


_Shape = tuple[bytes, int]


class AnyEngine:
    """The BlockStore that the contract suite tests, over a daemon at an address."""

    def __init__(self, address: str, largest: int) -> None:
        """`largest`: the largest block that fits; the daemon refuses engines with larger ones."""
        self._address = address
        self._lengths = tuple(length for length in LENGTHS if length <= largest)
        self._clients: dict[_Shape, RemoteStore] = {}
        self._client((bytes(16), 1))

    def match(self, keys: Sequence[StoreKey]) -> int:
        count = 0
        for shape, run in itertools.groupby(keys, _shape):
            some = list(run)
            matched = self._client(shape).match(some)
            count += matched
            if matched < len(some):
                break
        return count

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        return self._spread(keys, keys, lambda client, some: client.contains(some))

    def get(self, keys: Sequence[StoreKey], into: Sequence[memoryview]) -> list[bool]:
        pairs = list(zip(keys, into, strict=True))
        return self._spread(
            keys,
            pairs,
            lambda client, some: client.get([key for key, _ in some], [place for _, place in some]),
        )

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        return self._spread(
            [item.key for item in items], items, lambda client, some: client.put(some, durability)
        )

    def delete(self, keys: Sequence[StoreKey]) -> int:
        shapes = {_shape(key) for key in keys}
        return sum(
            self._client(shape).delete([key for key in keys if _shape(key) == shape])
            for shape in shapes
        )

    def flush(self) -> bool:
        return self._any().flush()

    def usage(self) -> StoreUsage:
        return self._any().usage()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _any(self) -> RemoteStore:
        return next(iter(self._clients.values()))

    def _client(self, shape: _Shape) -> RemoteStore:
        if shape not in self._clients:
            prefix, width = shape
            rest = hashlib.sha256(prefix + bytes([width])).digest()[:16]
            identity = _AnyIdentity(prefix + rest, self._lengths, "any", "contract", width)
            self._clients[shape] = RemoteStore(
                self._address, identity, timeout_s=60.0, connect_timeout_s=20.0
            )
        return self._clients[shape]

    def _spread(
        self,
        keys: Sequence[StoreKey],
        arguments: Sequence[_T],
        call: Callable[[RemoteStore, list[_T]], list],  # type: ignore[type-arg]
    ) -> list:  # type: ignore[type-arg]
        results: dict[int, object] = {}
        for shape in {_shape(key): None for key in keys}:
            here = [at for at, key in enumerate(keys) if _shape(key) == shape]
            answers = call(self._client(shape), [arguments[at] for at in here])
            results.update(zip(here, answers, strict=True))
        return [results[at] for at in range(len(keys))]


def _shape(key: StoreKey) -> _Shape:
    return bytes(key[:NAMESPACE_BYTES]), len(key) - NAMESPACE_BYTES
