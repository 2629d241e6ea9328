"""Pins on request, and the reading ahead that comes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Session
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.tiers.pins import Pins
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.messages import Pin, PinReply

_AT_ONCE = 64  # keys fetched at a time
_MAX_KEEPING = 64  # matches whose blocks are being pinned
_MAX_POSITIONS = 1 << 17  # of all of these together


class PinHandlers:
    """Runs on the reactor's thread."""

    def __init__(self, reactor: Reactor, store: TieredStore, pins: Pins) -> None:
        self._reactor = reactor
        self._store = store
        self._pins = pins
        self._keeping = 0
        self._positions = 0  # of those that are being kept
        store.on_deleted = lambda keys: reactor.post(lambda: pins.void(keys))

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
        if self._keeping >= _MAX_KEEPING:
            return
        heads = dict.fromkeys(keys)  # one named twice has no more blocks
        if self._positions + len(heads) > _MAX_POSITIONS:
            return
        self._keeping += 1
        self._positions += len(heads)

        def kept(count: int) -> None:
            self._keeping -= 1
            self._positions -= len(heads)

        endings = suffixes or [b""]
        whole = (StoreKey(key + ending) for key in heads for ending in endings)
        _Pinning(self, whole, session, ttl_s, kept).go_on()

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
        keys: Iterable[StoreKey],
        session: Session,
        ttl_s: float,
        done: Callable[[int], None],
    ) -> None:
        self._handlers = handlers
        self._keys = iter(keys)  # one at a time: a match may stand for a million
        self._session = session
        self._ttl_s = ttl_s
        self._done = done
        self._left = 0
        self._pinned = 0

    def go_on(self) -> None:
        has_room = self._handlers.pins.has_room(self._session.largest_block)
        some = list(islice(self._keys, _AT_ONCE)) if has_room else []
        if not some:
            self._done(self._pinned)
            return
        self._left = len(some)
        here, missing = self._handlers.store.hold_here(some)
        for _, block in here:
            self._keep(block)
        self._handlers.store.fetch_slower(
            [(n, some[n]) for n in missing],
            lambda n, block: self._handlers.reactor.post(lambda: self._arrived(block)),
            self._session.peer,
        )
        if not missing:
            self._handlers.reactor.in_turn(self.go_on)

    def _keep(self, block: PinnedSlot | None) -> None:
        if block is not None and self._handlers.pins.pin(block, self._ttl_s):
            self._pinned += 1
        self._left -= 1

    def _arrived(self, block: PinnedSlot | None) -> None:
        self._keep(block)
        if not self._left:
            self._handlers.reactor.in_turn(self.go_on)
