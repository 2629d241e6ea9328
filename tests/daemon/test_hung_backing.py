"""A backing folder whose file system hangs: the other tiers go on without it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.backing_pipes import HUNG_BY_PIPES, hang_at
from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, Refused, block, blocks, key, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreKey
from vllm_tiered_kv.core.tiers import Lookup, Tier
from vllm_tiered_kv.errors import ErrorCode, NotDeletedError
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.demotion import _WRITERS
from vllm_tiered_kv.server.tiers.lookups import Located
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor, StoreHungError
from vllm_tiered_kv.server.tiers.tiered_store import TieredStore, TierSettings
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.shared_dir.file_ops import FileOps
from vllm_tiered_kv.stores.ssd.store import SsdStore

MIB = 1 << 20
SIZE = 32 << 10
PATIENCE_S = 30.0
TIMEOUT_S = 0.5
LONG_ENOUGH_S = 4.0  # for a thread to begin, and to answer if it can
THREADS = 8


class Answers:
    """Collects what a callback is told, however often."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._arrived = threading.Event()

    def __call__(self, *answer: Any) -> None:
        self.all.append(answer[0] if len(answer) == 1 else answer)
        self._arrived.set()

    def one(self) -> Any:
        assert self._arrived.wait(PATIENCE_S), "no answer"
        return self.all[0]


# ---- the executor -------------------------------------------------------------------------------


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end: no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def test_executor_call_is_answered_exactly_once(gate: threading.Event) -> None:
    recorder = Recorder()
    executor = StoreExecutor("test", 2, LONG_ENOUGH_S, recorder)
    quick, failed, done, late = Answers(), Answers(), Answers(), Answers()
    executor.submit(lambda: 7, quick)
    executor.submit(lambda: 1 // 0, done, lambda: failed("failed"))
    assert (quick.one(), failed.one()) == (7, "failed")
    executor.submit(lambda: gate.wait(PATIENCE_S), done, lambda: late("late"))
    assert late.one() == "late"
    assert not executor.is_hung, "one thread is left"
    executor.submit(lambda: 8, again := Answers())
    assert again.one() == 8
    gate.set()
    eventually(executor.close)
    assert (done.all, late.all) == ([], ["late"]), "what comes too late is dropped"
    assert recorder.total(names.BACKING_LATE) == 1


def test_hung_executor_fails_calls_at_once(gate: threading.Event) -> None:
    executor = StoreExecutor("test", 2, LONG_ENOUGH_S)
    hung, begun = Answers(), []
    running = threading.Semaphore(0)
    for _ in range(2):
        executor.submit(
            lambda: (running.release(), gate.wait(PATIENCE_S)),  # type: ignore[func-returns-value]
            hung,
            lambda: hung("late"),
        )
        assert running.acquire(timeout=PATIENCE_S)
    for client in (None, None, "a", "b", "b"):  # wait for a thread, in vain
        executor.submit(lambda: begun.append(1), hung, lambda: hung("late"), client)
    eventually(lambda: len(hung.all) == 7)
    assert executor.is_hung
    for client in (None, "a"):
        absent = Answers()
        executor.submit(lambda: begun.append(1), absent, lambda: absent("absent"), client)  # noqa: B023
        assert absent.all == ["absent"], "at once"
    with pytest.raises(StoreHungError):
        executor.call(lambda: 1)
    gate.set()
    eventually(lambda: not executor.is_hung)
    back = Answers()
    executor.submit(lambda: 9, back)
    assert back.one() == 9
    assert begun == []
    eventually(executor.close)


def test_executor_keeping_queue_runs_it_after_hang(
    gate: threading.Event,
) -> None:
    executor = StoreExecutor("test", 1, TIMEOUT_S, keeps_queue=True)
    executor.submit(lambda: gate.wait(PATIENCE_S), client="a")
    executor.submit(lambda: 1, before := Answers(), lambda: before("failed"), "a")
    eventually(lambda: executor.is_hung)
    executor.submit(lambda: 2, after := Answers(), lambda: after("failed"), "a")
    gate.set()
    assert (before.one(), after.one()) == (1, 2)
    eventually(executor.close)


def test_executor_close_does_not_wait_for_hung_thread(gate: threading.Event) -> None:
    executor = StoreExecutor("test", 1, TIMEOUT_S)
    begun, told = threading.Event(), Answers()
    for client in (None, None, "a"):
        executor.submit(
            lambda: (begun.set(), gate.wait(PATIENCE_S)),  # type: ignore[func-returns-value]
            told,
            lambda: told("late"),
            client,
        )
    assert begun.wait(PATIENCE_S)
    assert not executor.close()
    assert told.all == ["late"] * 3
    executor.submit(lambda: 1, told, lambda: told("closed"))
    assert told.all[-1] == "closed"


def test_executor_call_returns_raises_or_reports_hang(
    gate: threading.Event,
) -> None:
    executor = StoreExecutor("test", 2, LONG_ENOUGH_S)
    assert executor.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        executor.call(lambda: 1 // 0)
    with pytest.raises(StoreHungError, match="test has not answered for 4 s"):
        executor.call(lambda: gate.wait(PATIENCE_S))
    gate.set()
    eventually(executor.close)


# ---- a store over it ----------------------------------------------------------------------------


def name(n: int) -> StoreKey:
    return StoreKey(bytes(16) + n.to_bytes(8, "little"))


def item(n: int) -> PutItem:
    return PutItem(name(n), None, memoryview(block(n, SIZE)))


class Hung:
    """A store whose backing folder hangs while `gate` is closed."""

    def __init__(self, folder: Path, with_ssd: bool = True, timeout_s: float = TIMEOUT_S) -> None:
        self.recorder = Recorder()
        self.gate = threading.Event()
        self.gate.set()
        self.hanging = 0
        self.ssd = SsdStore(folder / "ssd", 16 * MIB)
        self.backing = BackingTier(BackingOptions(f"file://{folder / 'shared'}", 64 * MIB))
        ops = self.backing._store.ops
        for call in [call for call in vars(FileOps) if not call.startswith("_")]:
            setattr(ops, call, self.gated(getattr(ops, call)))
        self.store = TieredStore(
            4 * MIB,
            self.ssd if with_ssd else None,
            self.backing,
            self.recorder,
            TierSettings(backing_timeout_s=timeout_s),
        )

    def gated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def gated_call(*arguments: Any) -> Any:
            if not self.gate.is_set():
                self.hanging += 1
                assert self.gate.wait(PATIENCE_S)
                self.hanging -= 1
            return call(*arguments)

        return gated_call

    def hang_all(self) -> None:
        """Until all of its threads do: one that was asked may not have begun in time."""
        self.gate.clear()

        def all_hang() -> bool:
            self.store.lookups.match([name(9000)], [], lambda located: None)
            return self.store.is_backing_absent

        eventually(all_hang)

    def put(self, n: int, durability: Durability = Durability.MEMORY) -> PutResult:
        answers = Answers()
        self.store.put([item(n)], durability, answers, lambda: None)
        return answers.one()[0]  # type: ignore[no-any-return]

    def located(self, *numbers: int) -> Located:
        answers = Answers()
        self.store.lookups.match([name(n) for n in numbers], [], answers)
        return answers.one()  # type: ignore[no-any-return]

    def fetch(self, n: int) -> bytes | None:
        answers = Answers()

        def ready(position: int, held: PinnedSlot | None) -> None:
            content = None if held is None else bytes(held.view)
            if held is not None:
                self.store.memory.let_go([held])
            answers(content)

        self.store.fetch([name(n)], ready)
        return answers.one()  # type: ignore[no-any-return]

    def delete(self, n: int) -> int | None:
        answers = Answers()
        self.store.delete([name(n)], answers)
        return answers.one()  # type: ignore[no-any-return]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Hung]:
    hung = Hung(tmp_path)
    yield hung
    hung.gate.set()
    eventually(lambda: not hung.hanging)
    hung.store.drain()
    hung.store.memory.check()
    assert not hung.store.memory._index.pinned_slots()
    hung.store.close()


@pytest.mark.parametrize("absent", [False, True])
def test_lookup_with_hung_backing_reports_near_tiers(hung: Hung, absent: bool) -> None:
    for n in (1, 2, 3):
        assert hung.put(n, Durability.DISK) is PutResult.STORED
    hung.store.memory.delete([name(2)])
    if absent:
        hung.hang_all()
    hung.gate.clear()
    found = hung.located(1, 2, 99)
    assert (found.count, found.tiers[Tier.MEMORY], found.tiers[Tier.SSD]) == (2, 1, 1)
    assert hung.located(1, 2, 3).count == 3, "nothing to be asked of it"
    answers = Answers()
    hung.store.lookups.contains([name(99), name(2), name(3)], answers)
    assert answers.one() == [None, Tier.SSD, Tier.MEMORY]
    borrowed = Answers()
    hung.store.lookups.match_and_hold([name(1), name(2), name(99)], [], SIZE, 10, borrowed)
    held, rest = borrowed.one()
    hung.store.memory.let_go(held)
    assert (len(held), rest.count) == (1, 1)
    assert hung.recorder.total(names.BACKING_LATE) >= 3


def test_put_and_get_with_hung_backing_work(hung: Hung) -> None:
    assert hung.put(1, Durability.DISK) is PutResult.STORED
    hung.hang_all()
    for _ in range(40):  # more than there are threads of any kind
        hung.store.lookups.match([name(99)], [], lambda located: None)
        hung.store.fetch([name(98)], lambda position, held: None)
    assert hung.put(2) is PutResult.STORED
    assert hung.put(3, Durability.DISK) is PutResult.STORED
    slot = hung.store.memory.reserve(name(4), None, SIZE)
    assert isinstance(slot, PinnedSlot)
    sealed = Answers()
    hung.store.sealed([slot], sealed)
    assert sealed.one() == [PutResult.STORED]
    hung.store.memory.delete([name(1)])
    assert hung.fetch(1) == block(1, SIZE), "from the SSD"


def test_get_from_hung_backing_misses_and_keeps_slot(hung: Hung) -> None:
    assert hung.backing.put([item(1)]) == [PutResult.STORED]
    ops = hung.backing._store.ops
    preadv, reading = ops.preadv, threading.Event()

    def hang_at_the_payload(fd: int, parts: list[memoryview], offset: int) -> int:
        if any(len(part) == SIZE for part in parts):
            reading.set()
            hung.gate.clear()
        return preadv(fd, parts, offset)

    ops.preadv = hang_at_the_payload  # type: ignore[method-assign, assignment]
    assert hung.fetch(1) is None
    assert reading.wait(PATIENCE_S)
    assert hung.store.memory.lookup(name(1)) is Lookup.PENDING
    ops.preadv = preadv  # type: ignore[method-assign]
    hung.gate.set()
    eventually(lambda: hung.store.memory.contains([name(1)]) == [True])
    assert hung.fetch(1) == block(1, SIZE)


@pytest.mark.parametrize("absent", [False, True])
def test_delete_with_hung_backing_fails(hung: Hung, absent: bool) -> None:
    assert hung.put(1) is PutResult.STORED
    hung.store.flush(flushed := Answers())
    assert flushed.one() == []
    if absent:
        hung.hang_all()
    hung.gate.clear()
    assert hung.delete(1) is None
    hung.gate.set()
    eventually(lambda: hung.delete(1) is not None)
    assert hung.backing.contains([name(1)]) == [False]
    assert hung.located(1).count == 0


def test_delete_refused_by_backing_fails(tmp_path: Path) -> None:
    hung = Hung(tmp_path, timeout_s=PATIENCE_S)  # it does not hang
    assert hung.put(1) is PutResult.STORED
    hung.store.flush(flushed := Answers())
    assert flushed.one() == []
    ops = hung.backing._store.ops
    unlink = ops.unlink

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "read-only")

    ops.unlink = refuse  # type: ignore[method-assign]
    assert hung.delete(1) is None
    ops.unlink = unlink  # type: ignore[method-assign]
    assert hung.backing.contains([name(1)]) == [True]
    assert hung.store.memory.contains([name(1)]) == hung.ssd.contains([name(1)]) == [False]
    assert hung.delete(1) == 1
    assert hung.located(1).count == 0
    assert hung.store.close()


def test_delete_failing_on_ssd_continues_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = Hung(tmp_path, timeout_s=PATIENCE_S)
    assert hung.put(1) is PutResult.STORED
    hung.store.flush(flushed := Answers())
    assert flushed.one() == []

    def refuse(keys: Sequence[StoreKey]) -> int:
        raise NotDeletedError(len(keys), "no room")

    with monkeypatch.context() as patched:
        patched.setattr(hung.ssd, "delete", refuse)
        assert hung.delete(1) is None
    assert hung.backing.contains([name(1)]) == hung.store.memory.contains([name(1)]) == [False]
    assert hung.delete(1) == 1
    assert hung.located(1).count == 0
    assert hung.store.close()


def test_delete_during_promotion_stays_deleted(tmp_path: Path) -> None:
    hung = Hung(tmp_path, timeout_s=PATIENCE_S)
    assert hung.backing.put([item(1)]) == [PutResult.STORED]
    delete = hung.backing.delete

    def read_back_first(keys: Sequence[StoreKey]) -> int:
        assert hung.fetch(1) == block(1, SIZE)
        return delete(keys)

    hung.backing.delete = read_back_first  # type: ignore[method-assign]
    assert hung.delete(1) == 1
    assert hung.located(1).count == 0
    assert hung.fetch(1) is None
    assert hung.store.close()


@pytest.mark.slow
def test_flush_with_hung_backing_reports_and_writes_later(hung: Hung) -> None:
    hung.gate.clear()
    for n in range(3):
        assert hung.put(n) is PutResult.STORED
    hung.store.flush(flushed := Answers())
    assert flushed.one() == ["3 blocks could not be written to backing"]
    assert hung.ssd.contains([name(n) for n in range(3)]) == [True] * 3
    hung.gate.set()
    eventually(lambda: not hung.store.pending_writes()[Tier.BACKING.value][0])
    hung.store.flush(again := Answers())
    assert again.one() == []
    hung.gate.clear()  # nothing is left to write; but it cannot be made durable
    hung.store.flush(unsure := Answers())
    assert unsure.one() == ["blocks in backing may not be durable"]


def test_durable_put_to_hung_backing_fails(tmp_path: Path) -> None:
    hung = Hung(tmp_path, with_ssd=False)
    try:
        assert hung.put(1, Durability.DISK) is PutResult.STORED
        hung.gate.clear()
        wanted = range(2, 2 + 3 * _WRITERS)  # some wait behind those that hang
        answers = [Answers() for _ in wanted]
        for n, told in zip(wanted, answers, strict=True):
            hung.store.put([item(n)], Durability.DISK, told, lambda: None)
        assert [told.one() for told in answers] == [[PutResult.FAILED]] * len(wanted)
        assert hung.fetch(2) == block(2, SIZE), "in memory it is"
        hung.gate.set()
        eventually(lambda: all(hung.backing.contains([name(n) for n in wanted])))
        assert hung.put(100, Durability.DISK) is PutResult.STORED
        assert [len(told.all) for told in answers] == [1] * len(wanted)
    finally:
        hung.gate.set()
        hung.store.close()
        hung.ssd.close()


def test_close_with_hung_backing_closes_other_tiers(tmp_path: Path) -> None:
    hung = Hung(tmp_path)
    try:
        hung.gate.clear()
        for n in range(3):
            assert hung.put(n) is PutResult.STORED
        unwritten = hung.store.drain()
        assert [(left.tier, left.blocks, left.has_failed) for left in unwritten] == [
            (Tier.BACKING.value, 3, True)
        ]
        assert not hung.store.close()
    finally:
        hung.gate.set()
    ssd = SsdStore(tmp_path / "ssd", 16 * MIB)
    assert ssd.contains([name(n) for n in range(3)]) == [True] * 3
    ssd.close()
    eventually(lambda: not hung.hanging)


# ---- a daemon over it ---------------------------------------------------------------------------


@pytest.mark.slow
def test_daemon_with_hung_backing_serves_and_stops(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    shared = folder / "shared"
    shared.mkdir()
    daemon = start(
        "--memory", "16MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "64MiB",
        "--backing", f"file://{shared}", "--backing-space", "1GiB", "--backing-timeout", "1s",
        program=HUNG_BY_PIPES,
    )  # fmt: skip
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(8, SIZE)
    client.put(wanted)
    client.ask(wire.Flush())
    hang_at(shared, *range(100, 100 + THREADS), 200)
    for n in range(THREADS):
        client.send(wire.Get(KEY_BYTES, [key(100 + n)], False))
    for _ in range(THREADS):
        _, reply, _ = client.receive()
        assert reply.positions == [], "a miss, in time"

    def all_hang() -> bool:
        """A thread may not have begun in time with what it was asked."""
        assert client.get([key(100)]) == {}
        return bool(client.stats()["backing_absent"])

    eventually(all_hang)
    assert client.match([*wanted, key(999)]).tiers == [8, 0, 0]
    assert client.get([*wanted, key(999)]) == wanted
    assert client.put(blocks(1, SIZE, 200), Durability.DISK) == [PutResult.STORED]
    with pytest.raises(Refused) as refused:
        client.ask(wire.Delete(KEY_BYTES, [key(0)]))
    assert refused.value.code is ErrorCode.NOT_WRITTEN
    stats = client.stats()
    assert stats["backing_timeouts"] > THREADS
    assert stats["pending_write_blocks"]["backing"] == 1
    assert daemon.terminate() == 1
    assert "1 blocks could not be written to backing" in daemon.logs
    assert "Traceback" not in daemon.logs
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SIZE])
    kept = [*(key(n) for n in range(1, 8)), key(200)]
    assert again.match(kept).tiers == [0, 8, 0]
