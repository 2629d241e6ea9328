"""TokenCache over a real daemon: matches, keys, buffers, namespaces, and refused calls."""

from __future__ import annotations

import array
import ctypes
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.key_chain import extend_chain
from tests.remote.daemon_facts import leases_of, requests_of
from tests.remote.token_states import TOKEN_BYTES, read, states, store
from vllm_tiered_kv.api import TokenCache
from vllm_tiered_kv.api.token_keys import TokenKeys
from vllm_tiered_kv.core.key import (
    Fingerprint,
    root_digest,
)
from vllm_tiered_kv.errors import ConfigError, TokenCacheError
from vllm_tiered_kv.server.net.curve import write_key_pair

ROOT = Path(__file__).parents[2]
TOKENS = [7, 0, 2**32 - 1, 5, 5, 5, 11, 90_000, 3, 1]
_names = map("cache {}".format, itertools.count())

Open = Callable[..., TokenCache]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("d"), "--memory", "128MiB") as running:
        yield running


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, daemon: DaemonProcess) -> str:
    return daemon.endpoint if request.param == "tcp" else daemon.ipc


@pytest.fixture
def open_cache(address: str) -> Iterator[Open]:
    """Opens caches, each in its own namespace by default, and closes them after the test."""
    opened: list[TokenCache] = []

    def open_one(namespace: str | None = None, **more: Any) -> TokenCache:
        more = {"token_bytes": TOKEN_BYTES, "timeout": 20.0, "connect_timeout": 10.0, **more}
        cache = TokenCache.connect(more.pop("servers", address), namespace or next(_names), **more)
        opened.append(cache)
        return cache

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache: Open) -> TokenCache:
    return open_cache()


# ---- what is found ------------------------------------------------------------------------------


def test_query_returns_stored_states(cache: TokenCache) -> None:
    assert (cache.match(TOKENS), read(cache, TOKENS)) == (0, 0)
    assert store(cache, TOKENS) == len(TOKENS)
    assert (cache.match(TOKENS), read(cache, TOKENS)) == (len(TOKENS), len(TOKENS))


@pytest.mark.parametrize("place", range(len(TOKENS)))
def test_match_ends_at_the_first_different_token(cache: TokenCache, place: int) -> None:
    store(cache, TOKENS)
    other = [*TOKENS[:place], TOKENS[place] ^ 1, *TOKENS[place + 1 :]]
    assert (cache.match(other), read(cache, other)) == (place, place)


def test_query_longer_or_shorter_than_stored_matches_the_prefix(cache: TokenCache) -> None:
    store(cache, TOKENS)
    for count in range(len(TOKENS) + 1):
        assert (cache.match(TOKENS[:count]), read(cache, TOKENS[:count])) == (count, count)
    longer = [*TOKENS, 1, 2, 3]
    assert (cache.match(longer), read(cache, longer)) == (len(TOKENS), len(TOKENS))
    assert cache.match(TOKENS[1:]) == 0, "no token is known by itself"


def test_branches_share_their_prefix(cache: TokenCache) -> None:
    store(cache, TOKENS)
    for branch in ([1, 2], [1, 3], [4]):
        assert cache.update(TOKENS, branch, states(TOKENS, branch)) == len(branch)
    for branch in ([1, 2], [1, 3], [4]):
        assert read(cache, [*TOKENS, *branch]) == len(TOKENS) + len(branch)
    assert read(cache, [*TOKENS, 1, 4]) == len(TOKENS) + 1


def test_update_behind_a_stored_prefix_is_found(cache: TokenCache) -> None:
    head, tail = TOKENS[:4], TOKENS[4:]
    assert cache.update(head, tail, states(head, tail)) == len(tail)
    assert (cache.match(TOKENS), read(cache, TOKENS)) == (0, 0)
    store(cache, head)
    assert read(cache, TOKENS) == len(TOKENS)


def test_update_counts_and_keeps_stored_tokens(cache: TokenCache) -> None:
    store(cache, TOKENS[:4])
    other = bytes(4 * TOKEN_BYTES) + states(TOKENS[:4], TOKENS[4:]).tobytes()
    assert cache.update(None, TOKENS, other) == len(TOKENS)
    assert read(cache, TOKENS) == len(TOKENS), "with the state that was stored first"


def test_empty_token_list_matches_nothing(cache: TokenCache) -> None:
    assert cache.match([]) == cache.query([], bytearray()) == cache.update(None, [], b"") == 0
    assert cache.update([], np.array([]), b"") == 0
    assert cache.flush()


def test_namespaces_share_nothing(open_cache: Open) -> None:
    one, other = open_cache(), open_cache()
    store(one, TOKENS)
    assert other.match(TOKENS) == 0


def test_eviction_takes_the_end_first(
    open_cache: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["address"]
    with DaemonProcess(tmp_path, "--memory", "16MiB") as small:
        cache = open_cache(
            servers=small.endpoint if kind == "tcp" else small.ipc, token_bytes=32 << 10
        )
        tokens = list(range(1000))
        held = store(cache, tokens)
        assert 100 < held < len(tokens)
        assert cache.match(tokens) == read(cache, tokens) == held
        assert leases_of(small) == 0
        cache.close()


# ---- chunks -------------------------------------------------------------------------------------


def test_update_stores_whole_chunks_only(open_cache: Open) -> None:
    cache = open_cache(chunk_tokens=4)
    assert store(cache, TOKENS[:3]) == 0
    assert store(cache, TOKENS) == 8
    for count, held in ((10, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0)):
        assert (cache.match(TOKENS[:count]), read(cache, TOKENS[:count])) == (held, held)
    other = [*TOKENS[:5], 6, *TOKENS[6:]]
    assert (cache.match(other), read(cache, other)) == (4, 4)
    rest = [*TOKENS[8:], 4, 4, 4]
    assert cache.update(TOKENS[:8], rest, states(TOKENS[:8], rest)) == 4
    assert read(cache, [*TOKENS[:8], *rest]) == 12


def test_query_leaves_the_incomplete_chunk_untouched(open_cache: Open) -> None:
    cache = open_cache(chunk_tokens=4)
    store(cache, TOKENS)
    into = np.full((10, TOKEN_BYTES), 77, np.uint8)
    assert cache.query(TOKENS, into) == 8
    assert (into[8:] == 77).all()


def test_prefix_with_an_incomplete_chunk_raises(open_cache: Open) -> None:
    cache = open_cache(chunk_tokens=4)
    with pytest.raises(ValueError, match="prefix: 3 tokens are not whole chunks of 4"):
        cache.update(TOKENS[:3], TOKENS[3:], states(TOKENS[:3], TOKENS[3:]))


# ---- keys ---------------------------------------------------------------------------------------


def test_keys_match_the_reference_in_their_own_namespace() -> None:
    keys = TokenKeys("a name", 96, 2)
    root = root_digest(keys.namespace, (96, 2))
    assert keys.of((), TOKENS) == extend_chain(root, TOKENS, 2)[0]
    assert keys.of(TOKENS[:4], np.array(TOKENS[4:])) == keys.of((), TOKENS)
    engine = Fingerprint("a name", "", "", "", "", "", "", (2,), ((),)).namespace()
    assert keys.namespace != engine
    others = [TokenKeys("a name", 48, 2), TokenKeys("a name", 96, 1), TokenKeys("A name", 96, 2)]
    for other in others:
        assert not set(other.of((), TOKENS)) & set(keys.of((), TOKENS))
    assert [other.namespace == keys.namespace for other in others] == [True, True, False]


# ---- memory -------------------------------------------------------------------------------------


def numpy_like(nbytes: int) -> Any:
    return np.zeros(nbytes // 2, np.float16).reshape(len(TOKENS), 2, -1)


def torch_like(nbytes: int) -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros(nbytes // 2, dtype=torch.bfloat16).view(torch.uint8).numpy()


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda nbytes: memoryview(bytearray(nbytes)),
        lambda nbytes: array.array("I", bytes(nbytes)),
        lambda nbytes: (ctypes.c_char * nbytes)(),
        numpy_like,
        torch_like,
    ],
    ids=["bytearray", "memoryview", "array", "ctypes", "numpy", "torch"],
)
def test_any_buffer_type_is_accepted(cache: TokenCache, make: Callable[[int], Any]) -> None:
    expected = states((), TOKENS).tobytes()
    state = make(len(expected))
    memoryview(state).cast("B")[:] = expected
    assert cache.update((), tuple(TOKENS), state) == len(TOKENS)
    into = make(len(expected))
    assert cache.query(np.array(TOKENS, np.int64), into) == len(TOKENS)
    assert bytes(memoryview(into).cast("B")) == expected


def test_odd_sizes_at_odd_addresses_are_stored(open_cache: Open) -> None:
    cache = open_cache(token_bytes=7, chunk_tokens=3)
    state = states((), TOKENS, 7).tobytes()
    assert cache.update(None, TOKENS, memoryview(b"x" + state)[1:]) == 9
    into = bytearray(len(state) + 2)
    assert cache.query(TOKENS, memoryview(into)[1:-1]) == 9
    assert into == b"\0" + state[: 9 * 7] + bytes(7 + 1)


def test_buffer_may_change_after_update(cache: TokenCache) -> None:
    state = states((), TOKENS)
    cache.update(None, TOKENS, state)
    state[:] = 0
    assert read(cache, TOKENS) == len(TOKENS)


BAD_CALLS: list[tuple[Callable[[TokenCache], object], type[Exception], str]] = [
    (lambda c: c.match([1, -1]), ValueError, r"tokens\[1\]: -1 is not in \[0, 2\*\*32\)"),
    (lambda c: c.match([1, 2**32]), ValueError, r"tokens\[1\]: 4294967296 is not in"),
    (lambda c: c.match([1, 2.0]), ValueError, r"tokens\[1\]: not an integer"),  # type: ignore[list-item]
    (lambda c: c.match("ab"), ValueError, "not an integer"),  # type: ignore[arg-type]
    (lambda c: c.match(np.ones((2, 2), np.int64)), ValueError, "tokens: 2 dimensions"),
    (lambda c: c.match(np.ones(2)), ValueError, "tokens: items of format 'd'"),  # type: ignore[arg-type]
    (lambda c: c.match(None), TypeError, "NoneType"),  # type: ignore[arg-type]
    (lambda c: c.query([1, 2], bytearray(5)), ValueError, "into: 5 bytes, but 2 tokens of 96"),
    (lambda c: c.query([1], bytes(96)), ValueError, "into: the memory is read-only"),
    (lambda c: c.query([1], [0] * 96), TypeError, "into: list is not memory"),  # type: ignore[arg-type]
    (lambda c: c.query([1], np.zeros(192, "u1")[::2]), ValueError, "into: the memory is not cont"),
    (lambda c: c.update(None, [1], b"x"), ValueError, "state: 1 bytes, but 1 tokens of 96 bytes"),
    (lambda c: c.update([-1], [1], bytes(96)), ValueError, r"prefix\[0\]: -1 is not in"),
    (lambda c: c.update(None, [1], bytes(96), "tape"), ValueError, "durability: expected one of"),
]


@pytest.mark.parametrize(("call", "kind", "text"), BAD_CALLS, ids=[case[2] for case in BAD_CALLS])
def test_invalid_call_raises_with_the_reason(
    cache: TokenCache, call: Callable[[TokenCache], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        call(cache)


def test_invalid_token_in_an_incomplete_chunk_raises(open_cache: Open) -> None:
    with pytest.raises(ValueError, match=r"tokens\[5\]: -3 is not in"):
        open_cache(chunk_tokens=4).match([1, 2, 3, 4, 5, -3])


def test_closed_cache_raises(cache: TokenCache) -> None:
    with cache as same:
        assert same is cache
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache.match(TOKENS)


# ---- daemons ------------------------------------------------------------------------------------


def test_long_query_needs_few_requests(daemon: DaemonProcess, open_cache: Open) -> None:
    cache = open_cache(token_bytes=16)
    tokens = np.random.default_rng(1).integers(0, 1 << 32, 10_000)
    state = np.random.default_rng(2).integers(0, 256, (len(tokens), 16), np.uint8)
    assert cache.update(None, tokens, state) == len(tokens)
    into = np.zeros_like(state)
    before = requests_of(daemon)
    assert cache.match(tokens) == len(tokens)
    assert cache.query(tokens, into) == len(tokens)
    assert np.array_equal(into, state)
    after = requests_of(daemon)
    asked = {verb: after[verb] - before.get(verb, 0) for verb in after}
    assert asked["match"] == 2
    assert asked.get("get", 0) + asked.get("lend", 0) <= 10
    assert leases_of(daemon) == 0


def test_local_daemon_blocks_use_shared_memory(daemon: DaemonProcess) -> None:
    with TokenCache.connect(daemon.ipc, next(_names), TOKEN_BYTES, timeout=20.0) as cache:
        before = requests_of(daemon)
        assert store(cache, TOKENS) == read(cache, TOKENS) == len(TOKENS)
        after = requests_of(daemon)
        for verb, count in (("get", 0), ("put", 0), ("reserve", 1), ("lend", 1)):
            assert after.get(verb, 0) - before.get(verb, 0) == count, verb


OTHER_PROCESS = """
    import sys
    sys.modules["torch"] = sys.modules["vllm"] = None  # neither is needed
    from tests.remote.token_states import TOKEN_BYTES, read, store
    from vllm_tiered_kv.api import TokenCache

    address, name, mine, others = sys.argv[1:]
    with TokenCache.connect(address, name, TOKEN_BYTES, timeout=20.0) as cache:
        assert read(cache, eval(others)) == len(eval(others))
        assert store(cache, eval(mine)) == len(eval(mine))
"""


def test_two_processes_share_one_cache(daemon: DaemonProcess, open_cache: Open) -> None:
    """One process uses TCP, the other ipc."""
    name = next(_names)
    mine, others = TOKENS, [*TOKENS[:5], 8, 8, 8]
    here = open_cache(name)
    store(here, mine)
    for address in (daemon.endpoint, daemon.ipc):
        program = [sys.executable, "-c", textwrap.dedent(OTHER_PROCESS)]
        arguments = [address, name, str(others), str(mine)]
        subprocess.run([*program, *arguments], cwd=ROOT, check=True, timeout=120)
        assert read(here, others) == len(others)
        others = [*others, 9]


def test_program_without_close_exits(daemon: DaemonProcess) -> None:
    program = f"""
        from tests.remote.token_states import read, store
        from vllm_tiered_kv.api import TokenCache
        caches = [TokenCache.connect(a, "left open", 96) for a in {[daemon.endpoint, daemon.ipc]}]
        assert [store(cache, [1, 2]) for cache in caches] == [2, 2]
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("changed", [{"token_bytes": 2 * TOKEN_BYTES}, {"chunk_tokens": 2}])
def test_namespace_with_other_sizes_is_refused(open_cache: Open, changed: dict[str, int]) -> None:
    store(open_cache("a shape"), TOKENS)
    with pytest.raises(
        TokenCacheError, match=r"a daemon refuses namespace 'a shape': .* is known with"
    ):
        open_cache("a shape", **changed)
    assert read(open_cache("a shape"), TOKENS) == len(TOKENS)


def test_chunk_larger_than_the_daemon_is_refused(open_cache: Open) -> None:
    with pytest.raises(TokenCacheError, match="refuses namespace"):
        open_cache(token_bytes=1 << 20, chunk_tokens=64)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"servers": []}, "servers: expected at least one address"),
    ({"servers": "localhost:9527"}, "servers: 'localhost:9527' is not an address"),
    ({"servers": ["tcp://a:1", "tcp://A:1"]}, "servers: the addresses are not distinct"),
    ({"servers": [7]}, "servers: expected an address"),
    ({"namespace": ""}, "namespace: expected a name, got ''"),
    ({"namespace": "\ud800"}, "namespace: expected a name, got '\\ud800'"),
    ({"token_bytes": 0}, "token_bytes: expected a whole number of at least 1, got 0"),
    ({"token_bytes": 1.5}, "token_bytes: expected a whole number"),
    ({"chunk_tokens": True}, "chunk_tokens: expected a whole number"),
    ({"chunk_tokens": 1 << 30}, "chunk_tokens: 1073741824 tokens of 96 bytes exceed"),
    ({"timeout": 0}, "timeout: expected seconds, up to 604800, got 0"),
    ({"connect_timeout": float("nan")}, "connect_timeout: expected seconds"),
    ({"connect_timeout": 1e7}, "connect_timeout: expected seconds, up to 604800, got 10000000.0"),
    ({"timeout": 1e10}, "timeout: expected seconds, up to 604800"),
    ({"client_key": "x"}, "server_key: set both client_key and server_key"),
    ({"client_key": "/no/x", "server_key": "/no/y"}, "/no/x: cannot be read"),
]


@pytest.mark.parametrize(("settings", "text"), BAD_SETTINGS, ids=[case[1] for case in BAD_SETTINGS])
def test_invalid_settings_raise_with_the_reason(settings: dict[str, Any], text: str) -> None:
    good = {"servers": "tcp://127.0.0.1:1", "namespace": "x", "token_bytes": TOKEN_BYTES}
    with pytest.raises(ConfigError, match=re.escape(text)):
        TokenCache.connect(**{**good, **settings})


@pytest.mark.parametrize("nowhere", ["tcp://127.0.0.1:1", "ipc:///nowhere/kv.sock"])
def test_connect_without_a_daemon_raises(nowhere: str) -> None:
    with pytest.raises(TokenCacheError, match=f"no daemon answers: {nowhere} .nothing listens"):
        TokenCache.connect(nowhere, "x", TOKEN_BYTES)


# ---- keys of clients ----------------------------------------------------------------------------


def test_curve_keys_grant_write_or_read_access(tmp_path: Path) -> None:
    write_key_pair(tmp_path, "server", read_only=False)
    write_key_pair(tmp_path / "clients", "writer", read_only=False)
    write_key_pair(tmp_path / "clients", "reader", read_only=True)
    write_key_pair(tmp_path / "others", "stranger", read_only=False)
    secret, clients = tmp_path / "server.key_secret", tmp_path / "clients"

    def opened(who: str | None, **more: Any) -> TokenCache:
        keys: dict[str, Any] = {}
        if who is not None:
            mine = next(tmp_path.glob(f"*/{who}.key_secret"))
            keys = {"client_key": str(mine), "server_key": tmp_path / "server.key"}
        return TokenCache.connect(daemon.endpoint, "x", TOKEN_BYTES, **keys, **more)

    with DaemonProcess(
        tmp_path, "--memory", "64MiB", "--secret-key", str(secret), "--clients", str(clients)
    ) as daemon:
        with opened("writer", timeout=20.0) as writer:
            assert store(writer, TOKENS) == len(TOKENS)
        with opened("reader", timeout=20.0) as reader:
            assert read(reader, TOKENS) == len(TOKENS)
            assert store(reader, [1, 2]) == 0
        with opened("reader", timeout=20.0, strict=True) as strict:
            with pytest.raises(TokenCacheError, match="read_only"):
                store(strict, [1, 2])
            assert strict.match(TOKENS) == len(TOKENS)
        for who in ("stranger", None):
            with pytest.raises(TokenCacheError, match=r"refuses|no daemon answers"):
                opened(who)
