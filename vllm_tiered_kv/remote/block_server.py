"""What the connector asks of a server of blocks: a daemon, or a store without a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard

from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.remote.address import EngineIdentity, ServerAddress
from vllm_tiered_kv.remote.store import ClaimResult, RemoteMatch, RemoteStore


class BlockServer(Protocol):
    """Any thread may call it, and a failure of the server is no exception: `RemoteStore` describes
    each call. `get` and `put` may raise TransferPending."""

    identity: EngineIdentity

    @property
    def address(self) -> ServerAddress | str: ...

    @property
    def available(self) -> bool: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def failed_calls(self) -> int: ...

    def greet(self, connections: int = 1) -> None: ...

    def match_all(
        self,
        keys: Sequence[BlockKey],
        ranks: Sequence[RankTag],
        pin_ms: int = 0,
        deadline: float | None = None,
    ) -> RemoteMatch | None: ...

    def contains_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], deadline: float
    ) -> list[bool]: ...

    def claim(
        self, keys: Sequence[BlockKey], owner: bytes, ttl_s: float, deadline: float
    ) -> ClaimResult: ...

    def get(
        self,
        keys: Sequence[StoreKey],
        into: Sequence[memoryview],
        deadline: float | None = None,
    ) -> list[bool]: ...

    def put(
        self,
        items: Sequence[PutItem],
        durability: Durability = Durability.MEMORY,
        deadline: float | None = None,
    ) -> list[PutResult]: ...

    def delete(self, keys: Sequence[StoreKey]) -> int: ...

    def close(self) -> None: ...


def is_local(server: BlockServer) -> TypeGuard[RemoteStore]:
    """Whether it is a daemon on this host, which may share its memory."""
    return str(server.address).startswith("ipc://")
