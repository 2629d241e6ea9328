"""Shared memory of a daemon on this host: leases, writes, and the death of either process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from tests.remote.engine import (
    IDENTITY,
    NBYTES,
    buffers,
    content,
    items,
    keys,
    within,
)
from tests.soak.footprint import Footprint
from vllm_tiered_kv.core.breaker import Attempt, Breaker, BreakerState
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.remote import shared_memory
from vllm_tiered_kv.remote.connection import Connection
from vllm_tiered_kv.remote.shared_memory import BlockLease, Reservation, SharedMemory
from vllm_tiered_kv.remote.store import RemoteStore

MEMORY = 16 << 20
CHAIN = keys("chain", 6)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", str(MEMORY)) as running:
        yield running


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[RemoteStore]:
    opened = RemoteStore(daemon.ipc, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    assert set(opened.put(items(CHAIN))) == {PutResult.STORED}
    yield opened
    opened.close()


@pytest.fixture
def memory(store: RemoteStore) -> SharedMemory:
    attached = store.attach()
    assert attached is not None
    return attached


def leased_bytes(memory: SharedMemory, lease: BlockLease, count: int | None = None) -> list[bytes]:
    """Returns the bytes of the first leased blocks."""
    places = list(zip(lease.offsets, lease.lengths, strict=True))[:count]
    return [bytes(memory.arena.view(offset, nbytes)) for offset, nbytes in places]


def still_valid(memory: SharedMemory, lease: BlockLease) -> list[bool]:
    facts = zip(lease.leases, lease.offsets, lease.generations, strict=True)
    return [bool(n) and memory.arena.generation(place) == gen for n, place, gen in facts]


def reserved(memory: SharedMemory, name: str, count: int) -> list[Reservation]:
    wanted = [(key, None, NBYTES) for key in keys(name, count)]
    found = [one for one in memory.reserve(wanted) if isinstance(one, Reservation)]
    assert len(found) == count
    return found


def fill(memory: SharedMemory, block: Reservation) -> None:
    memory.arena.view(block.offset, block.nbytes)[:] = content(block.key)


def push_out(store: RemoteStore, rounds: int = 3) -> None:
    """Puts enough blocks that everything evictable is evicted."""
    for n in range(rounds):
        for part in range(8):
            store.put(items(keys(f"filler {n} {part}", MEMORY // NBYTES // 8)))


def test_lease_reads_blocks_in_place(store: RemoteStore, memory: SharedMemory) -> None:
    assert store.attach() is memory
    lease = memory.lease([*CHAIN, *keys("other", 1)])
    assert lease.leases[-1] == 0
    assert leased_bytes(memory, lease, -1) == [content(key) for key in CHAIN]
    assert still_valid(memory, lease) == [True] * 6 + [False]
    lease.release()
    lease.release()


def test_leased_blocks_are_not_evicted(store: RemoteStore, memory: SharedMemory) -> None:
    held, given_back = memory.lease(CHAIN[:3]), memory.lease(CHAIN[3:])
    given_back.release()
    push_out(store)
    assert store.contains(CHAIN[3:]) == [False] * 3
    assert still_valid(memory, held) == [True] * 3
    assert leased_bytes(memory, held) == [content(key) for key in CHAIN[:3]]
    assert still_valid(memory, given_back) == [False] * 3, "their slots were used again"
    held.release()
    push_out(store)
    assert store.contains(CHAIN[:3]) == [False] * 3


def test_deleted_block_keeps_its_slot_while_leased(
    store: RemoteStore, memory: SharedMemory
) -> None:
    lease = memory.lease(CHAIN[:1])
    assert store.delete(CHAIN[:1]) == 1
    push_out(store)
    assert still_valid(memory, lease) == [True]
    assert leased_bytes(memory, lease)[0] == content(CHAIN[0])
    lease.release()


def test_sealed_blocks_are_readable(
    daemon: DaemonProcess, store: RemoteStore, memory: SharedMemory
) -> None:
    new = keys("new", 2)
    outcome = memory.reserve(
        [(new[0], None, NBYTES), (CHAIN[0], None, NBYTES), (new[1], new[0], NBYTES)]
    )
    assert outcome[1] is PutResult.PRESENT
    blocks = [one for one in outcome if isinstance(one, Reservation)]
    for block in blocks:
        fill(memory, block)
    assert store.contains(new) == [False, False], "not before they are sealed"
    assert memory.seal(blocks) == [PutResult.STORED] * 2
    far = RemoteStore(daemon.endpoint, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    into = buffers(2)
    assert far.get(new, into) == [True, True]
    assert [bytes(buffer) for buffer in into] == [content(key) for key in new]
    far.close()
    assert memory.seal(blocks) == [PutResult.FAILED] * 2, "a lease is good once"
    assert memory.seal([]) == []


def test_abandoned_reservation_frees_its_slot(store: RemoteStore, memory: SharedMemory) -> None:
    for n in range(20):
        memory.abandon(reserved(memory, f"abandoned {n}", 50))
    assert store.contains(keys("abandoned 0", 1)) == [False]
    blocks = reserved(memory, "abandoned 0", 50)
    for block in blocks:
        fill(memory, block)
    assert set(memory.seal(blocks)) == {PutResult.STORED}


def test_memory_of_a_killed_daemon_stays_readable(
    daemon: DaemonProcess, store: RemoteStore, memory: SharedMemory
) -> None:
    lease = memory.lease(CHAIN)
    blocks = reserved(memory, "unsealed", 2)
    assert memory.alive
    daemon.kill()
    eventually(lambda: not memory.alive)
    assert still_valid(memory, lease) == [True] * 6
    assert leased_bytes(memory, lease) == [content(key) for key in CHAIN]
    fill(memory, blocks[0])
    assert memory.seal(blocks) == [PutResult.FAILED] * 2
    lease.release()
    assert memory.lease(CHAIN).leases == [0] * 6
    assert memory.reserve([(keys("new", 1)[0], None, NBYTES)]) == [PutResult.FAILED]
    assert store.attach() is None

    daemon.restart()
    fresh: list[SharedMemory] = []

    def attached() -> bool:
        found = store.attach()
        fresh.extend([] if found is None else [found])
        return found is not None

    eventually(attached)
    assert fresh[0] is not memory
    assert store.put(items(CHAIN)) == [PutResult.STORED] * 6
    again = fresh[0].lease(CHAIN)
    assert leased_bytes(fresh[0], again) == [content(key) for key in CHAIN]
    assert leased_bytes(memory, lease)[0] == content(CHAIN[0]), "the old mapping stays"
    memory.close()
    memory.close()
    assert still_valid(fresh[0], again) == [True] * 6


def test_late_leases_are_released(
    daemon: DaemonProcess, store: RemoteStore, memory: SharedMemory
) -> None:
    """A stopped daemon that continues grants leases for which no call waits any more."""
    assert memory.lease(keys("other", 1)).leases == [0]
    daemon.freeze()
    assert memory.lease(CHAIN, deadline=within(0.2)).leases == [0] * 6
    wanted = [(key, None, NBYTES) for key in keys("late", 2)]
    assert memory.reserve(wanted, deadline=within(0.2)) == [PutResult.FAILED] * 2
    daemon.thaw()

    def all_is_back() -> bool:
        memory.lease(CHAIN[:1]).release()
        return leases_of(daemon) == 0

    eventually(all_is_back)
    assert store.breaker.state is BreakerState.CLOSED
    push_out(store)
    assert store.contains(CHAIN) == [False] * 6, "nothing is leased, so all of it could leave"
    assert not isinstance(reserved(memory, "late", 2)[0], PutResult), "nor is it reserved"


def test_late_leases_are_released_on_close(
    daemon: DaemonProcess, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the daemon would keep them as long as the process lives."""
    monkeypatch.setattr(shared_memory, "_CLOSING_S", 20.0)  # for a busy machine
    assert memory.lease(keys("other", 1)).leases == [0]
    daemon.freeze()
    assert memory.lease(CHAIN, deadline=within(0.2)).leases == [0] * 6
    daemon.thaw()
    eventually(lambda: leases_of(daemon) == 6)
    memory.close()
    assert leases_of(daemon) == 0


def test_failed_release_is_retried(daemon: DaemonProcess, memory: SharedMemory) -> None:
    lease = memory.lease(CHAIN)
    memory._timeout = 0.1
    with memory._lock:  # like a call that takes long
        lease.release()
    memory._timeout = 20.0
    assert leases_of(daemon) == 6
    memory.lease(keys("other", 1))
    assert leases_of(daemon) == 0


def test_unconfirmed_release_is_repeated(daemon: DaemonProcess, memory: SharedMemory) -> None:
    lease = memory.lease(CHAIN)
    leases = set(lease.leases)
    memory._timeout = 0.2
    daemon.freeze()
    lease.release()
    assert memory._unreleased == leases
    daemon.thaw()
    memory._timeout = 20.0
    memory.settle()
    assert memory.is_settled
    assert leases_of(daemon) == 0


@pytest.mark.parametrize("call", ["receive", "_receive_frames"])
def test_interrupted_call_leaves_no_reply_for_the_next(
    daemon: DaemonProcess, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    memory.lease(CHAIN).release()

    def interrupted(*_: object, **__: object) -> None:
        eventually(lambda: leases_of(daemon))  # the daemon has answered or is about to
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Connection, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.lease(CHAIN[:3])
    assert not memory.is_settled
    lease = memory.lease(CHAIN[3:])
    assert leased_bytes(memory, lease) == [content(key) for key in CHAIN[3:]]
    lease.release()
    assert memory.is_settled
    assert leases_of(daemon) == 0


def test_interrupt_at_the_end_of_a_call_releases_the_lock(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(memory._breaker, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.lease(keys("other", 1))
    assert all(memory.lease(CHAIN, deadline=within(20.0)).leases)


def test_stopped_daemon_opens_the_breaker(daemon: DaemonProcess, memory: SharedMemory) -> None:
    """A release of nothing sends no request and says nothing about the daemon."""
    daemon.freeze()
    for _ in range(3):
        lease = memory.lease(CHAIN, deadline=within(0.2))
        assert not any(lease.leases)
        lease.release()
    assert memory._breaker.state is BreakerState.OPEN


def test_many_threads_lease_and_write(store: RemoteStore, memory: SharedMemory) -> None:
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(30):
            lease = memory.lease(CHAIN)
            copies = leased_bytes(memory, lease)
            if copies != [content(key) for key in CHAIN] or not all(still_valid(memory, lease)):
                wrong.append("other bytes")
            lease.release()
            memory.abandon(reserved(memory, name, 2))

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_closed_memory_leases_nothing(store: RemoteStore, memory: SharedMemory) -> None:
    lease = memory.lease(CHAIN)
    memory.close()
    assert not memory.alive
    assert memory.lease(CHAIN).leases == [0] * 6
    lease.release()
    again = store.attach()
    assert again is not None
    assert again is not memory


class Interrupter(Breaker):
    """Runs a function between a call's first check and its turn for the connection."""

    happens: Callable[[], None] | None = None

    def begin(self) -> Attempt | None:
        self._let_happen()
        return super().begin()

    @property
    def available(self) -> bool:
        self._let_happen()
        return super().available

    def _let_happen(self) -> None:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()


@pytest.fixture
def interrupted(daemon: DaemonProcess) -> Iterator[tuple[RemoteStore, Interrupter]]:
    breaker = Interrupter("test")
    opened = RemoteStore(
        daemon.ipc, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0, breaker=breaker
    )
    yield opened, breaker
    opened.close()


def zmq_threads() -> int:
    return sum(name.startswith("ZMQbg") for name in Footprint.now().thread_names)


def test_call_during_close_opens_no_connection(
    interrupted: tuple[RemoteStore, Interrupter],
) -> None:
    store, breaker = interrupted
    before = zmq_threads()
    memory = store.attach()
    assert memory is not None
    memory.settle()
    breaker.happens = memory.close
    assert not any(memory.lease(CHAIN).leases)
    assert memory.closed
    eventually(lambda: zmq_threads() <= before)  # threads of earlier tests may still be ending


def test_closed_store_attaches_nothing(
    interrupted: tuple[RemoteStore, Interrupter],
) -> None:
    store, breaker = interrupted
    breaker.happens = store.close
    assert store.attach() is None
    assert breaker.happens is None


def test_closed_store_keeps_memory_mapped_for_its_readers(store: RemoteStore) -> None:
    seen: list[bytes] = []
    memory = store.attach(on_unmap=lambda closing: seen.append(bytes(closing.arena.view(0, 8))))
    assert memory is not None
    assert memory.enter()
    assert memory.enter()
    store.close()
    memory.leave()
    assert not memory.closed
    assert bytes(memory.arena.view(0, 8))
    assert not memory.enter(), "nobody begins to read any more"
    assert not seen
    memory.leave()
    assert memory.closed
    assert len(seen) == 1, "whatever pins it ends before it is unmapped"
