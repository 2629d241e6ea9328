"""A daemon that breaks the protocol or stalls causes misses: no exception, no hang, and never a
wrong byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.patience import eventually
from tests.remote.engine import (
    IDENTITY,
    NBYTES,
    RANK,
    block_keys,
    buffers,
    content,
    identity,
    items,
    keys,
    within,
)
from tests.remote.faulty_daemon import Fault, FaultyDaemon, Frames, block_reply, framed
from vllm_tiered_kv.core.breaker import BreakerState
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.errors import ConnectionLost, ErrorCode
from vllm_tiered_kv.native import cpu
from vllm_tiered_kv.remote import transfers
from vllm_tiered_kv.remote.address import ServerAddress
from vllm_tiered_kv.remote.connection import Connection, Settings
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.remote.transfers import WRITES_IN_FLIGHT
from vllm_tiered_kv.wire.messages import (
    Contains,
    ContainsReply,
    Delete,
    ErrorReply,
    Get,
    Hello,
    Limits,
    Match,
    MatchReply,
    Put,
    PutReply,
    Request,
    StatsReply,
)

KEYS = keys("chain", 8)


@pytest.fixture
def daemon() -> Iterator[FaultyDaemon]:
    with FaultyDaemon() as running:
        running.blocks = {key[16:]: content(key) for key in KEYS}
        yield running


@pytest.fixture
def store(daemon: FaultyDaemon) -> Iterator[RemoteStore]:
    opened = RemoteStore(daemon.address, IDENTITY, timeout_s=10.0, connect_timeout_s=5.0)
    yield opened
    opened.close()


def on(kind: type, answer: Callable[[FaultyDaemon, int, Request], list[Frames]]) -> Fault:
    def fault(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
        return answer(daemon, request_id, request) if isinstance(request, kind) else None

    return fault


def assert_served(store: RemoteStore) -> None:
    """The store works (again)."""
    into = buffers(len(KEYS))
    assert store.get(KEYS, into) == [True] * len(KEYS)
    assert [bytes(buffer) for buffer in into] == [content(key) for key in KEYS]


def test_correct_daemon_stores_and_returns_blocks(store: RemoteStore) -> None:
    assert_served(store)
    assert store.match(KEYS) == 8
    assert store.contains([*KEYS[:2], *keys("other", 1)]) == [True, True, False]


def test_greet_opens_connections_in_advance(daemon: FaultyDaemon, store: RemoteStore) -> None:
    store.greet(3)
    assert daemon.ops() == ["hello"] * 3
    assert_served(store)
    assert daemon.ops().count("hello") == 3


def test_greet_without_an_answer_is_one_failed_call(daemon: FaultyDaemon) -> None:
    daemon.fault = lambda *_: []
    store = RemoteStore(daemon.address, IDENTITY, timeout_s=0.2, connect_timeout_s=5.0)
    store.greet(3)
    assert store.failed_calls == 1
    store.close()


@pytest.mark.parametrize("kind", [Hello, Match, Get])
def test_request_without_reply_is_a_miss(
    daemon: FaultyDaemon, store: RemoteStore, kind: type
) -> None:
    daemon.fault = on(kind, lambda *_: [])
    timeout_s = 30.0 if kind is Match else 0.2  # only with Match is a get answered
    assert store.get(KEYS[:1], buffers(1), deadline=within(timeout_s)) == [kind is Match]
    assert store.match_all([KEYS[0][16:33]], [], deadline=within(0.2)) is not None
    for _ in range(4):
        into = buffers(2)
        store.get(KEYS[:2], into, deadline=within(timeout_s))
    assert (store.breaker.state is BreakerState.CLOSED) == (kind is Match)
    daemon.fault = None
    eventually(lambda: store.match(KEYS) == 8)
    assert_served(store)


def test_late_reply_is_not_used_by_the_next_call(daemon: FaultyDaemon, store: RemoteStore) -> None:
    has_returned = threading.Event()

    def dawdle(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
        assert has_returned.wait(30)
        return [daemon.honest(request_id, request)]

    assert_served(store)
    daemon.fault = on(Get, dawdle)
    into = buffers(1)
    assert store.get(KEYS[:1], into, deadline=within(0.1)) == [False]
    daemon.fault = None
    has_returned.set()
    time.sleep(0.5)
    assert bytes(into[0]) == bytes(NBYTES), "nothing is written after the return"
    assert_served(store)


def test_reply_with_another_id_is_ignored(daemon: FaultyDaemon, store: RemoteStore) -> None:
    daemon.fault = on(
        Get, lambda d, i, _: [block_reply(i + 1000, {0: content(KEYS[1])}), d.honest(i, _)]
    )
    assert_served(store)
    daemon.fault = on(Get, lambda d, i, _: [block_reply(i + 1000, {0: content(KEYS[1])})])
    assert store.get(KEYS[:1], buffers(1), deadline=within(0.2)) == [False]


def test_duplicate_reply_counts_once(daemon: FaultyDaemon, store: RemoteStore) -> None:
    daemon.fault = lambda d, i, r: None if isinstance(r, Put) else [d.honest(i, r)] * 2
    for _ in range(3):
        assert_served(store)
        assert store.match(KEYS) == 8


@pytest.mark.parametrize(
    "answer",
    [
        lambda d, i, r: [[b""]],
        lambda d, i, r: [[b"\xc1"]],
        lambda d, i, r: [d.honest(i, r)[:-1]],
        lambda d, i, r: [[*d.honest(i, r), b"more"]],
        lambda d, i, r: [[d.honest(i, r)[0][:-3], *d.honest(i, r)[1:]]],
        lambda d, i, r: [[*d.honest(i, r)[:-1], d.honest(i, r)[-1][:-1]]],
        lambda d, i, r: [framed(i, StatsReply({}))],
        lambda d, i, r: [block_reply(i, {len(r.keys): content(KEYS[0])})],
        lambda d, i, r: [block_reply(i, {0: content(KEYS[1])}, flip=1)],
        lambda d, i, r: [block_reply(i, {0: content(KEYS[0])[:-1]})],
        lambda d, i, r: [[b"x"] * 3000],
    ],
    ids=[
        "empty header",
        "no msgpack",
        "a frame less",
        "a frame more",
        "half a header",
        "a short frame",
        "another's reply",
        "a position not asked for",
        "a wrong checksum",
        "another length",
        "too many frames",
    ],
)
def test_malformed_get_reply_is_a_miss(
    daemon: FaultyDaemon,
    store: RemoteStore,
    answer: Callable[[FaultyDaemon, int, Request], list[Frames]],
) -> None:
    daemon.fault = on(Get, answer)
    assert store.get(KEYS[:1], buffers(1), deadline=within(5)) == [False]
    daemon.fault = None
    daemon.blocks[KEYS[0][16:]] = content(KEYS[0])  # the client deletes a damaged block
    assert_served(store)


def test_duplicate_position_ends_the_stream(daemon: FaultyDaemon, store: RemoteStore) -> None:
    first, other = content(KEYS[0]), content(KEYS[1])
    daemon.fault = on(
        Get, lambda d, i, _: [block_reply(i, {0: first}, more=True), block_reply(i, {0: other})]
    )
    into = buffers(2)
    assert store.get(KEYS[:2], into) == [True, False]
    assert bytes(into[0]) == first


def test_damaged_block_is_told_and_deleted(
    daemon: FaultyDaemon, store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    bad = content(KEYS[2])[:-1] + b"\0"
    checksum_of = block_reply(1, {0: content(KEYS[2])})[0]
    assert checksum_of
    daemon.blocks[KEYS[2][16:]] = bad

    def stale_checksums(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
        assert isinstance(request, Get)
        right = [content(key) for key in KEYS]
        header = block_reply(request_id, dict(enumerate(right)))[0]
        return [[header, *(daemon.blocks[key] for key in request.keys)]]

    daemon.fault = on(Get, stale_checksums)
    assert store.get(KEYS, buffers(8)) == [key is not KEYS[2] for key in KEYS]
    assert caplog.text.count("sent damaged blocks") == 1
    assert [r.keys for r in daemon.seen if isinstance(r, Delete)] == [[KEYS[2][16:]]]
    assert KEYS[2][16:] not in daemon.blocks


def test_blocks_before_the_end_of_a_stream_are_kept(
    daemon: FaultyDaemon, store: RemoteStore
) -> None:
    some = {1: content(KEYS[1]), 0: content(KEYS[0])}
    assert_served(store)  # opens the session, so that the deadline covers the blocks alone
    daemon.fault = on(Get, lambda d, i, _: [block_reply(i, some, more=True)])
    into = buffers(3)
    assert store.get(KEYS[:3], into, deadline=within(3)) == [True, True, False]
    assert bytes(into[1]) == content(KEYS[1])
    assert store.breaker.state is BreakerState.CLOSED
    failed = ErrorReply(ErrorCode.INTERNAL, "the disk is gone", "get")
    daemon.fault = on(Get, lambda d, i, _: [block_reply(i, some, more=True), framed(i, failed)])
    assert store.get(KEYS[:3], buffers(3)) == [True, True, False]
    daemon.fault = None
    assert_served(store)


def test_stream_may_arrive_in_any_order(daemon: FaultyDaemon, store: RemoteStore) -> None:
    def stream(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
        order = [5, 0, 7, 2, 1, 6, 3, 4]
        parts = [block_reply(request_id, {n: content(KEYS[n])}, more=True) for n in order]
        return [*parts, block_reply(request_id, {})]

    daemon.fault = on(Get, stream)
    assert_served(store)


def test_forgotten_session_is_reopened(
    daemon: FaultyDaemon, store: RemoteStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert_served(store)
    forgot = ErrorReply(ErrorCode.NO_HELLO, "who is this?", "match")
    daemon.fault = on(Match, lambda d, i, _: [framed(i, forgot)])
    assert store.match(KEYS) == 0
    assert daemon.ops().count("match") == 2, "a second time, and no more"
    daemon.fault = None
    daemon.instance = bytes(16)
    assert_served(store)
    assert daemon.ops().count("hello") == 3
    assert caplog.text.count("was restarted") == 1


def test_session_forgotten_after_a_reply_is_not_retried(
    daemon: FaultyDaemon, store: RemoteStore
) -> None:
    assert_served(store)
    some = {0: content(KEYS[0])}
    forgot = ErrorReply(ErrorCode.NO_HELLO, "who is this?", "get")
    daemon.fault = on(Get, lambda d, i, _: [block_reply(i, some, more=True), framed(i, forgot)])
    asked = daemon.ops().count("get")
    assert store.get(KEYS[:3], buffers(3)) == [True, False, False]
    assert daemon.ops().count("get") == asked + 1, "it may ask for much that has come already"
    daemon.fault = None
    assert_served(store)


@pytest.mark.parametrize(
    "code", [ErrorCode.MISMATCH, ErrorCode.UNSUPPORTED_VERSION, ErrorCode.UNAUTHORIZED]
)
def test_refused_engine_gets_misses_and_warns_once(
    daemon: FaultyDaemon,
    store: RemoteStore,
    code: ErrorCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = ErrorReply(code, "blocks of 4096 bytes are expected", "hello")
    daemon.fault = on(Hello, lambda d, i, _: [framed(i, refusal)])
    for _ in range(20):
        assert store.get(KEYS[:1], buffers(1)) == [False]
        assert set(store.put(items(KEYS[:1]))) == {PutResult.FAILED}
    assert not store.available
    assert daemon.ops() == ["hello"]
    said = [r.getMessage() for r in caplog.records if "refuses this client" in r.getMessage()]
    assert len(said) == 1
    assert "blocks of 4096 bytes are expected" in said[0]


def test_refused_request_does_not_open_the_breaker(
    daemon: FaultyDaemon, store: RemoteStore
) -> None:
    refusal = ErrorReply(ErrorCode.READ_ONLY, "this client may only read", "put")
    daemon.fault = on(Put, lambda d, i, _: [framed(i, refusal)])
    for _ in range(5):
        assert store.put(items(keys("new", 2))) == [PutResult.FAILED] * 2
    assert store.available
    assert_served(store)


def test_overloaded_daemon_opens_the_breaker(daemon: FaultyDaemon, store: RemoteStore) -> None:
    busy = ErrorReply(ErrorCode.UNAVAILABLE, "too many requests", "match")
    daemon.fault = on(Match, lambda d, i, _: [framed(i, busy)])
    for _ in range(3):
        assert store.match(KEYS) == 0
    assert not store.available
    daemon.fault = None
    eventually(lambda: store.match(KEYS) == 8)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_reply_of_the_wrong_size_is_a_miss(
    daemon: FaultyDaemon, store: RemoteStore, count: int
) -> None:
    daemon.fault = on(Put, lambda d, i, _: [framed(i, PutReply(b"\x01" * count))])
    assert store.put(items(keys("new", 2))) == [PutResult.FAILED] * 2
    daemon.fault = lambda d, i, r: (
        [framed(i, ContainsReply(b"\x01" * count))] if r.op == "contains" else None
    )
    assert store.contains(KEYS[:2]) == [False, False]


def test_match_count_is_limited_to_the_request(daemon: FaultyDaemon, store: RemoteStore) -> None:
    daemon.fault = on(Match, lambda d, i, _: [framed(i, MatchReply(1000, [1000, 0, 0]))])
    assert store.match(KEYS[:3]) == 3
    found = store.match_all(block_keys("chain", 3), [RANK])
    assert found is not None
    assert found.count == 3


def test_put_hashes_the_first_blocks_during_contains(
    daemon: FaultyDaemon, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = threading.Event()
    in_time = []

    def hash_buffers(given: Sequence[memoryview]) -> list[int]:
        if given:
            hashed.set()
        return cpu.hash_buffers(given)

    def wait(d: FaultyDaemon, request_id: int, request: Request) -> list[Frames]:
        in_time.append(hashed.wait(8.0))  # less than the store's timeout
        return [d.honest(request_id, request)]

    monkeypatch.setattr(transfers, "hash_buffers", hash_buffers)
    daemon.fault = on(Contains, wait)
    new = keys("new", 2)
    assert store.put(items(new)) == [PutResult.STORED] * 2
    assert in_time == [True]
    daemon.fault = None
    into = buffers(2)
    assert store.get(new, into) == [True] * 2
    assert [bytes(buffer) for buffer in into] == [content(key) for key in new]


def test_put_sends_missing_blocks_only(daemon: FaultyDaemon, store: RemoteStore) -> None:
    new = keys("new", 2)
    assert store.put(items([KEYS[0], new[0], KEYS[1], new[1]])) == [
        PutResult.PRESENT,
        PutResult.STORED,
        PutResult.PRESENT,
        PutResult.STORED,
    ]
    assert [r.keys for r in daemon.seen if isinstance(r, Put)] == [[key[16:] for key in new]]
    assert daemon.blocks[new[1][16:]] == content(new[1])


def test_requests_keep_the_daemons_limits() -> None:
    limits = Limits(keys=3, frames=2, message_bytes=2 * NBYTES)
    with FaultyDaemon(limits=limits) as daemon:
        store = RemoteStore(daemon.address, IDENTITY, timeout_s=10.0, connect_timeout_s=5.0)
        assert store.put(items(KEYS)) == [PutResult.STORED] * 8
        assert_served(store)
        assert store.contains(KEYS) == [True] * 8
        assert store.match(KEYS) == 8
        assert store.delete(KEYS) == 8
        store.close()
        for request in daemon.seen:
            assert len(getattr(request, "keys", [])) <= (2 if isinstance(request, Put) else 3)


def test_put_with_a_dropped_block_drops_its_descendants() -> None:
    def no_room(daemon: FaultyDaemon, request_id: int, request: Request) -> list[Frames] | None:
        if isinstance(request, Put) and daemon.ops().count("put") == 1:
            return [framed(request_id, PutReply(b"\x03"))]
        return None

    with FaultyDaemon(no_room, Limits(frames=1)) as daemon:
        store = RemoteStore(daemon.address, IDENTITY, timeout_s=10.0, connect_timeout_s=5.0)
        results = store.put(items(KEYS))
        store.close()
        assert results[0] is PutResult.DROPPED
        assert set(results[WRITES_IN_FLIGHT:]) == {PutResult.DROPPED}
        assert daemon.ops().count("put") == WRITES_IN_FLIGHT, (
            "what was under way, and nothing after"
        )


def test_keys_of_another_namespace_are_not_requested(
    daemon: FaultyDaemon, store: RemoteStore
) -> None:
    foreign = keys("chain", 3, of=identity(name="another"))
    assert store.match([*KEYS[:2], *foreign]) == 2
    assert store.contains([KEYS[0], foreign[0]]) == [True, False]
    assert store.get([foreign[0], KEYS[0]], buffers(2)) == [False, True]
    assert store.put(items([foreign[0]])) == [PutResult.FAILED]
    assert store.delete(foreign) == 0


def test_failed_put_without_threads_ends_the_context(
    daemon: FaultyDaemon, store: RemoteStore
) -> None:
    """The zmq context ends in the calling thread, and the engine sees no exception."""
    chain = items(keys("threadless", 2))
    assert store.put(chain) == [PutResult.STORED] * 2  # other threads have started by now
    daemon.fault = on(Put, lambda *_: [])
    before = threading.stack_size(1 << 50)  # more than can be mapped
    try:
        with pytest.raises(RuntimeError):
            threading.Thread().start()
        results = store.put(chain, Durability.DISK, deadline=within(0.5))
    finally:
        threading.stack_size(before)
    assert results == [PutResult.FAILED] * 2
    opened = [one for one in store._caller.pool._free.queue if one is not None]
    assert [one._zmq.context for one in opened] == [None]


def test_peer_disconnect_during_a_put_releases_the_payload(daemon: FaultyDaemon) -> None:
    """libzmq loses track of the frames it has taken, so that their trackers never end."""

    class EndsTheDaemon(list[memoryview]):
        def __getitem__(self, which: Any) -> Any:
            if which == 1:
                daemon.stop()
                time.sleep(0.3)
            return super().__getitem__(which)

    connection = Connection(Settings(ServerAddress(daemon.address), 5.0), IDENTITY.hello())
    connection.open(within(30))
    chain = items(KEYS[:2])
    request = Put(
        25,
        [item.key[16:] for item in chain],
        [None, None],
        [NBYTES] * 2,
        [0, 0],
        Durability.MEMORY,
    )
    payload = EndsTheDaemon([item.payload for item in chain])
    with pytest.raises(ConnectionLost):
        connection.call(request, PutReply, payload, deadline=within(30))
    assert connection.idle
    assert connection._zmq.context is None, "only its end proves that nothing is read any more"
    connection.close()
