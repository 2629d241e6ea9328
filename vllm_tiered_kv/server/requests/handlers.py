"""Dispatches each kind of request to its handler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.net.network_memory import NetworkMemory
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.requests.block_replies import Transfers
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.requests.claims import Claims
from vllm_tiered_kv.server.requests.pin_handlers import PinHandlers
from vllm_tiered_kv.server.shm.lease_handlers import ArenaHandlers
from vllm_tiered_kv.server.tiers.lookups import Located
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.wire.messages import (
    Borrow,
    Claim,
    Contains,
    ContainsReply,
    Delete,
    DeleteNamespace,
    DeleteNamespaceReply,
    DeleteReply,
    Flush,
    FlushReply,
    Get,
    Info,
    InfoReply,
    Lend,
    Match,
    MatchReply,
    Pin,
    Put,
    PutReply,
    Release,
    Request,
    Reserve,
    Seal,
    Stats,
    StatsReply,
    TierCode,
    put_codes,
)

logger = logging.getLogger(__name__)

Facts = Callable[[], dict[str, Any]]

_TIER_CODES = {
    None: TierCode.MISS,
    Tier.MEMORY: TierCode.MEMORY,
    Tier.SSD: TierCode.SSD,
    Tier.BACKING: TierCode.BACKING,
}


class Handlers:
    """The request handlers; the gateway calls `serve`. Runs on the reactor's thread; results that
    come from other threads are posted to it."""

    def __init__(
        self,
        reactor: Reactor,
        store: TieredStore,
        outbox: Outbox,
        limits: ClientLimits,
        recorder: Recorder,
        network: NetworkMemory,
        arena: ArenaHandlers,
        pins: PinHandlers,
        claims: Claims,
        info: Facts,
        stats: Facts,
    ) -> None:
        self._reactor = reactor
        self._store = store
        self._limits = limits
        self._recorder = recorder
        self._network = network
        self.transfers = Transfers(reactor, store, outbox, limits.message)
        self._pins = pins
        self._stats = stats
        self.put_bytes = 0  # payloads received and not yet copied
        self._by_type: dict[type, Callable[[Call, Any], None]] = {
            Match: self._match,
            Contains: self._contains,
            Get: self._get,
            Delete: self._delete,
            DeleteNamespace: self._delete_namespace,
            Flush: self._flush,
            Info: lambda call, request: call.reply(InfoReply(info())),
            Stats: self._report,
            Pin: pins.pin,
            Claim: claims.claim,
            Lend: arena.lend,
            Borrow: arena.borrow,
            Release: arena.release,
            Reserve: arena.reserve,
            Seal: arena.seal,
        }

    def serve(self, call: Call, request: Request, payload: Sequence[memoryview]) -> None:
        """Answers now or later, and exactly once, whatever happens."""
        try:
            if isinstance(request, Put):
                self._put(call, request, payload)
            else:
                self._by_type[type(request)](call, request)
        except ProtocolError as error:
            call.fail(error)
        except Exception:
            logger.exception("a %s request failed", request.op)
            call.fail_internally()

    def _match(self, call: Call, request: Match) -> None:
        session = call.session
        suffix = len(request.suffixes[0]) if request.suffixes else 0
        session.require_width(request.width + suffix)
        keys = session.prefixed(request.keys)

        def found(located: Located) -> None:
            tiers = [located.tiers.get(tier, 0) for tier in (Tier.MEMORY, Tier.SSD, Tier.BACKING)]
            call.reply(MatchReply(located.count, tiers))
            if request.pin_ms and located.count and not session.read_only:
                matched = keys[: located.count]
                self._pins.pin_match(session, matched, request.suffixes, request.pin_ms / 1000)

        self._store.lookups.match(
            keys,
            request.suffixes,
            lambda located: self._reactor.run_on_loop(lambda: found(located)),
        )

    def _contains(self, call: Call, request: Contains) -> None:
        def found(tiers: list[Tier | None]) -> None:
            call.reply_from_thread(
                lambda: ContainsReply(bytes(_TIER_CODES[tier] for tier in tiers))
            )

        self._store.lookups.contains(call.session.keys(request.width, request.keys), found)

    def _get(self, call: Call, request: Get) -> None:
        keys = call.session.keys(request.width, request.keys)
        self.transfers.start(call, keys, request.stream)

    def _put(self, call: Call, request: Put, payload: Sequence[memoryview]) -> None:
        session = call.session
        session.require_writer()
        session.require_lengths(request.lengths)
        keys = session.keys(request.width, request.keys)
        if request.durability is Durability.DISK and not self._store.has_disk:
            raise ProtocolError(
                ErrorCode.NOT_WRITTEN,
                "this daemon has no disk, neither an SSD nor a backing tier; nothing was stored",
            )
        total = sum(request.lengths)
        if total > self._limits.message:
            raise ProtocolError(
                ErrorCode.TOO_LARGE,
                f"a message of {total} bytes; this daemon accepts {self._limits.message}",
            )
        if self.put_bytes + total > self._limits.puts:
            self._recorder.add(names.PUTS, len(keys), PutResult.DROPPED.name.lower())
            self._store.memory.turn_away(keys)
            call.reply(PutReply(put_codes([PutResult.DROPPED] * len(keys))))
            return
        parents = session.parents(request.parents)
        items = [
            PutItem(key, parent, part, checksum)
            for key, parent, part, checksum in zip(
                keys, parents, payload, request.checksums, strict=True
            )
        ]
        self.put_bytes += total
        self._network.hold(session.peer, total)
        uncopied = [total]

        def forget() -> None:
            if uncopied:
                self.put_bytes -= uncopied.pop()
                self._network.release(session.peer, total)

        def copied() -> None:
            self._reactor.run_on_loop(forget)

        def done(results: list[PutResult]) -> None:
            codes = put_codes(results)
            call.reply_from_thread(lambda: PutReply(codes))

        self._store.put(items, request.durability, done, copied)

    def _report(self, call: Call, request: Stats) -> None:
        self.transfers.count_hits()
        call.reply(StatsReply(self._stats()))

    def _delete(self, call: Call, request: Delete) -> None:
        call.session.require_writer()
        keys = call.session.keys(request.width, request.keys)
        self._store.delete(
            keys, lambda count: call.reply_from_thread(lambda: DeleteReply(_deleted(count)))
        )

    def _delete_namespace(self, call: Call, request: DeleteNamespace) -> None:
        call.session.require_writer()
        self._store.delete_namespace(
            request.namespace,
            lambda count: call.reply_from_thread(lambda: DeleteNamespaceReply(_deleted(count))),
        )

    def _flush(self, call: Call, request: Flush) -> None:
        def done(failed: list[str]) -> None:
            def answer() -> FlushReply:
                if failed:
                    raise ProtocolError(ErrorCode.NOT_WRITTEN, "; ".join(failed))
                return FlushReply()

            call.reply_from_thread(answer)

        self._store.flush(done)


def _deleted(count: int | None) -> int:
    if count is None:
        raise ProtocolError(
            ErrorCode.NOT_WRITTEN,
            "a tier refused or did not answer; it may still hold some of the blocks",
        )
    return count
