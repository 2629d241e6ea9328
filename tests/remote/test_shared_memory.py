"""The memory of a daemon on this host: lent, written, and outlived."""

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
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.remote import shared_memory
from vllm_tiered_kv.remote.connection import Connection
from vllm_tiered_kv.remote.health import Attempt, Breaker, BreakerState
from vllm_tiered_kv.remote.shared_memory import LentBlock, Reservation, SharedMemory
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


def lent_bytes(memory: SharedMemory, block: LentBlock | None) -> bytes:
    assert block is not None
    return bytes(memory.arena.view(block.offset, block.nbytes))


def reserved(memory: SharedMemory, name: str, count: int) -> list[Reservation]:
    wanted = [(key, None, NBYTES) for key in keys(name, count)]
    found = [one for one in memory.reserve(wanted) if isinstance(one, Reservation)]
    assert len(found) == count
    return found


def fill(memory: SharedMemory, block: Reservation) -> None:
    memory.arena.view(block.offset, block.nbytes)[:] = content(block.key)


def push_out(store: RemoteStore, rounds: int = 3) -> None:
    """Puts so much that everything evictable leaves."""
    for n in range(rounds):
        for part in range(8):
            store.put(items(keys(f"filler {n} {part}", MEMORY // NBYTES // 8)))


def test_blocks_are_read_where_they_lie(store: RemoteStore, memory: SharedMemory) -> None:
    assert store.attach() is memory
    lent = memory.lend([*CHAIN, *keys("other", 1)])
    assert lent.blocks[-1] is None
    assert [lent_bytes(memory, block) for block in lent.blocks[:-1]] == [
        content(key) for key in CHAIN
    ]
    assert memory.still_valid(lent) == [True] * 6 + [False]
    lent.release()
    lent.release()


def test_what_is_lent_stays_and_what_is_not_may_go(
    store: RemoteStore, memory: SharedMemory
) -> None:
    held, given_back = memory.lend(CHAIN[:3]), memory.lend(CHAIN[3:])
    given_back.release()
    push_out(store)
    assert store.contains(CHAIN[3:]) == [False] * 3
    assert memory.still_valid(held) == [True] * 3
    assert [lent_bytes(memory, block) for block in held.blocks] == [
        content(key) for key in CHAIN[:3]
    ]
    assert memory.still_valid(given_back) == [False] * 3, "their slots were used again"
    held.release()
    push_out(store)
    assert store.contains(CHAIN[:3]) == [False] * 3


def test_a_deleted_block_keeps_its_place_while_it_is_lent(
    store: RemoteStore, memory: SharedMemory
) -> None:
    lent = memory.lend(CHAIN[:1])
    assert store.delete(CHAIN[:1]) == 1
    push_out(store)
    assert memory.still_valid(lent) == [True]
    assert lent_bytes(memory, lent.blocks[0]) == content(CHAIN[0])
    lent.release()


def test_blocks_are_written_in_place(
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


def test_abandoned_room_comes_back(store: RemoteStore, memory: SharedMemory) -> None:
    for n in range(20):
        memory.abandon(reserved(memory, f"abandoned {n}", 50))
    assert store.contains(keys("abandoned 0", 1)) == [False]
    blocks = reserved(memory, "abandoned 0", 50)
    for block in blocks:
        fill(memory, block)
    assert set(memory.seal(blocks)) == {PutResult.STORED}


def test_a_daemon_killed_while_its_memory_is_lent(
    daemon: DaemonProcess, store: RemoteStore, memory: SharedMemory
) -> None:
    lent = memory.lend(CHAIN)
    blocks = reserved(memory, "unsealed", 2)
    assert memory.alive
    daemon.kill()
    eventually(lambda: not memory.alive)
    assert memory.still_valid(lent) == [True] * 6
    assert [lent_bytes(memory, block) for block in lent.blocks] == [content(key) for key in CHAIN]
    fill(memory, blocks[0])
    assert memory.seal(blocks) == [PutResult.FAILED] * 2
    lent.release()
    assert memory.lend(CHAIN).blocks == [None] * 6
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
    again = fresh[0].lend(CHAIN)
    assert [lent_bytes(fresh[0], block) for block in again.blocks] == [
        content(key) for key in CHAIN
    ]
    assert lent_bytes(memory, lent.blocks[0]) == content(CHAIN[0]), "the old mapping stays"
    memory.close()
    memory.close()
    assert fresh[0].still_valid(again) == [True] * 6


def test_leases_that_come_too_late_go_back(
    daemon: DaemonProcess, store: RemoteStore, memory: SharedMemory
) -> None:
    """What a stopped daemon lends when it goes on was asked for by nobody any more."""
    assert memory.lend(keys("other", 1)).blocks == [None]
    daemon.freeze()
    assert memory.lend(CHAIN, deadline=within(0.2)).blocks == [None] * 6
    wanted = [(key, None, NBYTES) for key in keys("late", 2)]
    assert memory.reserve(wanted, deadline=within(0.2)) == [PutResult.FAILED] * 2
    daemon.thaw()

    def all_is_back() -> bool:
        memory.lend(CHAIN[:1]).release()
        return leases_of(daemon) == 0

    eventually(all_is_back)
    assert store.breaker.state is BreakerState.CLOSED
    push_out(store)
    assert store.contains(CHAIN) == [False] * 6, "nothing is lent, so all of it could leave"
    assert not isinstance(reserved(memory, "late", 2)[0], PutResult), "nor is it reserved"


def test_leases_that_nobody_has_heard_of_go_back_at_the_end(
    daemon: DaemonProcess, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives on: the daemon would keep them for it."""
    monkeypatch.setattr(shared_memory, "_CLOSING_S", 20.0)  # a busy machine
    assert memory.lend(keys("other", 1)).blocks == [None]
    daemon.freeze()
    assert memory.lend(CHAIN, deadline=within(0.2)).blocks == [None] * 6
    daemon.thaw()
    eventually(lambda: leases_of(daemon) == 6)
    memory.close()
    assert leases_of(daemon) == 0


def test_a_release_that_fails_is_made_up_for(daemon: DaemonProcess, memory: SharedMemory) -> None:
    lent = memory.lend(CHAIN)
    memory._timeout = 0.1
    with memory._lock:  # as a call that takes its time
        lent.release()
    memory._timeout = 20.0
    assert leases_of(daemon) == 6
    memory.lend(keys("other", 1))
    assert leases_of(daemon) == 0


def test_a_release_that_was_not_confirmed_is_still_owed(
    daemon: DaemonProcess, memory: SharedMemory
) -> None:
    lent = memory.lend(CHAIN)
    leases = set(lent.leases)
    memory._timeout = 0.2
    daemon.freeze()
    lent.release()
    assert memory._owed == leases
    daemon.thaw()
    memory._timeout = 20.0
    memory.settle()
    assert memory.is_settled
    assert leases_of(daemon) == 0


@pytest.mark.parametrize("call", ["receive", "_receive_frames"])
def test_an_interrupt_leaves_no_answer_to_the_next_question(
    daemon: DaemonProcess, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    memory.lend(CHAIN).release()

    def interrupted(*_: object, **__: object) -> None:
        eventually(lambda: leases_of(daemon))  # it has answered, or is about to
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Connection, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.lend(CHAIN[:3])
    assert not memory.is_settled
    lent = memory.lend(CHAIN[3:])
    assert [lent_bytes(memory, block) for block in lent.blocks] == [
        content(key) for key in CHAIN[3:]
    ]
    lent.release()
    assert memory.is_settled
    assert leases_of(daemon) == 0


def test_an_interrupt_at_the_end_of_a_call_does_not_keep_the_memory(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(memory._breaker, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.lend(keys("other", 1))
    assert all(memory.lend(CHAIN, deadline=within(20.0)).leases)


def test_a_stopped_daemon_is_given_up(daemon: DaemonProcess, memory: SharedMemory) -> None:
    """What is given back where nothing was lent says nothing of the daemon."""
    daemon.freeze()
    for _ in range(3):
        lent = memory.lend(CHAIN, deadline=within(0.2))
        assert not any(lent.leases)
        lent.release()
    assert memory._breaker.state is BreakerState.OPEN


def test_many_threads(store: RemoteStore, memory: SharedMemory) -> None:
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(30):
            lent = memory.lend(CHAIN)
            copies = [lent_bytes(memory, block) for block in lent.blocks]
            if copies != [content(key) for key in CHAIN] or not all(memory.still_valid(lent)):
                wrong.append("other bytes")
            lent.release()
            memory.abandon(reserved(memory, name, 2))

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_closed_memory_lends_nothing(store: RemoteStore, memory: SharedMemory) -> None:
    lent = memory.lend(CHAIN)
    memory.close()
    assert not memory.alive
    assert memory.lend(CHAIN).blocks == [None] * 6
    lent.release()
    again = store.attach()
    assert again is not None
    assert again is not memory


class Interrupter(Breaker):
    """Lets something happen between the moment a call finds all well and its turn to be made."""

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


def test_a_call_that_comes_when_the_memory_is_closed_opens_nothing(
    interrupted: tuple[RemoteStore, Interrupter],
) -> None:
    store, breaker = interrupted
    before = zmq_threads()
    memory = store.attach()
    assert memory is not None
    memory.settle()
    breaker.happens = memory.close
    assert not any(memory.lend(CHAIN).leases)
    assert memory.closed
    eventually(lambda: zmq_threads() <= before)  # those of earlier tests may just be ending


def test_a_closed_store_attaches_nothing_more(
    interrupted: tuple[RemoteStore, Interrupter],
) -> None:
    store, breaker = interrupted
    breaker.happens = store.close
    assert store.attach() is None
    assert breaker.happens is None
