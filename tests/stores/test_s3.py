"""Blocks in a bucket: a real S3 service, and what goes wrong with it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.patience import eventually
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
from tests.stores.redis_servers import require_redis
from tests.stores.s3_servers import (
    BUCKET,
    READER,
    USER,
    S3Server,
    require_s3,
    s3_server,
    use_credentials,
)
from tests.stores.speaker import Speaker, assert_refused_or_missing
from tests.stores.traffic import LATE_S, Traffic
from vllm_tiered_kv.core.store import PutResult, StoreKey, StoreUsage
from vllm_tiered_kv.errors import ConfigError, NotDeletedError
from vllm_tiered_kv.stores.block_format import BlockHeader, encode_header
from vllm_tiered_kv.stores.registry import BackingOptions, check, open_store

TIMEOUT_S = 5.0
KEPT = {PutResult.STORED, PutResult.PRESENT}
_prefixes = (f"tests/{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    use_credentials(monkeypatch)


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


def open_s3(
    url: str, timeout_s: float = TIMEOUT_S, on_unanswered: Callable[[], None] = lambda: None
) -> Any:
    return open_store(BackingOptions(url, timeout_s=timeout_s), on_unanswered)


def unchecked_s3(url: str) -> Any:
    """Without the requests that tell whether this client may work."""
    from vllm_tiered_kv.stores.s3.settings import parse_settings
    from vllm_tiered_kv.stores.s3.store import S3Store

    return S3Store(parse_settings(BackingOptions(url)), lambda: None)


@pytest.fixture
def store(server: S3Server, prefix: str) -> Iterator[Any]:
    opened = open_s3(server.url(prefix))
    yield opened
    opened.close()


def name(key: StoreKey, prefix: str) -> str:
    """As `docs/stores.md` has it."""
    return f"{prefix}/1/{key.hex()}"


def names(server: S3Server, prefix: str) -> list[str]:
    import obstore

    return [one["path"] for one in obstore.list(server.bucket(), prefix).collect()]


def listed_usage(server: S3Server, prefix: str) -> StoreUsage:
    """What the service holds, which a store does not ask for."""
    import obstore

    sizes = [one["size"] for one in obstore.list(server.bucket(), f"{prefix}/1/").collect()]
    return StoreUsage(len(sizes), sum(sizes), 0)


# ---- the contract -------------------------------------------------------------------------------


class TestContract(StoreContract):
    @pytest.fixture
    def case(self, server: S3Server, prefix: str) -> StoreCase:
        @contextmanager
        def open_case(folder: Path, capacity_bytes: int) -> Iterator[Any]:
            opened = open_s3(server.url(prefix), 30.0)
            opened.usage = partial(listed_usage, server, prefix)
            yield opened
            opened.close()

        return StoreCase("s3", open_case, persistent=True, describes=True)


# ---- format -------------------------------------------------------------------------------------


def test_block_in_a_bucket_has_the_documented_form(
    server: S3Server, store: Any, prefix: str
) -> None:
    key, parent = store_key("a"), store_key("b")
    store.put([item(key, 1000, parent)])
    assert names(server, prefix) == [name(key, prefix)]
    payload = content(key, 1000)
    header = BlockHeader(key, parent, 1000, xxhash.xxh3_64_intdigest(payload))
    found = bytes(server.bucket().get(name(key, prefix)).bytes())
    assert found == encode_header(header) + payload


def test_large_block_is_one_object(server: S3Server, store: Any, prefix: str) -> None:
    key, nbytes = store_key("large"), 33 * MIB + 3
    assert store.put([item(key, nbytes)]) == [PutResult.STORED]
    assert names(server, prefix) == [name(key, prefix)]
    assert_holds(store, key, nbytes)


def garbage(key: StoreKey, bucket: Any, prefix: str, kind: str) -> None:
    whole = bytearray(bucket.get(name(key, prefix)).bytes())
    if kind == "a flipped bit of the payload":
        whole[-1] ^= 1
    elif kind == "a flipped bit of the header":
        whole[20] ^= 1
    elif kind == "too short":
        del whole[-1]
    elif kind == "too long":
        whole += b"x"
    elif kind == "of another key":
        whole = bytearray(bucket.get(name(store_key("other"), prefix)).bytes())
    elif kind == "short":
        whole = bytearray(b"hello")
    elif kind == "empty":
        whole = bytearray()
    bucket.put(name(key, prefix), bytes(whole))


@pytest.mark.parametrize(
    "kind",
    [
        "a flipped bit of the payload", "a flipped bit of the header", "too short", "too long",
        "of another key", "short", "empty",
    ],
)  # fmt: skip
def test_garbage_under_a_key_is_a_miss_and_deleted(
    server: S3Server, store: Any, prefix: str, kind: str
) -> None:
    key = store_key("a")
    store.put([item(key), item(store_key("other"))])
    garbage(key, server.bucket(), prefix, kind)
    assert read(store, key, 4096) is None
    assert store.damaged_blocks == 1
    assert name(key, prefix) not in names(server, prefix)
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)


@pytest.mark.parametrize("kind", ["too short", "of another key", "short", "empty"])
def test_put_replaces_garbage_that_a_lookup_can_see(
    server: S3Server, store: Any, prefix: str, kind: str
) -> None:
    key = store_key("a")
    store.put([item(key), item(store_key("other"))])
    garbage(key, server.bucket(), prefix, kind)
    assert store.put([item(key)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)


def test_put_never_replaces_a_block(server: S3Server, store: Any, monkeypatch: Any) -> None:
    """Of two writers that both found no block, the second one gets PRESENT."""
    key = store_key("a")
    monkeypatch.setattr(store, "_look_up", lambda keys, deadline: [(None, True)] * len(keys))
    assert store.put([item(key)]) == [PutResult.STORED]
    assert store.put([item(key, version=1)]) == [PutResult.PRESENT]
    assert_holds(store, key, 4096)


def test_write_that_meets_another_one_is_not_taken_for_a_block(monkeypatch: Any) -> None:
    """AWS answers 409 if a delete came in between, others if two write at once: either may have
    won."""
    require_s3()
    speaker = Speaker(b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    store = unchecked_s3(f"s3://blocks?endpoint=http://{speaker.address}")
    monkeypatch.setattr(store, "_look_up", lambda keys, deadline: [(None, True)] * len(keys))
    assert store.put([item(store_key("a"))]) == [PutResult.FAILED]
    speaker.close()


def test_endpoint_of_the_url_precedes_those_of_the_environment(
    server: S3Server, prefix: str
) -> None:
    key, nowhere = store_key("a"), "http://127.0.0.1:1"

    def put(url: str, *endpoints: str) -> None:
        with pytest.MonkeyPatch.context() as patch:  # `names` would obey it, too
            variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
            for variable, endpoint in zip(variables, endpoints, strict=True):
                patch.setenv(variable, endpoint)
            store = open_s3(url)
            assert store.put([item(key)]) == [PutResult.STORED]
            store.close()

    for number, endpoints in enumerate(
        ((nowhere, nowhere), ("", nowhere), (server.endpoint, nowhere), ("", server.endpoint))
    ):
        some = f"{prefix}/{number}"
        put(
            f"s3://{BUCKET}/{some}" if server.endpoint in endpoints else server.url(some),
            *endpoints,
        )
        assert names(server, some) == [name(key, some)]


def test_put_is_conditional_whatever_the_environment_says(
    server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs that share it may need to switch this off."""
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = open_s3(server.url(prefix))
    assert store.put([item(store_key("a"))]) == [PutResult.STORED]
    store.close()


def test_prefixes_are_separate(server: S3Server, store: Any, prefix: str) -> None:
    key = store_key("a")
    store.put([item(key)])
    other = open_s3(server.url(f"{prefix}-other"))
    assert_lacks(other, key)
    assert other.put([item(key, version=1)]) == [PutResult.STORED]
    assert_holds(store, key, 4096)
    assert len(names(server, prefix)) == 1
    other.close()


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "is not like s3://bucket/prefix?endpoint=https://host:port"),
        ("s3://minio:9000/blocks", "is not like s3://bucket/prefix"),
        ("s3://Blocks", "is not like"),
        ("s3://blocks/../x", "is not like"),
        ("s3://blocks/a//b", "is not like"),
        ("s3://blocks?endpoint=minio:9000", "endpoint=minio:9000 is not like https://host:port"),
        ("s3://blocks?endpoint=https://h/blocks", "is not like https://host:port"),
        ("s3://blocks?endpoint=http://minio:port", "is not like https://host:port"),
        ("s3://blocks?endpoint=http://minio:99999", "is not like https://host:port"),
        ("s3://blocks?endpoint=http://10.0.0.256", "is not like https://host:port"),
        ("s3://blocks?endpoint=http://h&cacert=/c", "cacert is for an endpoint with https://"),
        ("s3://[blocks", "is not a URL; write [ and ] as %5B and %5D"),
        ("s3://blocks?ttl=7d", "unknown option 'ttl', expected one of endpoint, region, cacert"),
        ("s3://key:swordfish@blocks", "takes credentials from AWS_ACCESS_KEY_ID"),
        ("s3://key:sword/fish@blocks", "takes credentials from AWS_ACCESS_KEY_ID"),
        ("s3://blocks?endpoint=http://key:swordfish@h", "takes credentials from AWS_ACCESS_KEY"),
    ],
)
def test_wrong_url_is_refused(url: str, said: str) -> None:
    require_s3()
    with pytest.raises(ConfigError, match="backing") as error:
        check(BackingOptions(url))
    assert said in str(error.value)
    assert "fish" not in str(error.value)


def test_endpoint_with_credentials_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_s3()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://key:swordfish@h")
    with pytest.raises(ConfigError, match="is not like https://host:port") as error:
        check(BackingOptions("s3://blocks"))
    assert "fish" not in str(error.value)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT"])
@pytest.mark.parametrize(
    "address",
    [
        "sts.local:443",
        "",
        "http://10.0.0.256",
        "http://10.0.0.256.",
        "http://[10.0.0.1]",
        "http://sts.0x4",
        "http://xn--a",
    ],
)
def test_wrong_address_of_credentials_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str
) -> None:
    """The client library panics at it, and may take the process with it."""
    require_s3()
    monkeypatch.setenv(name, address)
    with pytest.raises(ConfigError, match=f"{name} is not like https://host:port; correct or"):
        check(BackingOptions("s3://blocks"))
    monkeypatch.setenv(name, "http://10.0.0.255:80/")
    check(BackingOptions("s3://blocks"))


@pytest.mark.parametrize("more", [{"capacity_bytes": 1}, {"ttl_s": 60}])
def test_options_of_folders_are_refused(more: dict[str, int]) -> None:
    require_s3()
    with pytest.raises(ConfigError, match="a lifecycle rule of the bucket"):
        check(BackingOptions("s3://blocks", **more))


def test_url_with_everything_is_understood() -> None:
    require_s3()
    from vllm_tiered_kv.stores.s3.settings import S3Settings, parse_settings

    url = "s3://my.bucket/a/b?endpoint=https://[::1]:9000/&region=eu-west-1&cacert=/c"
    assert parse_settings(BackingOptions(url, timeout_s=10)) == S3Settings(
        "my.bucket", "a/b", "https://[::1]:9000", "eu-west-1", "/c", 9.0
    )
    assert parse_settings(BackingOptions("s3://blocks")).prefix == "tiered-kv"


@pytest.mark.parametrize(
    ("user", "bucket", "said"),
    [
        (READER, "blocks", "AccessDenied"),
        (("nobody", "hush"), "blocks", "InvalidAccessKeyId"),
        ((USER[0], "hush"), "blocks", "SignatureDoesNotMatch"),
        (USER, "no-such-bucket", "NoSuchBucket|AccessDenied"),
    ],
)
def test_service_that_refuses_is_a_clear_error(
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    user: tuple[str, str],
    bucket: str,
    said: str,
) -> None:
    use_credentials(monkeypatch, user)
    with pytest.raises(ConfigError, match=said) as error:
        open_s3(server.url(bucket=bucket))
    assert "need the rights s3:GetObject, " in str(error.value)
    assert not {*user, "hush"} & set(str(error.value).split())


def test_bucket_of_another_region_is_a_clear_error() -> None:
    """As AWS answers: without Location."""
    require_s3()
    body = b"<Error><Code>PermanentRedirect</Code><Message>Use that endpoint.</Message></Error>"
    head = f"HTTP/1.1 301 Moved Permanently\r\nContent-Length: {len(body)}\r\n"
    speaker = Speaker(head.encode() + b"Connection: close\r\n\r\n" + body)
    with pytest.raises(ConfigError, match="the bucket is in another region, set the option region"):
        open_s3(f"s3://blocks?endpoint=http://{speaker.address}")
    speaker.close()


def test_long_answer_is_not_logged_as_a_whole() -> None:
    require_s3()
    body = b"<Error><Code>AccessDenied</Code><Message>no\nE forged %s</Message>" % (b"x" * 5000)
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(body)}\r\n"
    speaker = Speaker(head.encode() + b"Connection: close\r\n\r\n" + body)
    with pytest.raises(ConfigError, match="AccessDenied: no \\(the cred") as error:
        open_s3(f"s3://blocks?endpoint=http://{speaker.address}")
    assert "forged" not in str(error.value)
    speaker.close()


def test_rights_that_are_lost_cost_misses_and_are_logged(
    server: S3Server,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_credentials(monkeypatch, (USER[0], "hush"))
    store = unchecked_s3(server.url(prefix))
    key = store_key("a")
    assert_lacks(store, key)
    assert store.is_absent
    assert store.put([item(key)]) == [PutResult.FAILED]
    assert "refuses this client" in caplog.text
    assert "hush" not in caplog.text


def test_tls_works_and_its_mistakes_are_clear_errors(tmp_path: Path, prefix: str) -> None:
    require_redis("openssl")
    make_certificates(tmp_path)
    keys = (f"-s3.cert.file={tmp_path}/server.crt", f"-s3.key.file={tmp_path}/server.key")
    with s3_server(*keys) as guarded:
        url = f"{guarded.url(prefix)}&cacert={tmp_path}/ca.crt".replace("localhost", "127.0.0.1")
        store = open_s3(url)
        key = store_key("a")
        assert store.put([item(key, 5000)]) == [PutResult.STORED]
        assert_holds(store, key, 5000)
        store.close()
        plain = url.replace("https:", "http:").partition("&")[0]
        for wrong, said in (
            (url.replace("ca.crt", "wrong.crt"), "TLS: InvalidCertificate: UnknownIssuer"),
            (url.replace("127.0.0.1", "localhost"), "TLS: InvalidCertificate: NotValidForName"),
            (url.partition("&")[0], "TLS: InvalidCertificate: UnknownIssuer"),
            (url.replace("ca.crt", "none.crt"), "No such file"),
            (url.replace("ca.crt", "ext"), "No certificates found"),
            (plain, "HTTP status 400 Bad Request"),
        ):
            with pytest.raises(ConfigError, match=said):
                open_s3(wrong)


def test_service_without_tls_is_a_clear_error_over_https(server: S3Server) -> None:
    with pytest.raises(ConfigError, match="TLS: InvalidMessage"):
        open_s3(server.url().replace("http:", "https:"))


# ---- a service that fails -----------------------------------------------------------------------


def test_absent_service_costs_misses_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_s3()
    caplog.set_level(logging.WARNING)
    late = S3Server(tmp_path)
    unanswered: list[None] = []
    store = open_s3(late.url(), on_unanswered=lambda: unanswered.append(None))
    unanswered.clear()  # of opening
    key = store_key("a")
    begin = time.monotonic()
    assert_lacks(store, key)
    assert store.put([item(key)]) == [PutResult.FAILED]
    assert store.describe([key]) == [None]
    with pytest.raises(NotDeletedError):
        store.delete([key])
    assert store.flush()
    assert time.monotonic() - begin < LATE_S
    assert store.is_absent
    assert unanswered
    assert store.failed_blocks == 1
    assert f"cannot reach the bucket blocks at {late.endpoint} (Connection refused" in caplog.text
    try:
        late.start()
        eventually(lambda: store.put([item(key)])[0] in KEPT)
        assert_holds(store, key, 4096)
        assert not store.is_absent
    finally:
        late.kill()
        store.close()


def test_killed_service_costs_misses_and_is_used_when_it_is_back() -> None:
    """Killed while blocks are read and written: no wrong byte, no hang."""
    with s3_server() as victim:
        store = open_s3(victim.url(), 1.0)
        keys = chain_keys("a", 20)
        eventually(lambda: set(store.put(chain_items(keys))) <= KEPT)
        traffic = Traffic(store)
        eventually(lambda: traffic.hits)
        victim.kill()
        eventually(lambda: store.is_absent)
        before = traffic.misses
        eventually(lambda: traffic.misses > before)
        victim.start()
        eventually(lambda: not store.is_absent)
        before = traffic.hits
        eventually(lambda: traffic.hits > before)
        traffic.end()
        assert traffic.wrong == []
        assert traffic.slowest_s < LATE_S
        assert traffic.failed
        eventually(lambda: set(store.put(chain_items(keys))) <= KEPT)
        for key in keys:
            assert_holds(store, key, 4096)
        store.close()


def test_hung_service_costs_a_deadline_and_then_nothing(server: S3Server, prefix: str) -> None:
    store = open_s3(server.url(prefix), 0.5)
    key = store_key("a")
    eventually(lambda: store.put([item(key)])[0] in KEPT)
    with server.frozen():
        begin = time.monotonic()
        for _ in range(4):
            assert read(store, key, 4096) is None
        assert store.is_absent
        assert time.monotonic() - begin < LATE_S
        begin = time.monotonic()
        for _ in range(50):
            assert store.contains([key]) == [False]
        assert time.monotonic() - begin < LATE_S, "the breaker is open"
    eventually(lambda: store.contains([key]) == [True])
    assert_holds(store, key, 4096)
    store.close()


def test_call_that_is_late_ends_and_touches_its_buffers_no_more(
    server: S3Server, prefix: str
) -> None:
    """It ends long before the library's own limit, which is that of a write."""
    store = open_s3(server.url(prefix), 3.0)
    keys = chain_keys("a", 40)
    eventually(lambda: set(store.put(chain_items(keys, MIB))) <= KEPT)
    with server.frozen():
        buffers = [bytearray(MIB) for _ in keys]
        begin = time.monotonic()
        assert store.get(keys, [memoryview(b) for b in buffers]) == [False] * len(keys)
        assert time.monotonic() - begin < LATE_S
        for buffer in buffers:
            buffer[:] = b"\xa5" * MIB
    eventually(lambda: store.match(keys) == len(keys))
    assert all(buffer == b"\xa5" * MIB for buffer in buffers)
    store.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"x" * 100_000, b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\nLast-Modified: x\r\n\r\nhello",
        b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    ],
)  # fmt: skip
def test_service_that_is_no_s3_is_a_miss_or_an_error(answer: bytes) -> None:
    require_s3()
    assert_refused_or_missing(
        answer, lambda address: open_s3(f"s3://blocks?endpoint=http://{address}", 0.5)
    )
