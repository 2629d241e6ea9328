"""Blocks in Redis: a real server, a real cluster, and what goes wrong with both."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xxhash

from tests.patience import eventually, mostly_slow
from tests.ports import free_port
from tests.stores.certificates import make_certificates
from tests.stores.contract import (
    MIB,
    StoreCase,
    StoreContract,
    assert_holds,
    assert_lacks,
    chain_items,
    chain_keys,
    content,
    item,
    read,
    store_key,
)
from tests.stores.redis_servers import (
    RedisCluster,
    RedisServer,
    redis_cluster,
    redis_server,
    require_redis,
)
from tests.stores.speaker import assert_refused_or_missing
from tests.stores.traffic import LATE_S, Traffic
from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.stores.block_format import BlockHeader, encode_header
from vllm_tiered_kv.stores.registry import BackingOptions, check, open_store, redacted

TIMEOUT_S = 2.0
KEPT = {PutResult.STORED, PutResult.PRESENT}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with redis_cluster() as started:
        yield started


@pytest.fixture
def empty(server: RedisServer) -> RedisServer:
    with server.client() as client:
        client.flushall()
    return server


def open_redis(
    url: str, timeout_s: float = TIMEOUT_S, on_unanswered: Callable[[], None] = lambda: None
) -> Any:
    return open_store(BackingOptions(url, timeout_s=timeout_s), on_unanswered)


@pytest.fixture
def store(empty: RedisServer) -> Iterator[Any]:
    opened = open_redis(empty.url)
    yield opened
    opened.close()


def name(key: StoreKey, part: int = 0, prefix: str = "tiered-kv") -> str:
    """The key in Redis, as docs/stores.md says."""
    return f"{prefix}:1:{{{key.hex()}}}" + (f":{part}" if part else "")


# ---- the contract -------------------------------------------------------------------------------


class TestContract(StoreContract):
    @pytest.fixture(params=["server", "cluster"])
    def case(self, request: pytest.FixtureRequest) -> StoreCase:
        redis = request.getfixturevalue(request.param)

        @contextmanager
        def open_case(folder: Path, capacity_bytes: int) -> Iterator[Any]:
            if not (folder / "opened").exists():  # a second time, the blocks must be there
                (folder / "opened").touch()
                if isinstance(redis, RedisCluster):
                    redis.flush()
                else:
                    redis.client().flushall()
            opened = open_redis(redis.url, 30.0)
            yield opened
            opened.close()

        return StoreCase(
            request.param, open_case, persistent=True, describes=True, exact_usage=False
        )


# ---- format -------------------------------------------------------------------------------------


def test_block_in_redis_has_the_documented_form(empty: RedisServer, store: Any) -> None:
    key, parent = store_key("a"), store_key("b")
    store.put([item(key, 1000, parent)])
    client = empty.client()
    assert client.keys() == [name(key).encode()]
    payload = content(key, 1000)
    header = BlockHeader(key, parent, 1000, xxhash.xxh3_64_intdigest(payload))
    assert client.get(name(key)) == encode_header(header) + payload
    assert client.ttl(name(key)) == -1


def test_large_block_is_split_and_put_together(empty: RedisServer, store: Any) -> None:
    key, nbytes = store_key("large"), 17 * MIB + 3
    assert store.put([item(key, nbytes)]) == [PutResult.STORED]
    client = empty.client()
    sizes = {part: client.strlen(name(key, part)) for part in range(4)}
    assert sizes == {0: 256 + 8 * MIB, 1: 8 * MIB, 2: MIB + 3, 3: 0}
    assert_holds(store, key, nbytes)
    assert store.put([item(key, nbytes, version=1)]) == [PutResult.PRESENT]
    assert read(store, key, 9 * MIB) is None, "a miss, because the buffer is shorter"
    assert_holds(store, key, nbytes)
    assert store.delete([key]) == 1
    assert client.dbsize() == 0


class _Receiving(socket.socket):
    """Notes where it receives to."""

    received: ClassVar[list[tuple[int, int]]] = []

    def recv_into(self, into: Any, *more: Any) -> int:
        address = np.frombuffer(into, np.uint8).ctypes.data
        received = super().recv_into(into, *more)
        self.received.append((address, received))
        return received


def test_block_is_received_straight_into_its_buffer(
    empty: RedisServer, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, into = store_key("a"), np.zeros(4 * MIB, np.uint8)
    store.put([item(key, into.nbytes)])
    monkeypatch.setattr(_Receiving, "received", [])
    (node,) = store.nodes.masters
    for connection in node._idle:
        connection._socket = _Receiving(fileno=connection._socket.detach())
    assert store.get([key], [memoryview(into.data)]) == [True]
    begin, end = into.ctypes.data, into.ctypes.data + into.nbytes
    straight = sum(n for address, n in _Receiving.received if begin <= address < end)
    assert straight >= into.nbytes - (64 << 10), "but for what came with the header"


def test_large_block_without_a_part_is_a_miss_and_deleted(empty: RedisServer, store: Any) -> None:
    client = empty.client()
    for number, look in enumerate(
        (lambda key: store.match([key]), lambda key: read(store, key, 17 * MIB))
    ):
        key = store_key(f"large {number}")
        store.put([item(key, 17 * MIB)])
        assert client.delete(name(key, 2)) == 1
        assert not look(key)
        assert client.dbsize() == 0
        assert store.damaged_blocks == number + 1
    assert store.put([item(key, 17 * MIB)]) == [PutResult.STORED]
    assert_holds(store, key, 17 * MIB)


def garbage(key: StoreKey, client: Any, kind: str) -> None:
    whole = bytearray(client.get(name(key)))
    if kind == "a flipped bit of the payload":
        whole[-1] ^= 1
    elif kind == "a flipped bit of the header":
        whole[20] ^= 1
    elif kind == "too short":
        del whole[-1]
    elif kind == "too long":
        whole += b"x"
    elif kind == "of another key":
        client.rename(name(store_key("other")), name(key))
        return
    elif kind == "short":
        whole = bytearray(b"hello")
    elif kind == "a list":
        client.delete(name(key))
        client.rpush(name(key), "x")
        return
    client.set(name(key), bytes(whole))


@pytest.mark.parametrize(
    "kind",
    [
        "a flipped bit of the payload", "a flipped bit of the header", "too short", "too long",
        "of another key", "short", "a list",
    ],
)  # fmt: skip
def test_garbage_under_a_key_is_a_miss_and_deleted(
    empty: RedisServer, store: Any, kind: str
) -> None:
    key = store_key("a")
    store.put([item(key), item(store_key("other"))])
    client = empty.client()
    garbage(key, client, kind)
    assert read(store, key, 4096) is None
    assert store.damaged_blocks == 1
    assert not client.exists(name(key))
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)


def test_put_replaces_garbage_that_a_lookup_can_see(empty: RedisServer, store: Any) -> None:
    key = store_key("a")
    empty.client().set(name(key), "hello")
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)


def test_prefixes_are_separate(empty: RedisServer, store: Any) -> None:
    key = store_key("a")
    store.put([item(key)])
    other = open_redis(empty.url + "/?prefix=other")
    assert_lacks(other, key)
    assert other.put([item(key, version=1)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)
    assert empty.client().exists(name(key, prefix="other"))
    other.close()


def test_ttl_is_set_and_renewed_by_use(empty: RedisServer) -> None:
    key, nbytes = store_key("a"), 9 * MIB
    client = empty.client()
    store = open_redis(empty.url + "/?ttl=1h")
    store.put([item(key, nbytes)])
    for use in (lambda: read(store, key, nbytes), lambda: store.put([item(key, nbytes)])):
        assert 3500 < client.ttl(name(key)) <= 3600 < client.ttl(name(key, 1))
        client.expire(name(key), 100)
        client.expire(name(key, 1), 100)
        use()
    assert 3500 < client.ttl(name(key)) <= 3600 < client.ttl(name(key, 1))
    store.close()


def test_full_server_drops_and_evicting_server_stores(empty: RedisServer, store: Any) -> None:
    client = empty.client()
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used + 4 * MIB)
    try:
        keys = chain_keys("a", 12)
        results = store.put(chain_items(keys, MIB))
        assert set(results) == {PutResult.STORED, PutResult.DROPPED}
        assert store.failed_blocks == results.count(PutResult.DROPPED)
        assert store.put([item(store_key("large"), 17 * MIB)]) == [PutResult.DROPPED]
        assert_lacks(store, store_key("large"))
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert store.put([item(store_key("b"), MIB)]) == [PutResult.STORED]
        usage = store.usage()
        assert usage.capacity_bytes == used + 4 * MIB
        assert usage.blocks < 12
        assert store.known_usage() == usage
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


# ---- URLs, rights, TLS --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "is not an address like host:6379"),
        ("redis://a:b", "is not an address"),
        ("redis://a,,b", "is not an address"),
        ("redis://a/x", "is not the number of a database"),
        ("redis://me:pa/ss@a", "write / ? # and @ of a password"),
        ("redis://me:pa#ss@a", "write / ? # and @ of a password"),
        ("redis://a:99999", "is not an address"),
        ("redis://[::1:6379", "'redis://[::1:6379' is not a URL"),
        ("redis://me:pa[ss@a", "'redis://me:***@a' is not a URL; write [ and ] as %5B and %5D"),
        ("redis://me:pa\uff03ss@a", "'redis://me:***@a' is not a URL"),
        ("redis://a/?tl=1d", "unknown option 'tl', expected one of ttl, prefix"),
        ("redis://a/?cacert=x", "use rediss:// for TLS"),
        ("redis://a/?ttl=x", "is not a duration"),
        ("redis://a/?ttl=1d&ttl=1d", "more than once"),
        ("redis://a/?prefix=a{b", "braces"),
        ("rediss://a/?cert=x", "belong together"),
    ],
)
def test_wrong_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match="backing") as error:
        check(BackingOptions(url))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [({"capacity_bytes": 1}, "maxmemory"), ({"ttl_s": 60}, "ttl=7d")],
)
def test_options_of_folders_are_refused(more: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(BackingOptions("redis://a", **more))


def test_url_with_everything_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_tiered_kv.stores.redis.settings import parse_settings

    url = "rediss://me:p%40ss@a:1,b,[::1]:3/2?ttl=1h&prefix=p&cacert=/c&cert=/d&key=/e"
    settings = parse_settings(BackingOptions(url))
    assert [str(address) for address in settings.addresses] == ["a:1", "b:6379", "[::1]:3"]
    assert (settings.username, settings.password, settings.database) == ("me", "p@ss", 2)
    assert (settings.tls, settings.ttl_s, settings.prefix) == (True, 3600, "p")
    assert (settings.cacert, settings.cert, settings.key) == ("/c", "/d", "/e")
    assert "p@ss" not in repr(settings)
    assert redacted(url).startswith("rediss://me:***@a:1,b,[::1]:3/2?ttl")
    assert redacted("redis://:x@y@a") == "redis://:***@a"
    assert redacted("redis://u:a/b?c#d@e@a:1/") == "redis://u:***@a:1/"
    assert redacted("redis://a:6379/?ttl=1d") == "redis://a:6379/?ttl=1d"
    monkeypatch.setenv("TIERED_KV_REDIS_USERNAME", "env")
    monkeypatch.setenv("TIERED_KV_REDIS_PASSWORD", "secret")
    settings = parse_settings(BackingOptions("redis://a"))
    assert (settings.username, settings.password) == ("env", "secret")
    assert parse_settings(BackingOptions("redis://u:p@a")).password == "p"


@pytest.fixture
def acl(server: RedisServer) -> Iterator[RedisServer]:
    """Users with the password `secret`."""
    from vllm_tiered_kv.stores.redis.store import RIGHTS

    client = server.client()
    client.execute_command("ACL", "SETUSER", "all", "on", ">secret", "~*", "+@all")
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+cluster|slots"
    )
    client.execute_command(
        "ACL", "SETUSER", "elsewhere", "on", ">secret", "~other:*", "+@all"
    )  # fmt: skip
    client.execute_command(
        "ACL", "SETUSER", "documented", "on", ">secret", "~tiered-kv:*",
        *RIGHTS.split(),
    )  # fmt: skip
    yield server
    client.execute_command("ACL", "DELUSER", "all", "reader", "elsewhere", "documented")


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("all:wrong", "user or password: .*invalid username-password"),
        ("reader:secret", "'reader' needs the rights ~tiered-kv:"),
        ("elsewhere:secret", "(?i)no permissions to access .* 'elsewhere' needs the rights"),
    ],
)
def test_user_without_rights_is_a_clear_error(acl: RedisServer, user: str, said: str) -> None:
    url = f"redis://{user}@{acl.address}"
    with pytest.raises(ConfigError, match=said) as error:
        open_redis(url)
    assert str(error.value).startswith(f"backing: redis://{user.partition(':')[0]}:***@127.0.0.1")
    assert "secret" not in str(error.value)
    assert "wrong" not in str(error.value)


@pytest.mark.parametrize("user", ["all", "documented"])
def test_user_with_the_documented_rights_works(
    acl: RedisServer, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_KV_REDIS_PASSWORD", "secret")
    store = open_redis(f"redis://{user}@{acl.address}/?ttl=1h")
    key = store_key(user)
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)
    assert store.usage().blocks
    assert store.delete([key]) == 1
    assert store.failed_blocks == store.damaged_blocks == 0
    store.close()


def test_server_that_wants_a_password_refuses(tmp_path: Path) -> None:
    with redis_server("--requirepass", "secret") as guarded:
        with pytest.raises(ConfigError, match="Authentication required"):
            open_redis(guarded.url)
        store = open_redis(f"redis://:secret@{guarded.address}")
        assert store.put([item(store_key("a"))]) == [PutResult.STORED]
        store.close()


def test_tls_works_and_its_mistakes_are_clear_errors(tmp_path: Path) -> None:
    require_redis("openssl")
    make_certificates(tmp_path)
    port = free_port()
    guarded = RedisServer(
        tmp_path / "redis", "--port", "0", "--tls-port", str(port),
        "--tls-cert-file", str(tmp_path / "server.crt"),
        "--tls-key-file", str(tmp_path / "server.key"),
        "--tls-ca-cert-file", str(tmp_path / "ca.crt"),
        port=port,
    )  # fmt: skip
    guarded.start()
    try:
        url = f"rediss://{guarded.address}/?cacert={tmp_path}/ca.crt"
        mine = f"&cert={tmp_path}/server.crt&key={tmp_path}/server.key"
        store = open_redis(url + mine)
        for key, nbytes in ((store_key("a"), 5000), (store_key("b"), 9 * MIB)):
            assert store.put([item(key, nbytes)]) == [PutResult.STORED]
            assert_holds(store, key, nbytes)
        store.close()
        for wrong, said in (
            (url.replace("ca.crt", "wrong.crt") + mine, "CERTIFICATE_VERIFY_FAILED"),
            (url.replace("127.0.0.1", "localhost") + mine, "CERTIFICATE_VERIFY_FAILED"),
            (url, "(?i)certificate"),
            (url.replace("ca.crt", "none.crt") + mine, "No such file"),
        ):
            with pytest.raises(ConfigError, match=said):
                open_redis(wrong)
    finally:
        guarded.kill()


def test_several_servers_that_are_no_cluster_are_refused(empty: RedisServer) -> None:
    with pytest.raises(ConfigError, match="names several servers, but they are not a cluster"):
        open_redis(f"{empty.url},{empty.address}")


# ---- servers that fail --------------------------------------------------------------------------


def test_absent_server_costs_misses_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_redis()
    caplog.set_level(logging.WARNING)
    late = RedisServer(tmp_path / "redis")
    unanswered: list[None] = []
    store = open_redis(late.url, on_unanswered=lambda: unanswered.append(None))
    unanswered.clear()  # of opening
    key = store_key("a")
    begin = time.monotonic()
    assert_lacks(store, key)
    assert store.put([item(key)]) == [PutResult.FAILED]
    with pytest.raises(NotDeletedError):
        store.delete([key])
    assert store.flush()
    assert time.monotonic() - begin < LATE_S
    assert store.is_absent
    assert unanswered
    assert f"cannot reach Redis at {late.address}" in caplog.text
    try:
        late.start()
        eventually(lambda: store.put([item(key)]) == [PutResult.STORED])
        assert_holds(store, key, 4096)
        assert not store.is_absent
        late.restart()  # empty, and all connections are gone
        eventually(lambda: store.put([item(key)]) == [PutResult.STORED])
        assert_holds(store, key, 4096)
    finally:
        late.kill()
        store.close()


def test_hung_server_costs_a_deadline_and_then_nothing(empty: RedisServer) -> None:
    store = open_redis(empty.url, 0.5)
    key = store_key("a")
    store.put([item(key)])
    with empty.frozen():
        begin = time.monotonic()
        for _ in range(4):
            assert store.contains([key]) == [False]
        assert store.is_absent
        assert time.monotonic() - begin < LATE_S
        begin = time.monotonic()
        for _ in range(200):
            assert read(store, key, 4096) is None
        assert time.monotonic() - begin < LATE_S, "the breaker is open"
    eventually(lambda: store.contains([key]) == [True])
    assert_holds(store, key, 4096)
    store.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 400 Bad Request\r\n\r\n", b"*1\r\n*1\r\n$3\r\nabc\r\n", b"x" * 100_000,
        b"$-5\r\n", b"$zz\r\n", b"*99999999\r\n", b"*1\r\n" * 100, b"", b"+OK\r\n" * 1000,
        b"$5\r\nabcdefgh\r\n", b"$99999999999999\r\nx",
    ],
)  # fmt: skip
def test_server_that_is_no_redis_is_a_miss_or_an_error(answer: bytes) -> None:
    require_redis()
    assert_refused_or_missing(answer, lambda address: open_redis(f"redis://{address}", 0.5))


@pytest.mark.parametrize("limit", ["deadline", "silence"])
def test_server_that_stalls_within_a_value_costs_a_deadline(limit: str) -> None:
    from vllm_tiered_kv.stores.redis.resp import RespConnection

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = RespConnection(ours, 60.0 if limit == "deadline" else 0.2)
        theirs.sendall(b"$5000\r\nabc")
        begin = time.monotonic()
        for work in (
            lambda: connection.value(connection.bulk_length()),
            lambda: connection.send([bytes(16 * MIB)]),  # `theirs` never reads it
        ):
            connection.deadline = time.monotonic() + (0.2 if limit == "deadline" else 60.0)
            with pytest.raises(TimeoutError):
                work()
        assert time.monotonic() - begin < LATE_S


def test_hung_primary_takes_no_time_from_the_others(cluster: RedisCluster) -> None:
    cluster.flush()
    store = open_redis(cluster.url, 0.5)
    keys = chain_keys("a", 30)
    eventually(lambda: set(store.put(chain_items(keys))) <= KEPT)
    victim = cluster.primaries()[0]
    of_victim = {
        key: store.nodes._owners[store._request(key).slot].address.port == victim.port
        for key in keys
    }
    keys.sort(key=lambda key: not of_victim[key])  # the victim is the first to be asked
    with victim.frozen():
        here = store.contains(keys)
    assert here == [not of_victim[key] for key in keys]
    assert True in here
    assert False in here
    eventually(lambda: store.match(keys) == 30)
    store.close()


@pytest.mark.parametrize("how", mostly_slow([signal.SIGKILL, signal.SIGSTOP], 1))
def test_lost_primary_costs_its_share_until_its_replica_serves(
    cluster: RedisCluster, caplog: pytest.LogCaptureFixture, how: signal.Signals
) -> None:
    cluster.flush()
    store = open_redis(cluster.url, 1.0)
    assert store.nodes.is_cluster
    assert len(store.nodes.masters) == 3
    keys = chain_keys("a", 90)
    eventually(lambda: set(store.put(chain_items(keys))) <= KEPT)
    victim = cluster.primaries()[-1]
    traffic = Traffic(store)
    eventually(lambda: traffic.hits > 50)
    try:
        victim.signal(how)
        shares = [sum(store.contains(keys)) for _ in range(2)]
        eventually(lambda: len(cluster.primaries()) == 3 and victim not in cluster.primaries())
        eventually(lambda: set(store.put(chain_items(keys))) <= KEPT)
        assert store.match(keys) == 90
        for key in keys:
            assert_holds(store, key, 4096)
        hits = traffic.hits
        eventually(lambda: traffic.hits > hits + 50)
    finally:
        traffic.end()
        victim.restart()
    assert any(shares), "the other two serve until the cluster notices"
    assert traffic.wrong == []
    assert traffic.failed
    assert traffic.slowest_s < LATE_S
    assert f"cannot reach Redis at {victim.address}" in caplog.text
    assert len(store.nodes.masters) == 3
    store.close()


def test_moved_slot_is_followed(cluster: RedisCluster) -> None:
    cluster.flush()
    store = open_redis(cluster.url, 5.0)
    keys = chain_keys("moved", 50)
    store.put(chain_items(keys))
    owners = store.nodes._owners
    store.nodes._owners = owners[8000:] + owners[:8000]  # as if most slots had moved
    assert store.match(keys) == 50
    for key in keys:
        assert_holds(store, key, 4096)
    assert store.damaged_blocks == store.failed_blocks == 0
    store.close()
