"""Very many blocks that only the backing folder has: read in turns, and none is given up early."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.backing_pipes import HUNG_BY_PIPES, hang_at
from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, NAMESPACE, attach, block, key, wire
from tests.patience import eventually, mostly_slow
from vllm_tiered_kv.core.store import BlockFacts, PutItem, PutResult, StoreKey, key_prefix
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder
from vllm_tiered_kv.server.tiers.backing import BackingTier
from vllm_tiered_kv.server.tiers.store_executor import StoreExecutor
from vllm_tiered_kv.server.tiers.tiered_store import (
    BACKING_THREADS,
    TieredStore,
    TierSettings,
)
from vllm_tiered_kv.stores.memory import PinnedSlot
from vllm_tiered_kv.stores.registry import BackingOptions

MIB = 1 << 20
PATIENCE_S = 60.0
SIZE = 64
MANY = 4300  # more than the threads of a backing folder take at once


# ---- the fair queue -----------------------------------------------------------------------------


class Queued:
    """Calls of an executor with one thread, which begins when all of them wait."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.executor = StoreExecutor("test", 1, timeout_s)
        self.begun: list[str] = []
        self.late: list[str] = []
        self._gate = threading.Event()
        begins = threading.Event()
        self.executor.submit(lambda: (begins.set(), self._gate.wait(PATIENCE_S)), client="first")  # type: ignore[func-returns-value]
        assert begins.wait(PATIENCE_S)

    def submit(self, name: str, client: str | None) -> None:
        self.executor.submit(
            lambda: self.begun.append(name), failed=lambda: self.late.append(name), client=client
        )

    def run(self, count: int) -> list[str]:
        self._gate.set()
        eventually(lambda: len(self.begun) + len(self.late) == count)
        eventually(self.executor.close)
        return self.begun


def test_executor_fair_queues_clients_in_order() -> None:
    queued = Queued()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queued.submit(name, name[0])
    assert queued.run(6) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_executor_alternates_calls_with_and_without_client() -> None:
    queued = Queued()
    for name in ("a1", "a2", "a3"):
        queued.submit(name, "a")
    for name in ("x1", "x2"):
        queued.submit(name, None)
    assert queued.run(5) == ["x1", "a1", "x2", "a2", "a3"]


def test_executor_deadline_of_client_call_counts_from_start() -> None:
    """The only thread is slow, but meets the deadline of every call."""
    executor = StoreExecutor("test", 1, 2.0)
    ended: list[bool] = []
    for _ in range(6):
        executor.submit(
            lambda: time.sleep(0.5),
            lambda nothing: ended.append(True),
            lambda: ended.append(False),
            "a",
        )
    late = threading.Event()
    executor.submit(lambda: time.sleep(2.5), failed=late.set, client="a")
    eventually(lambda: len(ended) == 6)
    assert ended == [True] * 6
    assert late.wait(PATIENCE_S)
    eventually(executor.close)


# ---- a store ------------------------------------------------------------------------------------


def name(n: int) -> StoreKey:
    return StoreKey(key_prefix(NAMESPACE) + key(n))


def fill(folder: Path, count: int) -> None:
    backing = BackingTier(BackingOptions(f"file://{folder}"))
    items = [PutItem(name(n), None, memoryview(block(n, SIZE))) for n in range(count)]
    assert backing.put(items) == [PutResult.STORED] * count
    backing.close()


@pytest.fixture
def shared() -> Iterator[Path]:
    """In memory, where there is such a place: thousands of files take a disk long."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="kv-", dir=memory if memory.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Gated(BackingTier):
    """Answers while `gate` is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(BackingOptions(f"file://{folder}"))
        self.gate = threading.Event()
        self.asked: list[StoreKey] = []

    @property
    def described(self) -> int:
        return len(self.asked)

    def describe(self, keys: Sequence[StoreKey]) -> list[BlockFacts | None]:
        self.asked += keys
        assert self.gate.wait(PATIENCE_S)
        return super().describe(keys)


class Far:
    """A store without a disk of its own over such a folder."""

    def __init__(self, shared: Path, memory: int = 64 * MIB, timeout_s: float = PATIENCE_S) -> None:
        self.recorder = Recorder()
        self.folder = Gated(shared)
        self.store = TieredStore(
            memory, None, self.folder, self.recorder, TierSettings(backing_timeout_s=timeout_s)
        )

    def fetch(
        self, count: int, first: int = 0, client: str = ""
    ) -> Callable[[], dict[int, bytes | None]]:
        """Begins to; waits for all of them."""
        answers: queue.Queue[tuple[int, bytes | None]] = queue.Queue()

        def ready(position: int, held: PinnedSlot | None) -> None:
            content = None if held is None else bytes(held.view)
            if held is not None:
                self.store.memory.let_go([held])
            answers.put((position, content))

        self.store.fetch([name(n) for n in range(first, first + count)], ready, client)
        return lambda: dict(answers.get(timeout=PATIENCE_S) for _ in range(count))

    def close(self) -> None:
        self.folder.gate.set()
        eventually(self.store.close)


def test_fetch_more_blocks_than_backing_threads_gets_all(shared: Path) -> None:
    fill(shared, MANY)
    far = Far(shared)
    wait = far.fetch(MANY)
    far.folder.gate.set()  # all have been asked for
    assert wait() == {n: block(n, SIZE) for n in range(MANY)}
    far.close()


def test_fetch_of_few_blocks_does_not_wait_for_many(shared: Path) -> None:
    fill(shared, 1000)
    far = Far(shared)
    much = far.fetch(998, client="much")
    little = far.fetch(2, first=998, client="little")
    far.folder.gate.set()
    assert little() == {0: block(998, SIZE), 1: block(999, SIZE)}
    assert much() == {n: block(n, SIZE) for n in range(998)}
    # Its turn came soon, though threads may overtake each other.
    assert far.folder.asked.index(name(999)) < 500
    far.close()


def test_fetch_from_hung_backing_misses_without_calls(shared: Path) -> None:
    far = Far(shared, timeout_s=0.5)
    assert far.fetch(MANY)() == dict.fromkeys(range(MANY))
    assert far.folder.described == BACKING_THREADS
    far.close()


def test_fetch_without_room_does_not_wait_per_block(shared: Path) -> None:
    count = 1000
    fill(shared, count)
    far = Far(shared, memory=MIB)
    far.folder.gate.set()
    memory = far.store.memory
    in_use = [memory.reserve(name(n), None, 4096) for n in range(10_000, 10_256)]
    assert all(isinstance(slot, PinnedSlot) for slot in in_use), "all of it"
    assert far.fetch(count)() == dict.fromkeys(range(count))
    assert far.recorder.total(names.NOT_PROMOTED, Tier.BACKING.value) == count
    assert far.folder.described < 1.5 * count, "when memory was full for a while, one look each"
    for slot in in_use:
        assert isinstance(slot, PinnedSlot)
        memory.abort(slot)
    assert far.fetch(10)() == {n: block(n, SIZE) for n in range(10)}
    far.close()


# ---- a daemon -----------------------------------------------------------------------------------


class HungDaemon:
    """Whose threads for the backing folder all hang until `let_go`."""

    def __init__(self, start: StartDaemon, connect: Connect, shared: Path) -> None:
        self.pipes = hang_at(shared, *range(10**6, 10**6 + BACKING_THREADS))
        self.process = start(
            "--memory", "256MiB", "--backing", f"file://{shared}",
            "--backing-ttl", "1d", "--backing-timeout", "1h",
            program=HUNG_BY_PIPES,
        )  # fmt: skip
        self.attached = attach(self.process.ipc_path)
        self.client = connect(self.process.ipc, block_bytes=[SIZE], arena=self.attached.token)
        self.other = connect(self.process.endpoint, block_bytes=[SIZE])
        hanging = [key(10**6 + n) for n in range(BACKING_THREADS)]
        self.client.send(wire.Get(KEY_BYTES, hanging, False))

    def let_go(self, op: str, count: int) -> None:
        """When it has so many of these requests, and has asked the folder for all that it will."""
        self.await_requests(op, count)
        eventually(self.has_settled)
        for pipe in self.pipes:
            eventually(lambda pipe=pipe: has_let_go(pipe))  # type: ignore[misc]

    def has_settled(self) -> bool:
        """Whether it has claimed no more room for replies in some turns of its loop."""
        claimed = {self.other.stats()["reply_bytes"] for _ in range(50)}
        return len(claimed) == 1

    def await_requests(self, op: str, count: int) -> None:
        eventually(lambda: self.other.stats()["requests"].get(op) == count)

    def replies(self, wanted: int) -> Iterator[tuple[Any, list[bytes]]]:
        """To this request, as they come."""
        while True:
            request_id, reply, payload = self.client.receive()
            if request_id == wanted:
                yield reply, payload


def has_let_go(pipe: Path) -> bool:
    """Of the one who hangs at this pipe, as soon as there is one."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # nobody yet
        return False
    return True


@pytest.fixture
def hung(start: StartDaemon, connect: Connect, shared: Path) -> Iterator[HungDaemon]:
    fill(shared, MANY)
    hung = HungDaemon(start, connect, shared)
    yield hung
    hung.attached.close()


def test_daemon_gets_many_blocks_from_backing(hung: HungDaemon) -> None:
    wanted = hung.client.send(wire.Get(KEY_BYTES, [key(n) for n in range(MANY)], True))
    hung.let_go("get", 2)
    found: dict[int, bytes] = {}
    for reply, payload in hung.replies(wanted):
        found |= zip(reply.positions, payload, strict=True)
        if not reply.more:
            break
    assert found == {n: block(n, SIZE) for n in range(MANY)}


def test_daemon_leases_many_blocks_from_backing(hung: HungDaemon) -> None:
    """Half of the requested blocks are misses."""
    wanted = hung.client.send(wire.Lend(KEY_BYTES, [key(n) for n in range(2 * MANY)]))
    hung.let_go("lend", 1)
    lent, _ = next(hung.replies(wanted))
    assert [bool(lease) for lease in lent.leases] == [True] * MANY + [False] * MANY
    assert set(lent.lengths[:MANY]) == {SIZE}


KEYS = 65536  # of one request
ADMITTED = 16  # of them, from one client at a time
REQUESTS = {
    "get": lambda keys: wire.Get(KEY_BYTES, keys, True),
    "pin": lambda keys: wire.Pin(KEY_BYTES, keys, 60_000),
    "lend": lambda keys: wire.Lend(KEY_BYTES, keys),
}


@pytest.mark.parametrize("op", mostly_slow(REQUESTS, 1))
def test_gets_waiting_for_backing_have_memory_limit(hung: HungDaemon, op: str) -> None:
    before = hung.process.peak_rss_bytes()
    for first in range(10**7, 10**7 + ADMITTED * KEYS, KEYS):
        asked = REQUESTS[op]([key(n) for n in range(first, first + KEYS)])
        hung.client.send(asked)
    beyond = {hung.client.send(asked) for _ in range(190)}
    while beyond:
        request_id, reply, _ = hung.client.receive()
        assert isinstance(reply, wire.ErrorReply)
        assert reply.code is ErrorCode.UNAVAILABLE
        beyond.remove(request_id)
    # Up to 440 MiB were seen; 1,350 and more where all of them are kept.
    assert hung.process.peak_rss_bytes() - before < 700 * MIB
    hung.other.put({key(1): block(1, SIZE)})
    assert hung.other.get([key(1)]) == {key(1): block(1, SIZE)}, "others are served"
