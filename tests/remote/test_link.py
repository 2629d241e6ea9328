"""Questions over the connection that keeps the memory ours: what comes back, late, or never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.remote.engine import IDENTITY, NBYTES, block_keys, keys, within
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.errors import ConnectionLost, ErrorCode, RemoteRefusal, RemoteTimeout
from vllm_tiered_kv.remote import link
from vllm_tiered_kv.remote.connection import Connection
from vllm_tiered_kv.remote.health import BreakerState
from vllm_tiered_kv.remote.link import Link
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.limits import MAX_LINK_BYTES
from vllm_tiered_kv.wire.messages import (
    Borrow,
    BorrowReply,
    ErrorReply,
    ReleaseReply,
    Reply,
    decode_request,
    encode_reply,
)

ASKED = Borrow(4, [b"abcd"], [b"\0"], 4096)


class Daemon:
    """The other end, in the hands of a test."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def next_id(self) -> int:
        self.connection.settimeout(20)
        return decode_request(self.connection.recv(MAX_LINK_BYTES), ())[0]

    def answer(self, request_id: int, reply: Reply) -> None:
        self.connection.send(encode_reply(request_id, reply))


class Asked:
    """A call in a thread of its own."""

    def __init__(self, asked: Link, seconds: float = 20.0) -> None:
        self.outcome: BorrowReply | BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(asked, within(seconds)))
        self._thread.start()

    def _ask(self, asked: Link, deadline: float) -> None:
        try:
            self.outcome = asked.call(ASKED, BorrowReply, deadline)
        except BaseException as error:
            self.outcome = error

    def end(self) -> BorrowReply | BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


class Ends:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ours = ours
        self.daemon = Daemon(theirs)
        self.closing = threading.Event()
        self.late: list[Reply] = []
        self.link = Link(ours, self.closing, self.late.append)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.ours.close()
    made.daemon.connection.close()


def lent(lease: int) -> BorrowReply:
    return BorrowReply(1, [1, 0, 0], 1, lease, bytes(8), bytes(8))


def test_the_reply_to_a_question(ends: Ends) -> None:
    asked = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), lent(5))
    assert asked.end() == lent(5)
    assert ends.link.answered == 1


def test_a_reply_that_comes_too_late_is_handed_over(ends: Ends) -> None:
    early = Asked(ends.link, seconds=0.05)
    first = ends.daemon.next_id()
    assert isinstance(early.end(), RemoteTimeout)
    assert ends.link.awaits_late_replies
    asked = Asked(ends.link)
    second = ends.daemon.next_id()
    ends.daemon.answer(first, lent(6))
    ends.daemon.answer(second, lent(7))
    assert asked.end() == lent(7)
    assert ends.late == [lent(6)]
    assert not ends.link.awaits_late_replies


def test_every_question_has_an_id_of_its_own(ends: Ends) -> None:
    seen = set()
    for _ in range(3):
        asked = Asked(ends.link)
        seen.add(request_id := ends.daemon.next_id())
        ends.daemon.answer(request_id, lent(1))
        asked.end()
    assert len(seen) == 3


@pytest.mark.parametrize("packet", [b"\xc1", b"garbage", b"x" * MAX_LINK_BYTES])
def test_after_nonsense_it_is_not_used_any_more(ends: Ends, packet: bytes) -> None:
    asked = Asked(ends.link)
    ends.daemon.next_id()
    ends.daemon.connection.send(packet)
    assert isinstance(asked.end(), ConnectionLost)
    assert ends.link.call(ASKED, BorrowReply, within(20)) is None


def test_an_answer_to_something_else_is_nonsense_too(ends: Ends) -> None:
    asked = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), ReleaseReply(1))
    assert isinstance(asked.end(), ConnectionLost)
    assert ends.late == [ReleaseReply(1)], "what it brings is lost"
    assert ends.link.call(ASKED, BorrowReply, within(20)) is None


@pytest.mark.parametrize(
    "code", [ErrorCode.NO_HELLO, ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN_OP], ids=lambda c: c.value
)
def test_what_is_not_answered_here_is_asked_elsewhere(ends: Ends, code: ErrorCode) -> None:
    asked = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), ErrorReply(code, "not here", "borrow"))
    assert asked.end() is None
    again = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), lent(1))
    assert again.end() == lent(1)


def test_a_refusal_is_told(ends: Ends) -> None:
    asked = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), ErrorReply(ErrorCode.NO_ARENA, "gone", "borrow"))
    refusal = asked.end()
    assert isinstance(refusal, RemoteRefusal)
    assert refusal.code is ErrorCode.NO_ARENA


def test_the_end_of_the_daemon_ends_the_call(ends: Ends) -> None:
    asked = Asked(ends.link)
    ends.daemon.next_id()
    ends.daemon.connection.close()
    assert isinstance(asked.end(), ConnectionLost)
    with pytest.raises(ConnectionLost):
        ends.link.call(ASKED, BorrowReply, within(20))


def test_closing_ends_the_call(ends: Ends) -> None:
    asked = Asked(ends.link, seconds=600)
    ends.daemon.next_id()
    ends.closing.set()
    assert isinstance(asked.end(), ConnectionLost)


def test_a_long_question_is_not_sent(ends: Ends) -> None:
    many = [n.to_bytes(16, "little") for n in range(MAX_LINK_BYTES // 16)]
    assert ends.link.call(Borrow(16, many, [b"\0"], 4096), BorrowReply, within(20)) is None
    ends.daemon.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        ends.daemon.connection.recv(1)


def test_a_socket_that_takes_less_is_asked_less(ends: Ends) -> None:
    ends.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    many = [n.to_bytes(16, "little") for n in range(2000)]
    assert ends.link.call(Borrow(16, many, [b"\0"], 4096), BorrowReply, within(20)) is None
    asked = Asked(ends.link)
    ends.daemon.answer(ends.daemon.next_id(), lent(5))
    assert asked.end() == lent(5)


def test_what_lies_there_is_heard_without_asking(ends: Ends) -> None:
    early = Asked(ends.link, seconds=0.05)
    ends.daemon.answer(ends.daemon.next_id(), lent(6))
    early.end()
    ends.daemon.answer(99, lent(7))
    ends.link.hear_late()
    ends.link.hear_late()
    assert ends.late[-1] == lent(7)
    assert not ends.link.awaits_late_replies


def test_a_reply_that_never_comes_is_not_awaited_for_ever(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LATE_S", 5.0)
    early = Asked(ends.link, seconds=0.01)
    first = ends.daemon.next_id()
    assert isinstance(early.end(), RemoteTimeout)
    assert ends.link.awaits_late_replies
    eventually(lambda: not ends.link.awaits_late_replies)
    ends.daemon.answer(first, lent(8))  # and if it comes after all
    ends.link.hear_late()
    assert ends.late == [lent(8)]


def test_a_daemon_that_reads_nothing_is_asked_over_zmq(ends: Ends) -> None:
    for _ in range(10_000):
        try:
            if ends.link.call(ASKED, BorrowReply, time.monotonic()) is None:
                return
        except RemoteTimeout:
            pass
    pytest.fail("a full socket took ten thousand packets")


# ---- with a daemon -----------------------------------------------------------------------------


def test_a_link_that_takes_nothing_is_no_sign_of_life(
    daemon: DaemonProcess,
) -> None:
    store = RemoteStore(daemon.ipc, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    memory = store.attach()
    assert memory is not None
    many = block_keys("many", 4000)
    request = Borrow(len(many[0]), many, [RankTag().encode()], NBYTES)

    def ask(connection: Connection, end: float) -> BorrowReply | None:
        return memory.link.call(request, BorrowReply, end)

    def is_full() -> bool:
        try:
            return memory.link.call(request, BorrowReply, within(0.01)) is None
        except RemoteTimeout:
            return False

    memory.lend(keys("one", 1))  # the session is there
    memory._timeout = 0.2
    daemon.freeze()
    eventually(lambda: memory.call(ask, within(0.1)) is None and is_open(store))
    eventually(is_full)
    assert memory.link.awaits_late_replies
    for _ in range(6):
        time.sleep(0.5)
        memory.settle()
        assert is_open(store), "a daemon that is stopped passes for one that is back"
    daemon.thaw()
    memory._timeout = 20.0

    def all_is_back() -> bool:
        memory.settle()
        return memory.is_settled and not is_open(store)

    eventually(all_is_back)
    assert leases_of(daemon) == 0
    store.close()


def is_open(store: RemoteStore) -> bool:
    return store.breaker.state is not BreakerState.CLOSED
