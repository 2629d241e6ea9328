"""Lookups that lease: one request, offsets for every rank, and every lease is released."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of, requests_of
from tests.remote.engine import IDENTITY, NBYTES, block_keys, content, items, within
from vllm_tiered_kv.core.key import BlockKey, RankTag
from vllm_tiered_kv.core.store import PutResult, StoreKey, store_key
from vllm_tiered_kv.device.shared_arena import PAGE
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.remote import local_daemon, shared_memory
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.shared_memory import LeasedMatch, SharedMemory, _check_lookup
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.fields import pack_uints
from vllm_tiered_kv.wire.messages import Borrow, BorrowReply

RANKS = [RankTag(tp=0), RankTag(tp=1)]
CHAIN = block_keys("a chain", 6)
PATIENCE_S = 30.0


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[RemoteStore]:
    opened = open_store(daemon)
    fill(opened)
    yield opened
    opened.close()


@pytest.fixture
def local(store: RemoteStore) -> Iterator[LocalDaemon]:
    made = LocalDaemon(store)
    yield made
    made.close()


def open_store(daemon: DaemonProcess, timeout_s: float = 20.0) -> RemoteStore:
    return RemoteStore(daemon.ipc, IDENTITY, timeout_s=timeout_s, connect_timeout_s=10.0)


def of_rank(rank: RankTag, chain: Sequence[BlockKey] = CHAIN) -> list[StoreKey]:
    return [store_key(IDENTITY.namespace, key, rank) for key in chain]


def fill(store: RemoteStore) -> None:
    for rank in RANKS:
        assert set(store.put(items(of_rank(rank)))) == {PutResult.STORED}


def ask(
    local: LocalDaemon, chain: Sequence[BlockKey] = CHAIN, seconds: float = 20.0
) -> LeasedMatch:
    match = local.lookup(chain, RANKS, NBYTES, within(20.0))
    assert match is not None
    return match


def test_another_process_reads_leased_blocks(daemon: DaemonProcess, local: LocalDaemon) -> None:
    worker = open_store(daemon)
    memory = worker.attach()
    assert memory is not None
    match = ask(local, [*CHAIN, *block_keys("others", 2)])
    assert match.count == match.lease.blocks == 6  # type: ignore[union-attr]
    lease = match.lease
    assert lease is not None
    assert lease.arena_id == memory.arena_id
    assert leases_of(daemon) == 12
    for row, rank in enumerate(RANKS):
        read = [bytes(memory.arena.view(offset, NBYTES)) for offset in lease.offsets[row].tolist()]
        assert read == [content(key) for key in of_rank(rank)]
        assert memory.arena.have_generations(lease.offsets[row], lease.generations[row])
    lease.release()
    lease.release()
    eventually(lambda: leases_of(daemon) == 0)
    assert not any(memory._lookup_leases for memory in local._mapped if memory.alive)
    worker.close()


def test_lookup_is_one_request(
    daemon: DaemonProcess, store: RemoteStore, local: LocalDaemon
) -> None:
    ask(local).lease.release()  # type: ignore[union-attr]
    before = requests_of(daemon)
    ask(local)
    after = requests_of(daemon)
    assert after["borrow"] - before["borrow"] == 1
    assert (after.get("match"), after.get("lend")) == (before.get("match"), before.get("lend"))


def test_lookup_with_invalid_offsets_releases_its_lease(
    daemon: DaemonProcess, local: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(reply: BorrowReply, request: Borrow, capacity: int) -> None:
        raise ConnectionLost("the daemon named a place outside its memory")

    ask(local).lease.release()  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_check_lookup", refuse)
        match = ask(local)
        assert (match.count, match.lease) == (6, None), "it is an ordinary match"
    eventually(lambda: leases_of(daemon) == 0)
    assert ask(local).lease is not None


def test_lookup_counts_blocks_beyond_the_lease_limit(
    daemon: DaemonProcess, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_daemon, "_CLOSING_S", PATIENCE_S)
    chain = block_keys("long", 60)
    for rank in RANKS:
        assert set(store.put(items(of_rank(rank, chain)))) == {PutResult.STORED}
    local = LocalDaemon(store)
    match = ask(local, chain)
    assert match.count == 60
    assert match.lease is not None
    assert match.lease.blocks == (4 << 20) // NBYTES // 2  # a quarter of the memory, two ranks
    second = ask(local, chain)
    assert (second.count, second.lease) == (60, None)
    match.lease.release()
    eventually(lambda: ask_and_release(local, chain) > 0)
    local.close()
    assert leases_of(daemon) == 0


def ask_and_release(local: LocalDaemon, chain: Sequence[BlockKey]) -> int:
    lease = ask(local, chain).lease
    if lease is None:
        return 0
    lease.release()
    return lease.blocks


def test_late_lookup_lease_is_released(daemon: DaemonProcess) -> None:
    patient = open_store(daemon)
    fill(patient)
    patient.close()
    store = open_store(daemon, timeout_s=2.0)
    local = LocalDaemon(store)
    ask(local).lease.release()  # type: ignore[union-attr]
    eventually(lambda: leases_of(daemon) == 0)
    memory = local.current
    assert memory is not None
    # Otherwise the thread that released it may hold the connection, and nothing is sent.
    eventually(lambda: memory.is_settled and not memory._lock.locked())
    daemon.freeze()
    assert local.lookup(CHAIN, RANKS, NBYTES, within(1.0)) is None
    daemon.thaw()
    eventually(lambda: requests_of(daemon)["borrow"] == 2)
    eventually(lambda: leases_of(daemon) == 0)
    assert not any(memory._lookup_leases for memory in local._mapped if memory.alive)
    local.close()
    store.close()


def test_release_to_a_stopped_daemon_is_retried(daemon: DaemonProcess) -> None:
    store = open_store(daemon)
    fill(store)
    local = LocalDaemon(store)
    leases = [ask(local, CHAIN[: n + 1]).lease for n in range(3)]
    assert local.current is not None
    local.current._timeout = 0.3
    daemon.freeze()
    for lease in leases:
        assert lease is not None
        lease.release()
    time.sleep(1.0)  # so that a release fails before one succeeds
    daemon.thaw()
    eventually(lambda: leases_of(daemon) == 0)
    local.close()
    store.close()


def test_close_releases_all_leases(
    daemon: DaemonProcess, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_daemon, "_CLOSING_S", PATIENCE_S)
    local = LocalDaemon(store)
    for n in range(1, 4):
        ask(local, CHAIN[:n])
    assert leases_of(daemon) == 12
    local.close()
    assert leases_of(daemon) == 0


def test_restarted_daemon_leases_new_memory(
    daemon: DaemonProcess, store: RemoteStore, local: LocalDaemon
) -> None:
    before = ask(local).lease
    assert before is not None
    daemon.kill()
    gone = local.lookup(CHAIN, RANKS, NBYTES, within(1.0))
    assert gone is None or not gone.count
    daemon.restart()
    eventually(lambda: set(store.put(items(of_rank(RANKS[0])))) == {PutResult.STORED})
    fill_again = items(of_rank(RANKS[1]))
    eventually(lambda: PutResult.FAILED not in store.put(fill_again))
    found: list[LeasedMatch] = []

    def leases_again() -> bool:
        match = local.lookup(CHAIN, RANKS, NBYTES, within(5.0))
        if match is not None and match.lease is not None:
            found.append(match)
        return bool(found)

    eventually(leases_again)
    (match,) = found
    assert match.count == 6
    assert match.lease is not None
    assert match.lease.arena_id != before.arena_id
    before.release()  # a dead daemon's lease: must not end a lease of the new one
    time.sleep(0.2)
    assert leases_of(daemon) == 12


_OLD_DAEMON = """
from vllm_tiered_kv.server import cli, daemon
from vllm_tiered_kv.wire import codec

daemon.ARENA_CAPABILITIES = ("shared_memory",)
del codec.REQUESTS["borrow"]
raise SystemExit(cli.main())
"""


def test_daemon_without_lookup_leases_gets_a_match(folder: Path) -> None:
    daemon = DaemonProcess(folder, "--memory", "16MiB")
    daemon.program = ["-c", textwrap.dedent(_OLD_DAEMON)]
    with daemon:
        store = open_store(daemon)
        fill(store)
        local = LocalDaemon(store)
        for _ in range(3):
            match = ask(local)
            assert (match.count, match.lease) == (6, None)
        seen = requests_of(daemon)
        assert seen["match"] == 3
        assert "borrow" not in seen
        local.close()
        store.close()


def test_many_threads_lease_and_release(daemon: DaemonProcess, local: LocalDaemon) -> None:
    counts: list[int] = []

    def work(seed: int) -> None:
        for n in range(20):
            match = ask(local, CHAIN[: 1 + (seed + n) % 6])
            counts.append(match.count - 1 - (seed + n) % 6)
            if match.lease is not None:
                match.lease.release()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [0] * 120
    eventually(lambda: leases_of(daemon) == 0)


_ENGINE = """
    import sys, time
    from tests.remote.engine import IDENTITY, NBYTES
    from tests.remote.test_lookup_leases import CHAIN, RANKS
    from vllm_tiered_kv.remote.local_daemon import LocalDaemon
    from vllm_tiered_kv.remote.store import RemoteStore
    local = LocalDaemon(RemoteStore(sys.argv[1], IDENTITY, timeout_s=20.0))
    print(local.lookup(CHAIN, RANKS, NBYTES, time.monotonic() + 20).lease.blocks, flush=True)
    time.sleep(600)
"""


def test_killed_scheduler_leaves_no_lease(daemon: DaemonProcess, store: RemoteStore) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_ENGINE), daemon.ipc],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "6"
        assert leases_of(daemon) == 12
    finally:
        process.kill()
        process.wait()
    eventually(lambda: leases_of(daemon) == 0)


@pytest.mark.parametrize(
    ("count", "lent", "offsets"),
    [
        (3, 0, []),
        (2, 2, [0, PAGE]),
        (1, 1, [0, PAGE, 2 * PAGE]),
        (1, 1, [0, 1]),
        (1, 1, [0, 16 * PAGE]),
        (1, 1, [0, 2**64 - PAGE]),
    ],
    ids=["too many", "places missing", "places too many", "between", "beyond", "far beyond"],
)
def test_check_lookup_invalid_offsets_raise(count: int, lent: int, offsets: list[int]) -> None:
    request = Borrow(17, [bytes(17)] * 2, [b"\0", b"\1"], PAGE)
    reply = BorrowReply(
        count, [count, 0, 0], lent, int(bool(lent)), pack_uints(offsets), pack_uints(offsets)
    )
    with pytest.raises(ConnectionLost):
        _check_lookup(reply, request, 16 * PAGE)


def test_check_lookup_valid_offsets_pass() -> None:
    request = Borrow(17, [bytes(17)] * 2, [b"\0", b"\1"], PAGE)
    places = pack_uints([0, 15 * PAGE])
    _check_lookup(BorrowReply(2, [2, 0, 0], 1, 5, places, places), request, 16 * PAGE)


def mapped_arenas() -> int:
    return sum("tiered-kv-arena" in line for line in Path("/proc/self/maps").open())


@pytest.mark.parametrize("asks", [True, False], ids=["asked-again", "idle"])
def test_memory_of_a_dead_daemon_is_unmapped(
    daemon: DaemonProcess, local: LocalDaemon, asks: bool
) -> None:
    """While it is mapped, the kernel cannot free the memory of the dead daemon."""
    before = mapped_arenas()
    lease = ask(local).lease
    assert lease is not None
    lease.release()  # wakes the thread, which does the rest
    assert mapped_arenas() == before + 1
    daemon.kill()

    def is_given_up() -> bool:
        if asks:
            local.lookup(CHAIN, RANKS, NBYTES, within(0.3))
        return mapped_arenas() == before

    eventually(is_given_up)


def test_memory_attached_by_another_thread_is_unmapped_after_the_daemons_death(
    daemon: DaemonProcess, store: RemoteStore, local: LocalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may attach to a dead daemon's memory while a second attaches to the new one's."""
    attach = store.attach
    first = attach()
    assert first is not None
    daemon.kill()
    daemon.restart()
    eventually(lambda: not first.alive)

    def attach_as_the_second(
        on_unsettled: Callable[[], None], on_unmap: Callable[[SharedMemory], None]
    ) -> SharedMemory | None:
        local._mapped = [first]
        return attach(on_unsettled, on_unmap)

    with monkeypatch.context() as patch:
        patch.setattr(store, "attach", attach_as_the_second)
        eventually(local.attach)
    eventually(lambda: first.closed)
    assert local.current not in (None, first)


def test_lookup_past_its_deadline_sends_nothing(
    daemon: DaemonProcess, store: RemoteStore, local: LocalDaemon
) -> None:
    """Under load a call may wait for a thread past its deadline: no failure of the daemon."""
    ask(local).lease.release()  # type: ignore[union-attr]
    before = requests_of(daemon)["borrow"]
    for _ in range(10):
        assert local.lookup(CHAIN, RANKS, NBYTES, within(-1.0)) is None
    assert store.breaker.is_up
    assert requests_of(daemon)["borrow"] == before
    assert ask(local).lease is not None
