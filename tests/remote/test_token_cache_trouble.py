"""TokenCache while daemons are killed, stopped and restarted, and while many threads use it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.remote.engine import within
from tests.remote.token_states import read, states, store
from vllm_tiered_kv.api import TokenCache
from vllm_tiered_kv.errors import TokenCacheError
from vllm_tiered_kv.remote import local_daemon, shm_copy

TOKENS = list(range(40, 90))
TOKEN_BYTES = 24 << 10


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    ssd = ("--ssd", str(tmp_path / "ssd"), "--ssd-space", "64MiB")
    with DaemonProcess(tmp_path, "--memory", "64MiB", *ssd) as running:
        yield running


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, daemon: DaemonProcess) -> str:
    return daemon.endpoint if request.param == "tcp" else daemon.ipc


def opened(address: str, timeout: float = 20.0, strict: bool = False) -> TokenCache:
    return TokenCache.connect(
        address, "trouble", TOKEN_BYTES, timeout=timeout, connect_timeout=10.0, strict=strict
    )


@pytest.fixture
def cache(address: str) -> Iterator[TokenCache]:
    with opened(address) as open_one:
        yield open_one


def arenas_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("tiered-kv-arena")


@pytest.mark.parametrize("way", ["disk", "flush"])
def test_disk_durability_survives_a_restart(
    daemon: DaemonProcess, cache: TokenCache, way: str
) -> None:
    assert store(cache, TOKENS, "disk" if way == "disk" else "memory") == len(TOKENS)
    assert way == "disk" or cache.flush()
    daemon.kill()
    daemon.restart()
    assert eventually(lambda: cache.match(TOKENS)) == len(TOKENS)
    assert eventually(lambda: read(cache, TOKENS)) == len(TOKENS)
    assert leases_of(daemon) == 0


def test_disk_durability_without_a_disk_counts_nothing(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, "--memory", "64MiB") as daemon:
        for tokens, address in ((TOKENS, daemon.endpoint), (TOKENS[1:], daemon.ipc)):
            with opened(address) as cache:
                assert store(cache, tokens, "disk") == 0
                assert cache.match(tokens) == 0
            with opened(address, strict=True) as cache:
                with pytest.raises(TokenCacheError, match="this daemon has no disk"):
                    store(cache, tokens, "disk")
                assert store(cache, tokens) == read(cache, tokens) == len(tokens), "as ever"


def test_query_without_the_daemon_is_a_miss(
    daemon: DaemonProcess, cache: TokenCache, address: str
) -> None:
    store(cache, TOKENS)
    strict = opened(address, strict=True)
    assert read(strict, TOKENS) == len(TOKENS)
    daemon.kill()
    for _ in range(5):
        assert (cache.match(TOKENS), read(cache, TOKENS), store(cache, TOKENS)) == (0, 0, 0)
        assert not cache.flush()
        for call in (strict.match, lambda tokens: read(strict, tokens)):
            with pytest.raises(TokenCacheError, match=f"could not be used: {address}") as error:
                call(TOKENS)
            assert list(error.value.failures) == [address]
        with pytest.raises(TokenCacheError, match="could not be used"):
            store(strict, TOKENS)
        with pytest.raises(TokenCacheError, match="could not be used"):
            strict.flush()
    daemon.restart()
    new = [1, 2, 3]
    assert eventually(lambda: store(cache, new)) == 3
    assert read(cache, new) == 3
    strict.close()


def test_query_to_a_stopped_daemon_misses_within_the_deadline(
    daemon: DaemonProcess, address: str
) -> None:
    with opened(address, timeout=0.3) as cache:
        eventually(lambda: store(cache, TOKENS) == len(TOKENS))  # the first attempts may time out
        daemon.freeze()
        assert (cache.match(TOKENS), read(cache, TOKENS), store(cache, [1])) == (0, 0, 0)
        daemon.thaw()
        eventually(lambda: read(cache, TOKENS) == len(TOKENS))


def test_error_names_the_reason_of_this_failure(daemon: DaemonProcess, address: str) -> None:
    """It must not name the reason of an earlier failure, before the daemon started."""
    with opened(address, timeout=2.0, strict=True) as cache:

        def is_stored() -> bool:
            with contextlib.suppress(TokenCacheError):
                return store(cache, TOKENS) == len(TOKENS)
            return False

        eventually(is_stored)
        daemon.kill()
        with pytest.raises(TokenCacheError):
            cache.match(TOKENS)
        daemon.restart()
        eventually(is_stored)
        daemon.freeze()
        with pytest.raises(TokenCacheError, match="no answer in time"):
            store(cache, [1])


def test_repeated_kills_give_no_wrong_states(
    daemon: DaemonProcess, cache: TokenCache, address: str
) -> None:
    """All states that are read are right, no call raises, and the cache works again afterwards."""
    stop = threading.Event()
    wrong: list[BaseException] = []
    rounds = [0, 0, 0]

    def work(me: int) -> None:
        try:
            while not stop.is_set():
                tokens = [me, rounds[me] % 7, *TOKENS]
                store(cache, tokens)
                read(cache, tokens)
                assert cache.match(tokens) <= len(tokens)
                rounds[me] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        done = sum(rounds)
        eventually(lambda done=done: sum(rounds) > done + 3 or wrong)
        daemon.kill()
        done = sum(rounds)
        eventually(lambda done=done: sum(rounds) > done + 3 or wrong)
        daemon.restart()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    eventually(lambda: store(cache, [9, *TOKENS]) == len(TOKENS) + 1)
    eventually(lambda: read(cache, [9, *TOKENS]) == len(TOKENS) + 1)


def test_memory_of_a_dead_daemon_is_unmapped(daemon: DaemonProcess) -> None:
    """Also in an idle program: otherwise it alone would keep the memory allocated."""
    before = arenas_mapped()
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS)
        assert arenas_mapped() == before + 1
        daemon.kill()
        eventually(lambda: arenas_mapped() == before)
        daemon.restart()
        assert eventually(lambda: store(cache, TOKENS)) == len(TOKENS)
        assert read(cache, TOKENS) == len(TOKENS)
        assert arenas_mapped() == before + 1
    assert arenas_mapped() == before


def test_memory_stays_mapped_during_a_copy(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_daemon, "_MAINTAIN_EVERY_S", 0.01)
    before = arenas_mapped()
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS)
        (local,) = cache._chains._local_daemons.values()
        with local.reading() as memory:
            assert memory is not None
            daemon.kill()
            eventually(lambda: not memory.alive)
            assert read(cache, TOKENS) == 0
            threading.Event().wait(0.2)  # several rounds of the maintenance thread
            assert bytes(memory.arena.view(0, 8))
            assert arenas_mapped() == before + 1
        assert arenas_mapped() == before


def test_close_waits_for_copies(daemon: DaemonProcess) -> None:
    cache = opened(daemon.ipc)
    store(cache, TOKENS)
    (local,) = cache._chains._local_daemons.values()
    with local.reading() as memory:
        assert memory is not None
        closing = threading.Thread(target=cache.close)
        closing.start()
        eventually(lambda: local._is_closing)
        closing.join(0.5)
        assert closing.is_alive()
        assert not memory.closed
        with local.reading() as another:
            assert another is None, "nobody begins to copy any more"
    closing.join(60)
    assert not closing.is_alive()
    assert memory.closed


def test_late_leases_are_released_without_a_further_call(daemon: DaemonProcess) -> None:
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS)
        (local,) = cache._chains._local_daemons.values()
        daemon.freeze()
        with local.reading() as memory:
            assert memory is not None
            keys = cache._chains._store_keys(cache._keys.of((), TOKENS))
            assert not any(memory.lease(keys, deadline=within(0.3)).leases)
            assert not memory.is_settled
        daemon.thaw()
        eventually(lambda: memory.is_settled)
        assert leases_of(daemon) == 0


def test_blocks_that_cannot_be_leased_use_the_socket(daemon: DaemonProcess) -> None:
    """Another process may hold as many leases as the daemon grants."""
    with opened(daemon.ipc) as greedy, opened(daemon.ipc) as cache:
        many = list(range(1000, 2600))
        assert store(greedy, many) == len(many)
        assert store(cache, TOKENS) == len(TOKENS)
        (local,) = greedy._chains._local_daemons.values()
        with local.reading() as memory:
            assert memory is not None
            keys = greedy._chains._store_keys(greedy._keys.of((), many))
            lease = memory.lease(keys)
            held = sum(map(bool, lease.leases))
            assert held
            assert not any(memory.lease(keys[held:]).leases), "no more is leased"
            assert read(cache, TOKENS) == len(TOKENS)
            new = [1, *TOKENS]
            assert store(cache, new) == read(cache, new) == len(new)
            lease.release()


def test_close_during_calls_of_many_threads(address: str) -> None:
    cache = opened(address)
    ends: list[BaseException] = []
    rounds = [0] * 4

    def work(me: int) -> None:
        tokens = [me, *TOKENS]
        try:
            while True:
                store(cache, tokens)
                read(cache, tokens)
                rounds[me] += 1
        except BaseException as error:
            ends.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: min(rounds) > 2 or ends)
    cache.close()
    for thread in threads:
        thread.join(60)
    assert [str(end) for end in ends] == ["this cache is closed"] * 4


def test_blocks_evicted_between_two_requests_shorten_the_hit(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A strict cache, which raises on failures, does not count this as one."""
    with opened(address, strict=True) as cache:
        store(cache, TOKENS)
        chains = cache._chains
        asked = chains._match

        def match_and_lose(keys, runs, end):  # type: ignore[no-untyped-def]
            monkeypatch.undo()
            outcome = asked(keys, runs, end)
            runs[0][2].delete(chains._store_keys(keys[20:]))
            return outcome

        monkeypatch.setattr(chains, "_match", match_and_lose)
        into = np.zeros((len(TOKENS), TOKEN_BYTES), np.uint8)
        assert cache.query(TOKENS, into) == 20
        assert np.array_equal(into[:20], states((), TOKENS[:20], TOKEN_BYTES))


def test_blocks_that_change_during_a_copy_are_not_used(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shm_copy.scatter
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS)
        (local,) = cache._chains._local_daemons.values()
        keys = cache._chains._store_keys(cache._keys.of((), TOKENS))
        into = np.zeros((len(TOKENS), TOKEN_BYTES), np.uint8)
        with local.reading() as memory:
            assert memory is not None

            def copy_and_change(layout, block_ids, region, offsets):  # type: ignore[no-untyped-def]
                copy(layout, block_ids, region, offsets)
                memory.arena.next_generation(int(offsets[-1]))

            assert shm_copy.read_rows(memory, keys, into, within(20.0)) == len(TOKENS)
            monkeypatch.setattr(shm_copy, "scatter", copy_and_change)
            assert shm_copy.read_rows(memory, keys, into, within(20.0)) == 0
        assert read(cache, TOKENS) == len(TOKENS), "it is sent instead"
        assert leases_of(daemon) == 0


def test_only_leased_blocks_are_copied(daemon: DaemonProcess) -> None:
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS[:20])
        (local,) = cache._chains._local_daemons.values()
        keys = cache._chains._store_keys(cache._keys.of((), TOKENS))
        into = np.zeros((len(TOKENS), TOKEN_BYTES), np.uint8)
        with local.reading() as memory:
            assert memory is not None
            assert shm_copy.read_rows(memory, keys, into, within(20.0)) == 20
            assert np.array_equal(into[:20], states((), TOKENS[:20], TOKEN_BYTES))
            assert not into[20:].any()
            shorter = np.zeros((20, TOKEN_BYTES // 2), np.uint8)
            assert shm_copy.read_rows(memory, keys[:20], shorter, within(20.0)) == 0


def test_failed_fill_abandons_its_reservations(daemon: DaemonProcess) -> None:
    with opened(daemon.ipc) as cache:
        store(cache, TOKENS[:3])
        (local,) = cache._chains._local_daemons.values()
        blocks = [
            (key, None, TOKEN_BYTES)
            for key in cache._chains._store_keys(cache._keys.of((), TOKENS))
        ]

        def fail(places: object) -> None:
            raise ArithmeticError

        with local.reading() as memory:
            assert memory is not None
            with pytest.raises(ArithmeticError):
                shm_copy.write_blocks(memory, blocks, fail, within(20.0))
        assert leases_of(daemon) == 0
        assert store(cache, TOKENS) == read(cache, TOKENS) == len(TOKENS)
