"""Serves `get`: fetches blocks window by window and sends them as they become ready.

A request may name far more blocks than the memory holds, so a transfer fetches no more than its
client's share of the memory allows, and continues as the client reads what was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.native.cpu import pack_get_reply, read_get
from vllm_tiered_kv.server.net.outbox import COPY_BYTES, Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.net.sessions import Session
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.header import Buffer
from vllm_tiered_kv.wire.messages import GetReply

_BATCH_BLOCKS = 16
_BATCH_BYTES = 8 << 20
_FETCH_BATCH_KEYS = 64  # per call to the store
_MAX_FETCHING = 256  # keys of one transfer in flight, so that reads of other clients interleave
_FETCHES_PER_TURN = 4  # batches of one transfer before other callbacks run


class Transfers:
    """All running transfers. `Handlers` starts them; `pump` resumes those that wait for room in
    the outbox. Runs on the reactor's thread."""

    def __init__(
        self, reactor: Reactor, store: TieredStore, outbox: Outbox, max_message_bytes: int
    ) -> None:
        self.reactor = reactor
        self.store = store
        self.outbox = outbox
        self.max_message_bytes = max_message_bytes
        self._max_at_once = min(_BATCH_BYTES, max_message_bytes)
        self._waiting: deque[Transfer] = deque()
        self._hits = 0  # not yet counted
        reactor.each_turn(self.count_hits)

    def start(self, call: Call, keys: Sequence[StoreKey], stream: bool) -> None:
        Transfer(self, call, keys, stream).advance()

    def answer_from_memory(self, session: Session, header: Buffer) -> bool:
        """Answers a request in one message if it is a `get` of a few blocks, memory has all of them
        and nothing has to wait. Otherwise returns False, and nothing has happened. A transfer would
        answer the same, but its bookkeeping costs several times as much as the answer."""
        found = read_get(header, session.key_prefix, session.shape.key_bytes, _BATCH_BLOCKS)
        if found is None:
            return False
        request_id, keys = found
        max_bytes = len(keys) * session.largest_block
        if max_bytes > self._max_at_once:
            return False
        if max_bytes > COPY_BYTES:
            return self._answer_pinned(session, request_id, keys, max_bytes)
        allowed = session.shape.block_bytes
        send = partial(self.outbox.send_copies, session.peer, request_id, allowed, max_bytes)
        if not self.store.memory.visit(keys, send):
            return False
        self._hits += len(keys)
        return True

    def _answer_pinned(
        self, session: Session, request_id: int, keys: Sequence[StoreKey], max_bytes: int
    ) -> bool:
        outbox = self.outbox
        if not outbox.claim(session.peer, max_bytes):
            return False
        blocks = self.store.hold_all(keys)
        if blocks is None:
            outbox.unclaim(session.peer, max_bytes)
            return False
        reply = pack_get_reply(request_id, blocks, session.shape.block_bytes)
        if reply is None:
            self.store.memory.let_go(blocks)
            outbox.unclaim(session.peer, max_bytes)
            return False
        header, nbytes = reply
        outbox.unclaim(session.peer, max_bytes - nbytes)
        outbox.send(session.peer, header, blocks)
        self._hits += len(blocks)
        return True

    def count_hits(self) -> None:
        """Records the hits so far. Called every turn, and before someone asks for them."""
        if self._hits:
            self.store.count_hits(self._hits)
            self._hits = 0

    def wait(self, transfer: Transfer) -> None:
        self._waiting.append(transfer)

    def pump(self) -> None:
        for _ in range(len(self._waiting)):
            self._waiting.popleft().advance()


class Transfer:
    """One `get`. Runs on the reactor's thread, except for `_arrive`."""

    def __init__(
        self, transfers: Transfers, call: Call, keys: Sequence[StoreKey], stream: bool
    ) -> None:
        self._transfers = transfers
        self._outbox = transfers.outbox
        self._call = call
        self._keys = keys
        self._stream = stream
        self._next = 0  # index of the first key not yet fetched
        self._fetching = 0  # keys being fetched
        self._arrived: deque[tuple[int, PinnedSlot | None]] = deque()  # appended to by any thread
        self._is_collect_due = False  # `_collect` will run anyway: `_arrive` need not post it
        self._ready: list[tuple[int, PinnedSlot]] = []
        self._ready_bytes = 0
        self._is_waiting = False  # for room in the outbox
        self._is_turn_scheduled = False

    def advance(self) -> None:
        """Fetches what there is room for and sends what is ready."""
        self._is_waiting = False
        fetches = 0
        while self._may_fetch():
            if fetches == _FETCHES_PER_TURN:  # misses need no room, so there may be very many
                self._schedule_turn()
                break
            count = self._claim_room()
            if count == 0:
                self._is_waiting = True
                self._transfers.wait(self)
                break
            self._fetch(count)
            self._collect()
            fetches += 1
        self._send_ready()

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self._transfers.reactor.post_background(self._run_turn)

    def _run_turn(self) -> None:
        self._is_turn_scheduled = False
        if not self._is_waiting:
            self.advance()

    def _may_fetch(self) -> bool:
        """Whether to fetch more now. Blocks that arrive call `advance` again."""
        return (
            self._next < len(self._keys)
            and self._fetching < _MAX_FETCHING
            and self._is_wanted()
            and not self._may_exceed_message()
        )

    def _is_wanted(self) -> bool:
        return self._call.session.is_open and not self._call.is_answered

    def _may_exceed_message(self) -> bool:
        """Whether a reply in a single message may become too large with the blocks being fetched.
        Until that is known, fetching more would evict other blocks for nothing."""
        coming = self._fetching * self._call.session.largest_block
        limit = self._transfers.max_message_bytes
        return not self._stream and bool(coming) and self._ready_bytes + coming > limit

    def _claim_room(self) -> int:
        """Claims room for some of the next keys and returns for how many."""
        peer, each = self._call.session.peer, self._call.session.largest_block
        count = min(_FETCH_BATCH_KEYS, len(self._keys) - self._next)
        if not self._stream and self._next > 0:
            # A single message must not wait for room once it has begun: its own blocks take it.
            count = max(1, min(count, self._transfers.max_message_bytes // each))
            return count if self._outbox.claim(peer, count * each, must=True) else 0
        while count > 1 and not self._outbox.claim(peer, count * each):
            count //= 2
        if count > 1:
            return count
        # A client without claims always gets one block: it may be larger than the client's share.
        return int(self._outbox.claim(peer, each, must=not self._outbox.has_claims(peer)))

    def _fetch(self, count: int) -> None:
        first, self._next = self._next, self._next + count
        self._fetching += count
        self._is_collect_due = True
        self._transfers.store.fetch(
            self._keys[first : first + count],
            lambda position, block: self._arrive(first + position, block),
            self._call.session.peer,
        )

    def _arrive(self, position: int, block: PinnedSlot | None) -> None:
        """Takes a block from the store. From any thread."""
        self._arrived.append((position, block))
        if not self._is_collect_due:
            self._is_collect_due = True
            self._transfers.reactor.post(self._collect_and_advance)

    def _collect_and_advance(self) -> None:
        self._collect()
        if self._is_waiting or self._is_turn_scheduled:
            self._send_ready()
        else:
            self.advance()

    def _collect(self) -> None:
        self._is_collect_due = False  # cleared first: later arrivals must post again
        session = self._call.session
        while self._arrived:
            position, block = self._arrived.popleft()
            self._fetching -= 1
            if block is not None and block.nbytes not in session.shape.block_bytes:
                self._transfers.store.memory.let_go([block])
                block = None
            kept = 0 if block is None else block.nbytes
            self._outbox.unclaim(session.peer, session.largest_block - kept)
            if block is None:
                continue
            if not self._is_wanted():
                self._outbox.release_claimed(session.peer, [block])
                continue
            self._ready.append((position, block))
            self._ready_bytes += block.nbytes
            if not self._stream and self._ready_bytes > self._transfers.max_message_bytes:
                self._release_ready()
                self._call.fail(
                    ProtocolError(
                        ErrorCode.TOO_LARGE,
                        f"the blocks exceed {self._transfers.max_message_bytes} bytes; "
                        "request them as a stream",
                    )
                )

    def _send_ready(self) -> None:
        if not self._is_wanted():
            self._release_ready()
            if not self._call.session.is_open:
                self._call.reply(GetReply([], [], []))
            return
        is_complete = self._next == len(self._keys) and not self._fetching
        if not self._stream:
            if is_complete:
                self._send(self._take(len(self._ready)), last=True)
            return
        while self._ready:
            batch = self._take(_BATCH_BLOCKS, _BATCH_BYTES)
            self._send(batch, last=is_complete and not self._ready)
        if is_complete:
            self._send([], last=True)

    def _take(self, count: int, max_bytes: int | None = None) -> list[tuple[int, PinnedSlot]]:
        taken: list[tuple[int, PinnedSlot]] = []
        nbytes = 0
        for one in self._ready[:count]:
            nbytes += one[1].nbytes
            if taken and max_bytes is not None and nbytes > max_bytes:
                break
            taken.append(one)
        del self._ready[: len(taken)]
        self._ready_bytes -= sum(block.nbytes for _, block in taken)
        return taken

    def _send(self, batch: list[tuple[int, PinnedSlot]], last: bool) -> None:
        if self._call.is_answered:
            return
        blocks = [block for _, block in batch]
        reply = GetReply(
            [position for position, _ in batch],
            [block.nbytes for block in blocks],
            [block.checksum for block in blocks],
            more=not last,
        )
        send: Callable[..., None] = self._call.reply if last else self._call.stream_part
        send(reply, blocks)

    def _release_ready(self) -> None:
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        self._outbox.release_claimed(self._call.session.peer, [block for _, block in ready])
