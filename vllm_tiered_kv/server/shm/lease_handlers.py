"""Handles requests of attached processes: leases blocks to read, reserves slots to write."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice

from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Peer
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.shm.leases import Attachment, Leases
from vllm_tiered_kv.server.tiers.lookups import Located
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.stores.memory import NewBlock, PinnedSlot
from vllm_tiered_kv.wire.fields import pack_uints
from vllm_tiered_kv.wire.limits import MAX_KEYS
from vllm_tiered_kv.wire.messages import (
    RESERVED,
    Borrow,
    BorrowReply,
    Lend,
    LendReply,
    Release,
    ReleaseReply,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    put_codes,
)

logger = logging.getLogger(__name__)

_FETCH_BATCH_KEYS = 256
_RESERVE_SLICE_BLOCKS = 512


class ArenaHandlers:
    """The handlers of lend, borrow, release, reserve and seal. `Handlers` calls them on the
    reactor's thread."""

    def __init__(
        self, reactor: Reactor, store: TieredStore, leases: Leases, recorder: Recorder
    ) -> None:
        self._reactor = reactor
        self._store = store
        self._leases = leases
        self._recorder = recorder

    def lend(self, call: Call, request: Lend) -> None:
        attachment = call.session.require_attachment()
        keys = call.session.keys(request.width, request.keys)
        # Blocks that cannot be leased anyway must not be promoted, which would evict others.
        fitting = self._leases.room_bytes(attachment) // call.session.largest_block
        pending = _PendingLease(self._leases, call, attachment, len(keys), min(len(keys), fitting))
        here, missing = self._store.hold_in_memory(keys[:fitting])
        pending.arrived(here)
        self._fetch(pending, iter([(n, keys[n]) for n in missing]))

    def _fetch(self, pending: _PendingLease, missing: Iterator[tuple[int, StoreKey]]) -> None:
        """Promotes blocks batch by batch, to bound what waits for a slow tier."""
        some = list(islice(missing, _FETCH_BATCH_KEYS))
        left = len(some)

        def arrived(n: int, block: PinnedSlot | None) -> None:
            nonlocal left
            left -= 1
            pending.arrived([(n, block)])
            if not left:
                self._reactor.post_background(lambda: self._fetch(pending, missing))

        self._store.fetch_slower(
            some,
            lambda n, block: self._reactor.run_on_loop(lambda: arrived(n, block)),
            pending.peer,
        )

    def borrow(self, call: Call, request: Borrow) -> None:
        session = call.session
        attachment = session.require_attachment()
        suffix = len(request.suffixes[0]) if request.suffixes else 0
        session.require_width(request.width + suffix)
        max_blocks = min(self._leases.lookup_room_bytes(attachment) // request.length, MAX_KEYS)

        def found(held: list[PinnedSlot], rest: Located) -> None:
            leased = len(held) // (len(request.suffixes) or 1)
            tiers = [rest.tiers.get(tier, 0) for tier in (Tier.MEMORY, Tier.SSD, Tier.BACKING)]
            tiers[0] += leased
            lease = self._leases.lease_lookup(attachment, held)
            blocks = held if lease else []
            reply = BorrowReply(
                leased + rest.count,
                tiers,
                leased if lease else 0,
                lease,
                pack_uints([block.offset for block in blocks]),
                pack_uints([block.generation for block in blocks]),
            )
            call.reply(reply, on_unsent=lambda: self._release_unsent(attachment, [lease]))
            # After the reply: the client waits for that, nobody waits for the recency update.
            self._reactor.post(lambda: self._store.memory.touch(blocks))

        self._store.lookups.match_and_hold(
            session.prefixed(request.keys),
            request.suffixes,
            request.length,
            max_blocks,
            lambda held, rest: self._reactor.run_on_loop(lambda: found(held, rest)),
        )

    def release(self, call: Call, request: Release) -> None:
        attachment = call.session.require_attachment()
        call.reply(ReleaseReply(self._leases.release(attachment, request.leases)))

    def reserve(self, call: Call, request: Reserve) -> None:
        session = call.session
        attachment = session.require_attachment()
        session.require_writer()
        session.require_lengths(request.lengths)
        keys = session.keys(request.width, request.keys)
        parents = session.parents(request.parents)
        blocks = list(zip(keys, parents, request.lengths, strict=True))
        _ReserveRequest(
            self._reactor, self._store, self._leases, self._recorder, call, attachment, blocks
        ).run_slice()

    def seal(self, call: Call, request: Seal) -> None:
        attachment = call.session.require_attachment()
        call.session.require_writer()
        slots = [self._leases.take_reserved(attachment, lease) for lease in request.leases]
        reserved = [slot for slot in slots if slot is not None]

        def done(results: list[PutResult]) -> None:
            each = iter(results)
            codes = put_codes(PutResult.FAILED if slot is None else next(each) for slot in slots)
            call.reply_from_thread(lambda: SealReply(codes))

        if reserved:
            self._store.sealed(reserved, done)
        else:
            done([])

    def _release_unsent(self, attachment: Attachment, leases: list[int]) -> None:
        """Releases leases whose reply was never sent: no client knows of them."""
        self._leases.release(attachment, leases)


class _ReserveRequest:
    """Reserves the blocks of one request slice by slice: finding room queries the slower tiers for
    every evicted block, and other requests need the reactor meanwhile."""

    def __init__(
        self,
        reactor: Reactor,
        store: TieredStore,
        leases: Leases,
        recorder: Recorder,
        call: Call,
        attachment: Attachment,
        blocks: list[NewBlock],
    ) -> None:
        self._reactor = reactor
        self._store = store
        self._leases = leases
        self._recorder = recorder
        self._call = call
        self._attachment = attachment
        self._blocks = blocks
        self._slots: list[PinnedSlot | None] = []
        self._ids: list[int] = []
        self._results = bytearray()
        self._is_full = False  # the lease limit was reached; later blocks are dropped

    def run_slice(self) -> None:
        try:
            begin = len(self._ids)
            some = self._blocks[begin : begin + _RESERVE_SLICE_BLOCKS]
            if self._call.session.is_open and not self._attachment.is_gone:
                for slot in self._reserve(some):
                    self._add(slot)
            else:  # the client has gone
                for _ in self._blocks[begin:]:
                    self._add(PutResult.DROPPED)
        except Exception:
            logger.exception("a reserve request failed")
            self._release_unsent()
            self._call.fail_internally()
            return
        if len(self._ids) < len(self._blocks):
            self._reactor.post_background(self.run_slice)
        else:
            self._answer()

    def _reserve(self, blocks: list[NewBlock]) -> list[PinnedSlot | PutResult]:
        """Only the leading blocks that fit the lease limit: a tail is useless without its head."""
        fitting, total = 0, 0
        room = self._leases.room_bytes(self._attachment)
        for _, _, nbytes in blocks:
            total += nbytes
            self._is_full = self._is_full or total > room
            if self._is_full:
                break
            fitting += 1
        slots = self._store.reserve(blocks[:fitting])
        self._store.memory.turn_away([key for key, _, _ in blocks[fitting:]])
        return slots + [PutResult.DROPPED] * (len(blocks) - fitting)

    def _add(self, slot: PinnedSlot | PutResult) -> None:
        lease = None
        if isinstance(slot, PinnedSlot):
            lease = self._leases.reserve(self._attachment, slot)
        granted = slot if lease is not None and isinstance(slot, PinnedSlot) else None
        self._slots.append(granted)
        self._ids.append(lease or 0)
        if granted is None:
            result = slot if isinstance(slot, PutResult) else PutResult.DROPPED
            self._results += put_codes([result])
            self._recorder.add(names.PUTS, 1, result.name.lower())
        else:
            self._results.append(RESERVED)

    def _answer(self) -> None:
        self._call.reply(
            ReserveReply(
                self._ids,
                [0 if slot is None else slot.offset for slot in self._slots],
                [0 if slot is None else slot.generation for slot in self._slots],
                bytes(self._results),
            ),
            on_unsent=self._release_unsent,
        )

    def _release_unsent(self) -> None:
        self._leases.release(self._attachment, self._ids)


class _PendingLease:
    """Collects the blocks of one `lend` as they come into memory."""

    def __init__(
        self, leases: Leases, call: Call, attachment: Attachment, count: int, expected: int
    ) -> None:
        """`count` is the number of keys; `arrived` will be called for the first `expected`."""
        self._leases = leases
        self._call = call
        self._attachment = attachment
        self._left = expected
        self._lease: int | None = None
        self._ids = [0] * count
        self._offsets = [0] * count
        self._lengths = [0] * count
        self._generations = [0] * count
        if not expected:
            self._answer()

    @property
    def peer(self) -> Peer:
        return self._call.session.peer

    def arrived(self, blocks: Sequence[tuple[int, PinnedSlot | None]]) -> None:
        """Leases blocks given by position; None is a miss."""
        if not blocks:
            return
        held = [block for _, block in blocks if block is not None]
        lease = self._leases.lease(self._attachment, held, self._lease) if held else 0
        if lease:
            self._lease = lease
            for position, block in blocks:
                if block is not None:
                    self._ids[position] = lease
                    self._offsets[position] = block.offset
                    self._lengths[position] = block.nbytes
                    self._generations[position] = block.generation
        self._left -= len(blocks)
        if not self._left:
            self._answer()

    def _answer(self) -> None:
        self._call.reply(
            LendReply(self._ids, self._offsets, self._lengths, self._generations),
            on_unsent=self._release_unsent,
        )

    def _release_unsent(self) -> None:
        """Releases the lease if its reply was never sent: no client knows of it."""
        if self._lease is not None:
            self._leases.release(self._attachment, [self._lease])
