"""Processes that share the daemon's memory: what they are given, and how it comes back."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgpack
import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import (
    KEY_BYTES,
    RawClient,
    Refused,
    attach,
    block,
    blocks,
    key,
    push_out,
    wire,
)
from tests.patience import eventually, mostly_slow
from vllm_tiered_kv.core.store import PutResult, StoreKey
from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.errors import ErrorCode
from vllm_tiered_kv.server.net.limits import ClientLimits
from vllm_tiered_kv.server.shm.leases import Attachment, Leases
from vllm_tiered_kv.stores.memory import MemoryStore, PinnedSlot

MIB = 1 << 20


def test_block_is_written_and_read_in_shared_memory(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    client = connect(daemon.ipc, arena=attached.token)
    reserved = client.reserve({key(1): 4096, key(2): 4096})
    assert list(reserved.results) == [wire.RESERVED] * 2
    assert client.tiers([key(1)]) == [0]
    assert client.reserve({key(1): 4096}).results == wire.put_codes([PutResult.PRESENT])
    arena.view(reserved.offsets[0], 4096)[:] = block(1)
    assert arena.generation(reserved.offsets[0]) == reserved.generations[0]
    assert client.seal([reserved.leases[0]]) == [PutResult.STORED]
    assert client.release([reserved.leases[1]]) == 1
    assert client.seal([reserved.leases[1]]) == [PutResult.FAILED]
    assert client.get([key(1), key(2)]) == {key(1): block(1)}
    lent = client.lend([key(1), key(2)])
    assert lent.leases[1] == 0
    assert lent.lengths == [4096, 0]
    assert bytes(arena.view(lent.offsets[0], 4096)) == block(1)
    assert arena.generation(lent.offsets[0]) == lent.generations[0]
    assert client.release([lent.leases[0], 12345]) == 1
    assert client.release([lent.leases[0]]) == 0
    stats = client.stats()
    assert (stats["leases"], stats["leased_bytes"]) == (0, 0)
    arena.close()
    attached.connection.close()


def test_release_by_other_process_is_ignored(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    one, other = attach(daemon.ipc_path), attach(daemon.ipc_path)
    client, stranger = connect(daemon.ipc, arena=one.token), connect(daemon.ipc, arena=other.token)
    client.put(blocks(1))
    lease = client.lend([key(0)]).leases[0]
    assert stranger.release([lease]) == 0
    assert client.stats()["leases"] == 1
    one.close()
    other.close()


def test_arena_requests_without_token_are_refused(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    client = connect(daemon.ipc)
    for request in (
        wire.Lend(KEY_BYTES, [key(1)]),
        wire.Reserve(KEY_BYTES, [key(1)], [None], [4096]),
        wire.Borrow(KEY_BYTES, [key(1)], [], 4096),
        wire.Release([1]),
        wire.Seal([1]),
    ):
        with pytest.raises(Refused) as refused:
            client.ask(request)
        assert refused.value.code is ErrorCode.NO_ARENA
    with pytest.raises(Refused) as refused:
        client.hello(arena=bytes(16))
    assert refused.value.code is ErrorCode.NO_ARENA


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"protocol": 2, "client": "x"}, "unsupported_version"),
        ({"protocol": "\nforged", "client": "x"}, "unsupported_version"),
        ({"protocol": 1}, "bad_message"),
        ({"protocol": 1, "client": 5}, "bad_message"),
        ({"protocol": 1, "client": "x" * 1000}, "bad_message"),
        (b"\xc1garbage", "bad_message"),
        (b"\x00", "bad_message"),
        (msgpack.packb({"protocol": 1, "client": "x", "more": "y" * 5000}), "too_large"),
    ],
)
def test_attach_with_wrong_hello_is_refused(start: StartDaemon, hello: object, code: str) -> None:
    daemon = start()
    refused = attach(daemon.ipc_path, hello)
    assert "\nforged" not in daemon.logs
    assert refused.answer["ok"] is False
    assert refused.answer["code"] == code
    assert refused.fd == -1
    assert refused.connection.recv(1) == b""
    good = attach(daemon.ipc_path)
    assert good.answer["ok"] is True
    good.close()
    refused.close()


def test_socket_files_are_private(start: StartDaemon) -> None:
    daemon = start()
    for path in (daemon.ipc_path, Path(f"{daemon.ipc_path}.arena")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    attached = attach(daemon.ipc_path)
    assert stat.S_IMODE(os.fstat(attached.fd).st_mode) == 0o600
    attached.close()


def test_leases_of_processes_leave_room_for_the_next(start: StartDaemon, connect: Connect) -> None:
    """Each gets two thirds of what the others leave of half of the memory, that is 128 blocks."""
    daemon = start("--memory", "1MiB")
    attached = [attach(daemon.ipc_path) for _ in range(3)]
    clients = [connect(daemon.ipc, arena=one.token) for one in attached]
    for number, (client, room) in enumerate(zip(clients, (85, 28, 10), strict=True)):
        wanted = {key(1000 * number + n): 4096 for n in range(100)}
        reserved = client.reserve(wanted)
        assert list(reserved.results) == [wire.RESERVED] * room + list(
            wire.put_codes([PutResult.DROPPED] * (100 - room))
        )
    assert clients[2].release([lease for lease in reserved.leases if lease]) == 10
    assert clients[2].put(blocks(1, start=9000)) == [PutResult.STORED]
    assert clients[0].lend([key(9000)]).leases == [0], "it has all that it may have"
    assert all(clients[2].lend([key(9000)]).leases)
    for one in attached:
        one.close()


BORROWER = """
    import os, sys, time
    from tests.daemon.raw_client import RawClient, attach, key
    attached = attach(sys.argv[1])
    client = RawClient("ipc://" + sys.argv[1])
    client.hello(arena=attached.token)
    lent = client.lend([key(n) for n in range(4)])
    reserved = client.reserve({key(100): 4096})
    assert all(lent.leases) and all(reserved.leases)
    if "close" in sys.argv:
        attached.connection.close()
        client.close()
    print(*lent.offsets, flush=True)
    time.sleep(600)
"""


def leaseholder(daemon: DaemonProcess, *arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BORROWER), str(daemon.ipc_path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("how", mostly_slow(["stopped", "disconnected"], 1))
def test_leases_survive_eviction_and_end_with_process(
    start: StartDaemon, connect: Connect, how: str
) -> None:
    daemon = start("--memory", "1MiB")
    client = connect(daemon.endpoint)
    client.put(blocks(4))
    process, offsets = leaseholder(daemon, *(["close"] if how == "disconnected" else []))
    try:
        if how == "stopped":
            process.send_signal(signal.SIGSTOP)
        own = attach(daemon.ipc_path)
        memory = SharedArena.attach(own.fd, own.answer["capacity"])
        push_out(client, 1000)
        time.sleep(0.5)  # nothing is taken back by time
        stats = client.stats()
        assert (stats["leases"], stats["leased_bytes"]) == (5, 5 * 4096)
        assert client.tiers([key(n) for n in range(4)]) == [1] * 4
        for n, offset in enumerate(offsets):
            assert bytes(memory.view(offset, 4096)) == block(n)
        process.kill()
        process.wait()
        eventually(lambda: client.stats()["leases"] == 0)
        assert client.stats()["leased_bytes"] == 0
        assert client.put({key(100): block(100)}) == [PutResult.STORED]  # no longer reserved
        push_out(client, 2000)
        assert client.tiers([key(n) for n in range(4)]) == [0] * 4
        memory.close()
        own.connection.close()
    finally:
        process.kill()
        process.wait()


def test_leaseholder_is_silent_until_it_is_seen() -> None:
    memory = MemoryStore(1 << 20)
    leases = Leases(memory, ClientLimits.of_memory(1 << 20), 60, lambda attachment: None)
    holder = Attachment(bytes(16), 1, -1, "test")
    leases.attach(holder)
    holder.last_seen -= 61
    assert leases.silent() == [], "it holds nothing"
    name = StoreKey(bytes(40))
    slot = memory.reserve(name, None, 4096)
    assert isinstance(slot, PinnedSlot)
    lease = leases.reserve(holder, slot)
    assert lease is not None
    assert leases.silent() == [holder]
    holder.was_seen()
    assert leases.silent() == []
    holder.last_seen -= 61
    leases.release(holder, [lease])
    assert leases.silent() == []
    memory.close()


_STOPPED = """
    import sys, time
    from tests.daemon.raw_client import RawClient, attach, key
    attached = attach(sys.argv[1], {"protocol": 1, "client": "engine\\nof X" + "\\0" * 240})
    client = RawClient("ipc://" + sys.argv[1])
    client.hello(arena=attached.token)
    reserved = client.reserve({key(n): 4096 for n in range(1000, 1200)})
    print(sum(lease > 0 for lease in reserved.leases), flush=True)
    sys.stdin.readline()
    client.release([lease for lease in reserved.leases if lease][1:])
    print("released", flush=True)
    time.sleep(600)
"""


def test_stopped_process_is_named_and_others_get_leases(
    start: StartDaemon, connect: Connect
) -> None:
    """Its leases stay, and no process can take all that may be leased."""
    daemon = start("--memory", "1MiB", "--stall-timeout", "1s")
    client = connect(daemon.endpoint)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_STOPPED), str(daemon.ipc_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "85\n"
        assert client.ask(wire.Info()).facts["silent_processes"] == []
        process.send_signal(signal.SIGSTOP)
        name = "engine\\nof X" + "\\x00" * 240  # escaped, it is longer than a text may be
        held = f"process {process.pid} ('{name}') holds leases of {85 * 4096} bytes"
        eventually(lambda: f"{held} and has sent nothing for 1 s: if it is stopped" in daemon.logs)
        assert client.ask(wire.Info()).facts["silent_processes"] == [held[:256]]
        assert client.stats()["silent_leased_bytes"] == client.stats()["leased_bytes"] == 85 * 4096
        attached = attach(daemon.ipc_path)
        other = connect(daemon.ipc, arena=attached.token)
        assert set(other.put(blocks(4))) == {PutResult.STORED}
        assert all(other.lend([key(n) for n in range(4)]).leases)
        assert all(other.reserve({key(n): 4096 for n in range(100, 120)}).leases)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "released\n"
        assert f"process {process.pid} ('{name}') sends again" in daemon.logs
        eventually(lambda: f"{held.replace(str(85 * 4096), '4096')} and has" in daemon.logs)
        assert daemon.logs.count(f"{held} and has") == 1
        attached.close()
    finally:
        process.kill()
        process.wait()


def test_leases_survive_in_forked_child(start: StartDaemon, connect: Connect) -> None:
    """A forked child also maps the memory."""
    daemon = start("--memory", "1MiB")
    client = connect(daemon.endpoint)
    client.put(blocks(4))
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(read_end)
        attached = attach(daemon.ipc_path)
        own = RawClient(daemon.ipc)
        own.hello(arena=attached.token)
        own.lend([key(0)])
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.write(write_end, str(child).encode())
        os._exit(0)
    os.close(write_end)
    child = int(os.read(read_end, 32))
    try:
        os.waitpid(parent, 0)
        time.sleep(0.5)
        assert client.stats()["leases"] == 1
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: client.stats()["leases"] == 0)


@pytest.mark.parametrize("is_written", [False, True])
def test_release_after_disconnect_ends_attachment(
    start: StartDaemon, connect: Connect, is_written: bool
) -> None:
    """Its last message may be read after both connections have ended."""
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(1))
    lent = client.lend([key(0)]).leases
    reserved = client.reserve({key(1): 4096}).leases if is_written else []
    attached.connection.shutdown(socket.SHUT_WR)
    assert attached.connection.recv(1) == b"", "the daemon has seen the end"
    assert client.stats()["attached_processes"] == 1
    assert client.release(lent) == 1
    if is_written:
        assert client.stats()["attached_processes"] == 1
        assert client.seal(reserved) == [PutResult.STORED]
    stats = client.stats()
    assert (stats["attached_processes"], stats["leases"], stats["leased_bytes"]) == (0, 0, 0)
    with pytest.raises(Refused) as refused:
        client.lend([key(0)])
    assert refused.value.code is ErrorCode.NO_ARENA
    attached.close()


@pytest.mark.parametrize("packet", [b"\xc1", bytes(100_000)], ids=["short", "long"])
def test_packets_after_attach_are_ignored(
    start: StartDaemon, connect: Connect, packet: bytes
) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(1))
    lease = client.lend([key(0)]).leases
    for _ in range(20):
        attached.connection.send(packet)
    assert client.stats()["attached_processes"] == 1
    assert client.release(lease) == 1
    attached.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        attached.connection.recv(1)
    attached.close()


def test_mapped_memory_survives_daemon(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(1))
    offset = client.lend([key(0)]).offsets[0]
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    daemon.kill()
    assert attached.connection.recv(1) == b""  # this is how a client notices
    assert bytes(arena.view(offset, 4096)) == block(0)
    arena.close()
    attached.connection.close()


def test_memory_size_is_sealed(start: StartDaemon) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    with pytest.raises(OSError):
        os.ftruncate(attached.fd, 4096)
    mmap.mmap(attached.fd, 4096).close()
    attached.close()


def test_token_after_restart_is_refused(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    daemon.kill()
    daemon.restart()
    client = connect(daemon.ipc, greet=False)
    with pytest.raises(Refused) as refused:
        client.hello(arena=attached.token)
    assert refused.value.code is ErrorCode.NO_ARENA
    attached.close()
