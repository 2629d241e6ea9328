"""Blocks leased together with a lookup: which ones, for how long, and never too many."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import RawClient, Refused, attach, block, blocks, key, push_out, wire
from tests.patience import eventually
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.errors import ErrorCode

SSD_BLOCK = 64 << 10


def numbers(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


def test_borrow_leases_blocks_in_memory(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(5))
    reply = client.borrow([*(key(n) for n in range(5)), key(99), key(4)])
    assert (reply.count, reply.tiers, reply.lent) == (5, [5, 0, 0], 5)
    offsets, generations = numbers(reply.offsets), numbers(reply.generations)
    assert [bytes(arena.view(offset, 4096)) for offset in offsets] == [block(n) for n in range(5)]
    assert [arena.generation(offset) for offset in offsets] == generations
    stats = client.stats()
    assert (stats["leases"], stats["leased_bytes"]) == (5, 5 * 4096)
    assert (stats["hit_blocks"], stats["missed_blocks"]) == ({"memory": 5}, 2)
    assert client.release([reply.lease]) == 1
    assert client.release([reply.lease]) == 0
    stats = client.stats()
    assert (stats["leases"], stats["leased_bytes"]) == (0, 0)
    arena.close()
    attached.connection.close()


def test_borrow_without_hit_returns_no_lease(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(3, start=1))
    reply = client.borrow([key(0), key(1)])
    assert (reply.count, reply.lent, reply.lease, reply.offsets) == (0, 0, 0, b"")
    attached.close()


def test_borrow_leases_positions_with_all_suffixes(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    client = connect(daemon.ipc, arena=attached.token)
    suffixes = [b"\0", b"\1", b"\2"]
    positions = [key(n, 23) for n in range(3)]
    for n, position in enumerate(positions):
        for m, suffix in enumerate(suffixes):
            if (n, m) != (2, 1):
                client.put({position + suffix: block(10 * n + m)})
    reply = client.borrow(positions, suffixes)
    assert (reply.count, reply.lent) == (2, 2)
    found = [bytes(arena.view(offset, 4096)) for offset in numbers(reply.offsets)]
    assert found == [block(n) for n in (0, 1, 2, 10, 11, 12)]
    assert client.stats()["leases"] == 6, "the third position is held in part"
    client.release([reply.lease])
    arena.close()
    attached.connection.close()


def test_borrow_of_other_length_counts_without_lease(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token, block_bytes=[4096, 8192])
    client.put({key(0): block(0), key(1): block(1, 8192), key(2): block(2)})
    reply = client.borrow([key(n) for n in range(3)])
    assert (reply.count, reply.tiers, reply.lent) == (3, [3, 0, 0], 1)
    assert client.stats()["leases"] == 1
    attached.close()


def test_borrow_counts_ssd_blocks_without_promotion(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start("--memory", "4MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SSD_BLOCK])
    wanted = blocks(40, SSD_BLOCK)
    for at, payload in wanted.items():
        assert client.put({at: payload}) == [PutResult.STORED]
    assert daemon.terminate() == 0
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SSD_BLOCK])
    chain = list(wanted)
    assert again.get(chain[:3]) == {at: wanted[at] for at in chain[:3]}  # into memory with them
    attached = attach(daemon.ipc_path)
    other = connect(daemon.ipc, arena=attached.token, block_bytes=[SSD_BLOCK])
    reply = other.borrow(chain, length=SSD_BLOCK)
    assert (reply.count, reply.tiers, reply.lent) == (40, [3, 37, 0], 3)
    assert other.match(chain).tiers == [3, 37, 0], "a lookup brought blocks into memory"
    attached.close()


def test_lookup_leases_are_limited_to_quarter(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "1MiB")
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    for n in range(120):
        client.put(blocks(1, start=n))
    chain = [key(n) for n in range(120)]
    first = client.borrow(chain)
    assert (first.count, first.lent) == (120, 64)
    second = client.borrow(chain)
    assert (second.count, second.lent, second.lease) == (120, 0, 0)
    leased = client.lend(chain[:10])
    assert all(leased.leases)
    reserved = client.reserve({key(n): 4096 for n in range(1000, 1010)})
    assert all(reserved.leases)
    assert client.release([first.lease]) == 1
    assert client.borrow(chain).lent == 64, "room that came back is not leased again"
    attached_too = attach(daemon.ipc_path)
    other = connect(daemon.ipc, arena=attached_too.token)
    assert other.borrow(chain).lent > 0, "one process may take all that lookups may lease"
    attached.close()
    attached_too.close()


def test_lookup_lease_survives_eviction_and_delete(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "1MiB")
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(attached.fd, attached.answer["capacity"])
    client = connect(daemon.ipc, arena=attached.token)
    client.put(blocks(8))
    reply = client.borrow([key(n) for n in range(8)])
    push_out(client, 1000)
    client.ask(wire.Delete(len(key(0)), [key(3)]))
    push_out(client, 2000)
    offsets = numbers(reply.offsets)
    assert [bytes(arena.view(offset, 4096)) for offset in offsets] == [block(n) for n in range(8)]
    assert [arena.generation(offset) for offset in offsets] == numbers(reply.generations)
    client.release([reply.lease])
    push_out(client, 3000)
    assert client.tiers([key(n) for n in range(8)]) == [0] * 8
    arena.close()
    attached.connection.close()


def test_borrow_updates_recency(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "1MiB")
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    for n in range(200):
        client.put(blocks(1, start=n))
    client.release([client.borrow([key(n) for n in range(20)]).lease])
    for n in range(200):
        client.put(blocks(1, start=1000 + n))
    assert client.tiers([key(n) for n in range(20)]) == [1] * 20
    assert client.tiers([key(n) for n in range(20, 40)]) == [0] * 20
    attached.close()


_BORROWER = """
    import sys, time
    from tests.daemon.raw_client import RawClient, attach, key
    attached = attach(sys.argv[1])
    client = RawClient("ipc://" + sys.argv[1])
    client.hello(arena=attached.token)
    print(client.borrow([key(n) for n in range(4)]).lent, flush=True)
    time.sleep(600)
"""


def test_lookup_lease_ends_with_process(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    client = connect(daemon.endpoint)
    client.put(blocks(4))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_BORROWER), str(daemon.ipc_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "4"
        assert client.stats()["leases"] == 4
    finally:
        process.kill()
        process.wait()
    eventually(lambda: client.stats()["leases"] == 0)
    assert client.stats()["leased_bytes"] == 0


def test_borrow_with_wrong_key_width_is_refused(start: StartDaemon, connect: Connect) -> None:
    daemon = start()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, arena=attached.token)
    with pytest.raises(Refused) as refused:
        client.borrow([key(1)], [b"\0"])
    assert refused.value.code is ErrorCode.MISMATCH
    attached.close()


def test_borrow_without_shared_memory_is_not_offered(start: StartDaemon, connect: Connect) -> None:
    with RawClient(start().endpoint) as client:
        assert "borrow" in client.hello().capabilities
    lonely = start(listen=["tcp://127.0.0.1:*"])
    with RawClient(lonely.endpoint) as client:
        assert "borrow" not in client.hello().capabilities
