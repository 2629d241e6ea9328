"""Blocks on their way out: fetched a window at a time, sent as they become ready.

A request may name far more blocks than the memory holds, so a transfer fetches no more than its
client's share of the memory allows and goes on as the client takes what was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.net.outbox import Outbox
from vllm_tiered_kv.server.net.reactor import Reactor
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.wire.messages import GetReply

_BATCH_BLOCKS = 16
_BATCH_BYTES = 8 << 20
_FETCH_AT_ONCE = 64  # keys handed to the store at a time
_MAX_FETCHING = 256  # keys of one transfer under way: others' are read in between
_FETCHES_A_TURN = 4  # of one transfer, before others get their turn


class Transfers:
    """All that is being fetched. `pump` goes on with those that wait for room."""

    def __init__(
        self, reactor: Reactor, store: TieredStore, outbox: Outbox, most_message_bytes: int
    ) -> None:
        self.reactor = reactor
        self.store = store
        self.outbox = outbox
        self.most_message_bytes = most_message_bytes
        self._waiting: deque[Transfer] = deque()
        outbox.on_room = self.pump

    def start(self, call: Call, keys: Sequence[StoreKey], stream: bool) -> None:
        Transfer(self, call, keys, stream).go_on()

    def wait(self, transfer: Transfer) -> None:
        self._waiting.append(transfer)

    def pump(self) -> None:
        for _ in range(len(self._waiting)):
            self._waiting.popleft().go_on()


class Transfer:
    """One `get`."""

    def __init__(
        self, transfers: Transfers, call: Call, keys: Sequence[StoreKey], stream: bool
    ) -> None:
        self._transfers = transfers
        self._outbox = transfers.outbox
        self._call = call
        self._keys = keys
        self._stream = stream
        self._next = 0  # first key not yet asked for
        self._fetching = 0  # keys asked for and not yet here
        self._arrived: deque[tuple[int, PinnedSlot | None]] = deque()  # appended to by any thread
        self._expected = False  # whether somebody will look at `_arrived` without being told
        self._ready: list[tuple[int, PinnedSlot]] = []
        self._ready_bytes = 0
        self._is_waiting = False  # for room
        self._has_a_turn = False  # to come

    def go_on(self) -> None:
        """Fetches what there is room for and sends what is ready."""
        self._is_waiting = False
        fetches = 0
        while self._may_fetch():
            if fetches == _FETCHES_A_TURN:  # misses take no room: there may be very many
                self._take_turns()
                break
            count = self._room_for()
            if count == 0:
                self._is_waiting = True
                self._transfers.wait(self)
                break
            self._fetch(count)
            self._collect()
            fetches += 1
        self._send_ready()

    def _take_turns(self) -> None:
        if not self._has_a_turn:
            self._has_a_turn = True
            self._transfers.reactor.in_turn(self._my_turn)

    def _my_turn(self) -> None:
        self._has_a_turn = False
        if not self._is_waiting:
            self.go_on()

    def _may_fetch(self) -> bool:
        """More now. What is on its way leads here again."""
        return (
            self._next < len(self._keys)
            and self._fetching < _MAX_FETCHING
            and self._may_go_on()
            and not self._may_be_full()
        )

    def _may_go_on(self) -> bool:
        return self._call.session.is_open and not self._call.is_over

    def _may_be_full(self) -> bool:
        """Whether a single message may be too large already with what is still on its way: the
        rest is not worth reading, and pushing others out of memory, before that is known."""
        coming = self._fetching * self._call.session.largest_block
        most = self._transfers.most_message_bytes
        return not self._stream and bool(coming) and self._ready_bytes + coming > most

    def _room_for(self) -> int:
        """Claims room for some of the next keys; how many."""
        peer, each = self._call.session.peer, self._call.session.largest_block
        count = min(_FETCH_AT_ONCE, len(self._keys) - self._next)
        if not self._stream and self._next > 0:
            # A single message waits for nothing once it has begun: it could wait for itself.
            count = max(1, min(count, self._transfers.most_message_bytes // each))
            return count if self._outbox.claim(peer, count * each, must=True) else 0
        while count > 1 and not self._outbox.claim(peer, count * each):
            count //= 2
        if count > 1:
            return count
        # Who has nothing under way gets one always: it may be larger than its share.
        return int(self._outbox.claim(peer, each, must=not self._outbox.has_claims(peer)))

    def _fetch(self, count: int) -> None:
        first, self._next = self._next, self._next + count
        self._fetching += count
        self._expected = True
        self._transfers.store.fetch(
            self._keys[first : first + count],
            lambda position, block: self._arrive(first + position, block),
            self._call.session.peer,
        )

    def _arrive(self, position: int, block: PinnedSlot | None) -> None:
        """From any thread."""
        self._arrived.append((position, block))
        if not self._expected:
            self._expected = True
            self._transfers.reactor.post(self._arrived_later)

    def _arrived_later(self) -> None:
        self._collect()
        if self._is_waiting or self._has_a_turn:
            self._send_ready()
        else:
            self.go_on()

    def _collect(self) -> None:
        self._expected = False  # before looking: what comes later is told of again
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
            if not self._may_go_on():
                self._outbox.let_go(session.peer, [block])
                continue
            self._ready.append((position, block))
            self._ready_bytes += block.nbytes
            if not self._stream and self._ready_bytes > self._transfers.most_message_bytes:
                self._give_up()
                self._call.fail(
                    ProtocolError(
                        ErrorCode.TOO_LARGE,
                        f"the blocks are more than {self._transfers.most_message_bytes} bytes; "
                        "ask for them as a stream",
                    )
                )

    def _send_ready(self) -> None:
        if not self._may_go_on():
            self._give_up()
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

    def _take(self, count: int, most_bytes: int | None = None) -> list[tuple[int, PinnedSlot]]:
        taken: list[tuple[int, PinnedSlot]] = []
        nbytes = 0
        for one in self._ready[:count]:
            nbytes += one[1].nbytes
            if taken and most_bytes is not None and nbytes > most_bytes:
                break
            taken.append(one)
        del self._ready[: len(taken)]
        self._ready_bytes -= sum(block.nbytes for _, block in taken)
        return taken

    def _send(self, batch: list[tuple[int, PinnedSlot]], last: bool) -> None:
        if self._call.is_over:
            return
        blocks = [block for _, block in batch]
        reply = GetReply(
            [position for position, _ in batch],
            [block.nbytes for block in blocks],
            [block.checksum for block in blocks],
            more=not last,
        )
        send: Callable[..., None] = self._call.reply if last else self._call.part
        send(reply, blocks)

    def _give_up(self) -> None:
        ready, self._ready, self._ready_bytes = self._ready, [], 0
        self._outbox.let_go(self._call.session.peer, [block for _, block in ready])
