"""Pins on request, and the reading ahead that comes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.call import Call
from vllm_tiered_kv.server.pins import Pins
from vllm_tiered_kv.server.reactor import Reactor
from vllm_tiered_kv.server.sessions import Session
from vllm_tiered_kv.server.tiered_store import TieredStore
from vllm_tiered_kv.stores.memory import Held
from vllm_tiered_kv.wire.messages import Pin, PinReply

_AT_ONCE = 64  # keys fetched at a time
_MOST_KEEPING = 64  # matches whose blocks are being pinned


class PinHandlers:
    """Runs on the reactor's thread."""

    def __init__(self, reactor: Reactor, store: TieredStore, pins: Pins) -> None:
        self._reactor = reactor
        self._store = store
        self._pins = pins
        self._keeping = 0

    def pin(self, call: Call, request: Pin) -> None:
        call.session.require_writer()
        keys = call.session.keys(request.width, request.keys)
        if request.ttl_ms == 0:
            call.reply(PinReply(self._pins.release(keys)))
            return
        _Pinning(
            self, keys, call.session, request.ttl_ms / 1000, lambda n: call.reply(PinReply(n))
        ).go_on()

    def keep(
        self, session: Session, keys: Sequence[StoreKey], suffixes: Sequence[bytes], ttl_s: float
    ) -> None:
        """Pins what a match found, and brings into memory what lies in slower tiers.

        Only a favour: with many under way already, the rest goes without.
        """
        if self._keeping >= _MOST_KEEPING:
            return
        self._keeping += 1
        whole = [StoreKey(key + suffix) for key in keys for suffix in suffixes or [b""]]
        _Pinning(self, whole, session, ttl_s, self._kept).go_on()

    def _kept(self, count: int) -> None:
        self._keeping -= 1

    def release(self, keys: Sequence[StoreKey]) -> None:
        self._pins.release(keys)

    @property
    def reactor(self) -> Reactor:
        return self._reactor

    @property
    def store(self) -> TieredStore:
        return self._store

    @property
    def pins(self) -> Pins:
        return self._pins


class _Pinning:
    """Fetches blocks a few at a time and pins them, until all are or there is no more room."""

    def __init__(
        self,
        handlers: PinHandlers,
        keys: Sequence[StoreKey],
        session: Session,
        ttl_s: float,
        done: Callable[[int], None],
    ) -> None:
        self._handlers = handlers
        self._keys = keys
        self._session = session
        self._ttl_s = ttl_s
        self._done = done
        self._next = 0
        self._left = 0
        self._pinned = 0

    def go_on(self) -> None:
        some = self._keys[self._next : self._next + _AT_ONCE]
        if not some or not self._handlers.pins.has_room(self._session.largest_block):
            self._done(self._pinned)
            return
        self._next += len(some)
        self._left = len(some)
        here, missing = self._handlers.store.hold_here(some)
        for _, block in here:
            self._keep(block)
        self._handlers.store.fetch_slower(
            [(n, some[n]) for n in missing],
            lambda n, block: self._handlers.reactor.post(lambda: self._arrived(block)),
        )
        if not missing:
            self._handlers.reactor.post(self.go_on)  # others have their turn in between

    def _keep(self, block: Held | None) -> None:
        if block is not None and self._handlers.pins.pin(block, self._ttl_s):
            self._pinned += 1
        self._left -= 1

    def _arrived(self, block: Held | None) -> None:
        self._keep(block)
        if not self._left:
            self.go_on()
