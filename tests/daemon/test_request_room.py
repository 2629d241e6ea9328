"""How much of what clients have sent may wait for its answer."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.server.allowances import Allowances
from vllm_tiered_kv.server.namespace_file import Shape
from vllm_tiered_kv.server.request_room import RequestRoom
from vllm_tiered_kv.server.sessions import Session


def a_session() -> Session:
    shape = Shape(24, frozenset({4096}), "test")
    return Session(cast(Any, None), "test", "", False, bytes(32), shape, None)


@pytest.fixture
def room() -> RequestRoom:
    allowances = Allowances.of_memory(16 << 20)
    return RequestRoom(
        dataclasses.replace(allowances, request_bytes_per_session=10, request_bytes=25)
    )


def assert_full(room: RequestRoom, session: Session, nbytes: int) -> None:
    before = session.under_way_bytes
    with pytest.raises(ProtocolError) as refused:
        room.take(session, nbytes)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert session.under_way_bytes == before


def test_a_session_has_its_own(room: RequestRoom) -> None:
    one, other = a_session(), a_session()
    room.take(one, 6)
    room.take(one, 4)
    assert_full(room, one, 1)
    room.take(other, 10)
    room.give_back(one, 6)
    room.take(one, 6)
    assert_full(room, one, 1)


def test_all_of_them_share_the_rest_and_each_may_ask_for_something(room: RequestRoom) -> None:
    sessions = [a_session() for _ in range(4)]
    for session in sessions[:3]:
        room.take(session, 8)
    room.take(sessions[3], 20)
    for session in sessions:
        assert_full(room, session, 1)
    room.give_back(sessions[3], 20)
    room.take(sessions[0], 1)
    assert_full(room, sessions[1], 1)
