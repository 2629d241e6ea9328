"""Handles pins: fetches blocks from slower tiers into memory and pins them."""

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

_BATCH_KEYS = 64  # fetched at a time
_MAX_MATCHES = 64  # matches whose blocks are being pinned
_MAX_POSITIONS = 1 << 17  # of all these matches together


class PinHandlers:
    """Pins blocks for `pin` requests and for matches with `pin_ms`. `Handlers` calls it. Runs on
    the reactor's thread."""

    def __init__(self, reactor: Reactor, store: TieredStore, pins: Pins) -> None:
        self.reactor = reactor
        self.store = store
        self.pins = pins
        self._matches = 0
        self._positions = 0  # of the matches being pinned

    def pin(self, call: Call, request: Pin) -> None:
        call.session.require_writer()
        keys = call.session.keys(request.width, request.keys)
        if request.ttl_ms == 0:
            call.reply(PinReply(self.pins.release(keys)))
            return
        _Pinning(
            self, keys, call.session, request.ttl_ms / 1000, lambda n: call.reply(PinReply(n))
        ).pin_next()

    def pin_match(
        self, session: Session, keys: Sequence[StoreKey], suffixes: Sequence[bytes], ttl_s: float
    ) -> None:
        """Pins the blocks that a match found, and promotes those in slower tiers.

        Best effort: beyond the limits for matches, blocks are not pinned.
        """
        if self._matches >= _MAX_MATCHES:
            return
        heads = dict.fromkeys(keys)  # removes repeated keys
        if self._positions + len(heads) > _MAX_POSITIONS:
            return
        self._matches += 1
        self._positions += len(heads)

        def kept(count: int) -> None:
            self._matches -= 1
            self._positions -= len(heads)

        endings = suffixes or [b""]
        whole = (StoreKey(key + ending) for key in heads for ending in endings)
        _Pinning(self, whole, session, ttl_s, kept).pin_next()


class _Pinning:
    """Fetches and pins blocks in batches, until all are pinned or pins have no more room."""

    def __init__(
        self,
        handlers: PinHandlers,
        keys: Iterable[StoreKey],
        session: Session,
        ttl_s: float,
        done: Callable[[int], None],
    ) -> None:
        self._handlers = handlers
        self._keys = iter(keys)  # lazily: a match may expand to a million keys
        self._session = session
        self._ttl_s = ttl_s
        self._done = done
        self._left = 0
        self._pinned = 0

    def pin_next(self) -> None:
        has_room = self._handlers.pins.has_room(self._session.largest_block)
        some = list(islice(self._keys, _BATCH_KEYS)) if has_room else []
        if not some:
            self._done(self._pinned)
            return
        self._left = len(some)
        here, missing = self._handlers.store.hold_in_memory(some)
        for _, block in here:
            self._pin(block)
        self._handlers.store.fetch_slower(
            [(n, some[n]) for n in missing],
            lambda n, block: self._handlers.reactor.post(lambda: self._arrived(block)),
            self._session.peer,
        )
        if not missing:
            self._handlers.reactor.post_background(self.pin_next)

    def _pin(self, block: PinnedSlot | None) -> None:
        if block is not None and self._handlers.pins.pin(block, self._ttl_s):
            self._pinned += 1
        self._left -= 1

    def _arrived(self, block: PinnedSlot | None) -> None:
        self._pin(block)
        if not self._left:
            self._handlers.reactor.post_background(self.pin_next)
