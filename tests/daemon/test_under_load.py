"""Several clients at once, tiers smaller than the working set, the daemon stopped in the middle."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import KEY_BYTES, RawClient, Refused, attach, block, blocks, key, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import Durability, PutResult
from vllm_tiered_kv.device.shared_arena import SharedArena

KIB = 1 << 10
MIB = 1 << 20
SIZE = 32 * KIB


class Workers:
    """Threads whose first failure is the test's."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._errors.append(error)

        thread = threading.Thread(target=guarded)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=300)
            assert not thread.is_alive()
        if self._errors:
            raise self._errors[0]


def hammer(client: RawClient, seed: int, rounds: int) -> None:
    """Random requests about a few hundred blocks in chains; every byte that comes back is right."""
    noise = random.Random(seed)
    for _ in range(rounds):
        chain = noise.randrange(20)
        numbers = [chain * 1000 + n for n in range(noise.randrange(1, 20))]
        keys = [key(n) for n in numbers]
        what = noise.randrange(12)
        if what < 5:
            wanted = {key(n): block(n, SIZE) for n in numbers}
            durability = noise.choice(list(Durability))
            results = client.put(wanted, durability, parents=[None, *keys[:-1]])
            assert PutResult.FAILED not in results
        elif what < 9:
            for k, payload in client.get(keys, stream=noise.random() < 0.7).items():
                assert payload == block(int.from_bytes(k[:8], "little"), SIZE)
        elif what == 9:
            assert client.match(keys, pin_ms=noise.choice([0, 5])).count <= len(keys)
        elif what == 10:
            client.ask(wire.Delete(KEY_BYTES, keys[-2:]))
        else:
            client.ask(wire.Pin(KEY_BYTES, keys, noise.choice([0, 10])))


def borrow(client: RawClient, arena: SharedArena, seed: int, rounds: int) -> None:
    """The same, in place."""
    noise = random.Random(seed)
    for _ in range(rounds):
        chain = noise.randrange(20)
        numbers = [chain * 1000 + n for n in range(noise.randrange(1, 10))]
        lent = client.lend([key(n) for n in numbers])
        for n, lease, offset, generation in zip(
            numbers, lent.leases, lent.offsets, lent.generations, strict=True
        ):
            if lease:
                assert bytes(arena.view(offset, SIZE)) == block(n, SIZE)
                assert arena.generation(offset) == generation
        leases = sorted({lease for lease in lent.leases if lease})  # blocks may share one
        assert client.release(leases) == len(leases)
        reserved = client.reserve({key(n): SIZE for n in numbers})
        for n, lease, offset in zip(numbers, reserved.leases, reserved.offsets, strict=True):
            if lease:
                arena.view(offset, SIZE)[:] = block(n, SIZE)
        client.seal([lease for lease in reserved.leases if lease])


def test_tiers_smaller_than_working_set_serve_correct_blocks(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    (folder / "shared").mkdir()
    daemon = start(
        "--memory",
        "4MiB",
        "--ssd",
        str(folder / "ssd"),
        "--ssd-space",
        "12MiB",
        "--backing",
        f"file://{folder / 'shared'}",
        "--backing-ttl",
        "1d",
    )
    workers = Workers()
    for seed in range(4):
        client = connect(daemon.endpoint, block_bytes=[SIZE])
        workers.start(lambda client=client, seed=seed: hammer(client, seed, 150))  # type: ignore[misc]
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    borrower = connect(daemon.ipc, block_bytes=[SIZE], arena=attached.token)
    workers.start(lambda: borrow(borrower, arena, 99, 100))
    workers.join()
    stats = borrower.stats()
    assert stats["used_bytes"]["memory"] <= 4 * MIB
    assert stats["used_bytes"]["ssd"] <= 12 * MIB
    for tier in ("memory", "ssd", "backing"):
        assert stats["hit_blocks"][tier] > 0
    assert stats["evicted_blocks"]["memory"] > 0
    eventually(lambda: borrower.stats()["pins"] == 0)
    stats = borrower.stats()
    assert (stats["leases"], stats["reply_bytes"], stats["put_bytes"]) == (0, 0, 0)
    assert "Traceback" not in daemon.logs
    arena.close()
    attached.connection.close()
    assert daemon.terminate() == 0


def test_sigterm_under_load_keeps_acknowledged_blocks(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    """The write queue is far too small; refused blocks are written at the end."""
    daemon = start(
        "--memory",
        "64MiB",
        "--ssd",
        str(folder / "ssd"),
        "--ssd-space",
        "128MiB",
        "--write-queue",
        "64KiB",
    )
    kept: list[bytes] = []
    enough = threading.Event()

    def put_until_refused(client: RawClient, first: int) -> None:
        for n in range(first, first + 400):
            try:
                if client.put({key(n): block(n, SIZE)}) == [PutResult.STORED]:
                    kept.append(key(n))
            except (Refused, TimeoutError):
                return
            if len(kept) > 100:
                enough.set()

    workers = Workers()
    for c in range(3):
        client = connect(daemon.endpoint, block_bytes=[SIZE])
        workers.start(lambda client=client, c=c: put_until_refused(client, c * 10_000))  # type: ignore[misc]
    assert enough.wait(timeout=60)
    assert daemon.terminate() == 0
    workers.join()
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SIZE])
    found = again.get(kept, stream=True)
    assert set(found) == set(kept)
    for k, payload in found.items():
        assert payload == block(int.from_bytes(k[:8], "little"), SIZE)


def test_flush_with_full_write_queue_loses_nothing(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start(
        "--memory", "32MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "64MiB",
        "--write-queue", "64KiB",
    )  # fmt: skip
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(200, SIZE)
    keys = list(wanted)
    for at in range(0, 200, 50):
        client.put({k: wanted[k] for k in keys[at : at + 50]})
    client.ask(wire.Flush())
    daemon.kill()
    daemon.restart()
    assert connect(daemon.endpoint, block_bytes=[SIZE]).get(keys, stream=True) == wanted
