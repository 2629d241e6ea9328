"""A store that scales by itself, directly behind the CPU tier: no daemon in between.

It is one of the stores behind daemons (`stores/registry.py`), with the same keys and values, so
that engines with and without a daemon share blocks. Blocks move between the store and memory of the
worker without a copy, except those of S3.

A client library may take longer than its caller can wait, and its transfers cannot be ended. So
each transfer has a thread of its own. At the deadline the caller gets TransferPending and goes on,
and the buffers stay with the transfer until it has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey, store_key
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ConfigError, NotDeletedError, TransferPending
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.options import redacted
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.placement import ServerGroup
from vllm_tiered_kv.remote.store import ClaimResult, RemoteMatch
from vllm_tiered_kv.stores import registry
from vllm_tiered_kv.stores.registry import BackingOptions, BackingStore

logger = logging.getLogger(__name__)

# They limit themselves, or their owner does; a folder needs a daemon's garbage collector.
_SCHEMES = ("mooncake", "redis", "rediss", "s3")
_DAEMONS = ("tcp", "ipc")
_MAX_TIMEOUT_S = 2.0  # for an answer of the store; a load may need several
_OPEN_AGAIN_S = 60.0  # after a refusal, which an operator has to mend
_MAX_LATE = 8  # transfers past their deadline; beyond it the store counts as down

_Result = TypeVar("_Result")


def is_direct(address: str) -> bool:
    return address.partition("://")[0] in _SCHEMES


def require_known_schemes(addresses: Iterable[str]) -> None:
    """Raises ConfigError for a URL that is neither that of a daemon nor that of a store."""
    for address in addresses:
        scheme, separator, _ = address.partition("://")
        if separator and scheme not in (*_DAEMONS, *_SCHEMES):
            raise ConfigError(
                "remote",
                f"{redacted(address)!r} is not an address; that of a daemon starts with tcp:// or "
                f"ipc://, that of a store with {registry.described(_SCHEMES)}",
            )


def open_direct(config: TieredKVConfig, identity: EngineIdentity) -> ServerGroup[DirectStore]:
    if len(config.remote) > 1:
        raise ConfigError(
            "remote",
            "a store such as mooncake:// or redis:// is the only address: it spreads blocks over "
            "its own servers; or put it behind daemons, with their option backing",
        )
    (url,) = config.remote
    store = DirectStore(url, identity, config.remote_load_timeout)
    if "segment" in parse_qs(urlsplit(url).query):
        raise ConfigError(
            "remote",
            "segment would lend its memory to the store once for the scheduler and once for each "
            "worker; run mooncake_client --global_segment_size on this machine instead",
        )
    return ServerGroup(identity, {store.address: store}, lambda anchor: (store.address,))


class DirectStore:
    """A BlockServer (`remote/block_server.py`) over a store. The scheduler half and each worker
    have one; any thread may call it."""

    def __init__(self, url: str, identity: EngineIdentity, timeout_s: float) -> None:
        """Connects with the first call. Raises ConfigError for a URL that cannot work."""
        self.identity = identity
        self.address = redacted(url)
        self._timeout_s = timeout_s
        self._options = BackingOptions(url, timeout_s=min(timeout_s, _MAX_TIMEOUT_S))
        try:
            registry.check(self._options)
        except ConfigError as error:
            raise ConfigError("remote", _without_key(error)) from error
        self._store: BackingStore | None = None
        self._opening = threading.Lock()
        self._open_not_before = 0.0
        self._logged_reason = ""  # why it could not be opened
        self._regions: list[HostRegion] = []
        self._lock = threading.Lock()
        self._late: set[Future[Any]] = set()
        self.failed_calls = 0
        self._closed = False

    # ---- state ----------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Also while the store is absent: its breaker answers at once, and finds out when it is
        back."""
        return not self._closed and len(self._late) < _MAX_LATE

    @property
    def is_up(self) -> bool:
        return self.available and self._store is not None and not self._store.is_absent

    def greet(self, connections: int = 1) -> None:
        self._opened()

    def use_memory(self, region: HostRegion) -> None:
        """Says that blocks will move from and to this memory."""
        with self._lock:
            self._regions.append(region)
            if self._store is not None:
                self._store.use_memory(region)

    def close(self) -> None:
        """Later calls are misses. The process ends after transfers that hang, which the client
        library gives up within a minute."""
        self._closed = True
        with self._opening:
            if self._store is not None:
                self._store.close()

    # ---- lookups --------------------------------------------------------------------------------

    def match_all(
        self,
        keys: Sequence[BlockKey],
        ranks: Sequence[RankTag],
        pin_ms: int = 0,
        deadline: float | None = None,
    ) -> RemoteMatch | None:
        """See RemoteStore. Nothing can be pinned; the master or server evicts what it likes."""
        store = self._in_time(deadline)
        if store is None:
            return None
        count = store.match(self._keys(keys, ranks)) // len(ranks)
        if not count and store.is_absent:
            return None
        return RemoteMatch(count, {Tier.BACKING: count} if count else {})

    def contains_all(
        self, keys: Sequence[BlockKey], ranks: Sequence[RankTag], deadline: float
    ) -> list[bool]:
        store = self._in_time(deadline)
        if store is None:
            return [False] * len(keys)
        here = store.contains(self._keys(keys, ranks))
        return [all(here[n : n + len(ranks)]) for n in range(0, len(here), len(ranks))]

    def claim(
        self, keys: Sequence[BlockKey], owner: bytes, ttl_s: float, deadline: float
    ) -> ClaimResult:
        """Nothing is claimed: only daemons keep claims."""
        return ClaimResult()

    # ---- blocks ---------------------------------------------------------------------------------

    def get(
        self,
        keys: Sequence[StoreKey],
        into: Sequence[memoryview],
        deadline: float | None = None,
    ) -> list[bool]:
        """See BlockStore. TransferPending if the store has not answered by the deadline: it may
        still write to the buffers."""
        found = self._transfer(lambda store: store.get(keys, into), deadline)
        return [False] * len(keys) if found is None else found

    def put(
        self,
        items: Sequence[PutItem],
        durability: Durability = Durability.MEMORY,
        deadline: float | None = None,
    ) -> list[PutResult]:
        """See BlockStore. TransferPending if the store has not answered by the deadline: it may
        still read the payloads."""
        results = self._transfer(lambda store: store.put(items, durability), deadline)
        return [PutResult.FAILED] * len(items) if results is None else results

    def delete(self, keys: Sequence[StoreKey]) -> int:
        store = self._opened()
        try:
            return 0 if store is None else store.delete(keys)
        except NotDeletedError:
            self._count_failure()
            return 0

    # ---- internals ------------------------------------------------------------------------------

    def _opened(self, deadline: float | None = None) -> BackingStore | None:
        """The open store; None if it cannot be used now, or is not open by the deadline."""
        if self._store is None:
            left_s = self._timeout_s if deadline is None else deadline - time.monotonic()
            if self._opening.acquire(timeout=max(0.0, left_s)):
                try:
                    self._open()
                finally:
                    self._opening.release()
        return None if self._closed else self._store

    def _open(self) -> None:
        now = time.monotonic()
        if self._closed or self._store is not None or now < self._open_not_before:
            return
        try:
            store = registry.open_store(self._options, self._count_failure)
        except (ConfigError, OSError) as error:
            self._open_not_before = now + _OPEN_AGAIN_S
            self._count_failure()
            why = _without_key(error)
            if why != self._logged_reason:
                self._logged_reason = why
                logger.warning("cannot use the store in `remote`: %s; continuing without it", why)
            return
        with self._lock:
            for region in self._regions:
                store.use_memory(region)
            self._store = store

    def _in_time(self, deadline: float | None) -> BackingStore | None:
        is_late = deadline is not None and time.monotonic() >= deadline
        return None if is_late or not self.available else self._opened(deadline)

    def _transfer(
        self, work: Callable[[BackingStore], list[_Result]], deadline: float | None
    ) -> list[_Result] | None:
        """What `work` returns; None if it was not begun."""
        store = self._in_time(deadline)
        if store is None:
            return None
        end = time.monotonic() + self._timeout_s if deadline is None else deadline
        ended: Future[list[_Result]] = Future()

        def run() -> None:
            try:
                ended.set_result(work(store))
            except Exception as error:
                ended.set_exception(error)

        try:
            # No daemon thread, though its caller mostly is one: if the process ended before it, the
            # client library would crash.
            threading.Thread(target=run, name="tiered-kv-transfer", daemon=False).start()
        except RuntimeError:  # the system has no thread left
            return None
        if not wait([ended], end - time.monotonic()).not_done:
            return ended.result()
        self._count_failure()
        self._late.add(ended)
        ended.add_done_callback(self._late.discard)
        raise TransferPending(lambda call: ended.add_done_callback(lambda _: call()))

    def _keys(self, keys: Sequence[BlockKey], ranks: Sequence[RankTag]) -> list[StoreKey]:
        namespace = self.identity.namespace
        return [store_key(namespace, key, rank) for key in keys for rank in ranks]

    def _count_failure(self) -> None:
        with self._lock:
            self.failed_calls += 1


def _without_key(error: ConfigError | OSError) -> str:
    """The text of an error that names the daemon's option."""
    return (
        str(error).removeprefix(f"{error.key}: ") if isinstance(error, ConfigError) else str(error)
    )
