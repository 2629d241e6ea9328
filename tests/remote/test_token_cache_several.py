"""TokenCache over several daemons: one cache whose blocks are distributed among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import requests_of
from tests.remote.token_states import TOKEN_BYTES, read, store
from vllm_tiered_kv.api import TokenCache
from vllm_tiered_kv.api.chain_store import Run
from vllm_tiered_kv.core.key import BlockKey, RankTag


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[DaemonProcess]]:
    daemons = [DaemonProcess(tmp_path / str(n), "--memory", "64MiB") for n in range(3)]
    for one in daemons:
        one.folder.mkdir()
        one.start()
    yield daemons
    for one in daemons:
        one.end()


def chains(count: int, length: int) -> list[Sequence[int]]:
    return [range(1000 * n, 1000 * n + length) for n in range(1, count + 1)]


def open_all(addresses: Sequence[str]) -> TokenCache:
    return TokenCache.connect(addresses, "several", TOKEN_BYTES, timeout=20.0, connect_timeout=10.0)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_several_daemons_are_one_cache(three: list[DaemonProcess], kind: str) -> None:
    addresses = [one.endpoint if kind == "tcp" else one.ipc for one in three]
    many = chains(6, 600)  # placement splits each into ten runs
    with open_all(addresses) as cache:
        for tokens in many:
            assert store(cache, tokens) == len(tokens)
        before = [requests_of(one) for one in three]
        assert [cache.match(tokens) for tokens in many] == [600] * 6
        for one, then in zip(three, before, strict=True):
            asked = requests_of(one)["match"] - then.get("match", 0)
            assert 0 < asked <= 6, "once for each sequence at most"
    with open_all(addresses[::-1]) as again:
        assert [read(again, tokens) for tokens in many] == [600] * 6
        for place in (0, 63, 64, 65, 511, 512, 599):
            other = [*many[0][:place], 5, *many[0][place + 1 :]]
            assert (again.match(other), read(again, other)) == (place, place)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_match_ends_where_a_daemon_lost_its_share(three: list[DaemonProcess], kind: str) -> None:
    """Later blocks on other daemons are useless without the lost ones."""
    addresses = [one.endpoint if kind == "tcp" else one.ipc for one in three]
    with open_all(addresses) as cache:
        tokens = next(
            tokens
            for tokens in chains(200, 600)
            if len({server for *_, server in runs_of(cache, tokens)}) == 3
        )
        first_runs = {server: start for start, _, server in reversed(runs_of(cache, tokens))}
        for server, start in first_runs.items():
            assert store(cache, tokens) == len(tokens)
            one = three[addresses.index(str(server.address))]
            one.kill()
            one.restart()
            eventually(lambda server=server: server.match_all([b"x" * 17], [RankTag()]))
            assert (cache.match(tokens), read(cache, tokens)) == (start, start)


def test_match_ends_within_the_second_part_of_a_daemon(three: list[DaemonProcess]) -> None:
    """All parts of a daemon are requested at once, and counted in order."""
    with open_all([one.endpoint for one in three]) as cache:
        for tokens in chains(500, 150):
            keys, runs = keys_of(cache, tokens), runs_of(cache, tokens)
            if len(runs) == 3 and runs[0][2] is runs[2][2]:
                break
        assert store(cache, tokens) == len(tokens)
        for place in (149, 140, 128, 100, 64, 40):
            for server in {server for *_, server in runs}:
                server.delete(cache._chains._store_keys(keys[place : place + 1]))
            assert (cache.match(tokens), read(cache, tokens)) == (place, place)


def keys_of(cache: TokenCache, tokens: Sequence[int]) -> list[BlockKey]:
    return cache._keys.of((), tokens)


def runs_of(cache: TokenCache, tokens: Sequence[int]) -> list[Run]:
    return cache._chains._runs(keys_of(cache, tokens))


def test_missing_daemon_costs_only_its_share(
    three: list[DaemonProcess], caplog: pytest.LogCaptureFixture
) -> None:
    three[0].kill()
    many = chains(12, 20)
    with open_all([one.endpoint for one in three]) as cache:
        assert "continuing without it" in caplog.text
        # The breaker opens after a few failures and then admits a probe now and then.
        eventually(lambda: [store(cache, tokens) for tokens in many] == [20] * 12)
        eventually(lambda: [read(cache, tokens) for tokens in many] == [20] * 12)
