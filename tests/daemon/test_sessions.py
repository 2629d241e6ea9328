"""Who is connected, and who makes room for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.net import sessions
from vllm_tiered_kv.server.net.sessions import Listener, Peer, Session, Sessions
from vllm_tiered_kv.server.requests.call import Call
from vllm_tiered_kv.server.tiers.namespace_file import Shape
from vllm_tiered_kv.wire.codec import decode_reply
from vllm_tiered_kv.wire.messages import ErrorReply, InfoReply

LISTENER = Listener(cast(Any, None), "tcp://127.0.0.1:9527", False)


class Office:
    """Sessions at times of its own; three at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(sessions, "time", clock)
        self.all = Sessions(3, 1000.0, lambda session: None)

    def open(self, name: bytes) -> Session:
        shape = Shape(24, frozenset({4096}), "test")
        peer = Peer(LISTENER, name)
        session = Session(peer, "test", "", False, bytes(32), shape, None, last_seen=self.now)
        self.all.open(session)
        return session

    def hear(self, session: Session) -> None:
        assert self.all.find(session.peer, "") is session


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> Office:
    return Office(monkeypatch)


def test_busy_session_does_not_block_new_ones(office: Office) -> None:
    """It is always in use, so it stays first in the order of recency."""
    busy, first, second = [office.open(name) for name in (b"busy", b"first", b"second")]
    for _ in range(20):
        office.now += 0.5
        office.hear(busy)
    newcomer = office.open(b"newcomer")
    assert [one.is_open for one in (busy, first, second)] == [True, False, True]
    office.hear(newcomer)


def test_waiting_session_does_not_block_new_ones(office: Office) -> None:
    waiting, first, second = [office.open(name) for name in (b"waiting", b"first", b"second")]
    waiting.in_flight = 1
    office.now += 10.0
    office.open(b"newcomer")
    assert [one.is_open for one in (waiting, first, second)] == [True, False, True]


def test_sessions_all_in_use_refuse_new_one(office: Office) -> None:
    used = [office.open(name) for name in (b"one", b"two", b"three")]
    office.now += 10.0
    used[0].in_flight = 1
    for session in used[1:]:
        office.hear(session)
    with pytest.raises(ProtocolError) as refused:
        office.open(b"newcomer")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert all(session.is_open for session in used)


def test_reply_that_cannot_be_encoded_becomes_an_error(office: Office) -> None:
    sent: list[bytes] = []
    outbox = SimpleNamespace(send=lambda peer, header, payload, on_unsent: sent.append(header))
    session = office.open(b"client")
    call = Call(session, 7, "info", cast(Any, outbox), cast(Any, None), Recorder())
    with pytest.raises(ProtocolError):
        call.reply(InfoReply({"name": "longer than a text may be" * 100}))
    assert session.in_flight == 1
    call.fail_internally()
    (header,) = sent
    request_id, reply = decode_reply(header, [])
    assert (request_id, session.in_flight) == (7, 0)
    assert isinstance(reply, ErrorReply)
    assert reply.code is ErrorCode.INTERNAL
