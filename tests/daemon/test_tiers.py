"""Memory over SSD over a shared folder, through a daemon that is stopped, killed and restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import (
    KEY_BYTES,
    NAMESPACE,
    RawClient,
    Refused,
    attach,
    block,
    blocks,
    key,
    wire,
)
from tests.patience import eventually
from vllm_tiered_kv.core.store import Durability, PutResult, key_prefix
from vllm_tiered_kv.device.shared_arena import SharedArena
from vllm_tiered_kv.errors import ErrorCode

KIB = 1 << 10
MIB = 1 << 20
SIZE = 64 * KIB

MEMORY, SSD = 1, 2  # tiers as `contains` numbers them
SMALL = ("--memory", "4MiB", "--ssd-space", "64MiB")


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.api.cli", "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_evicted_blocks_are_served_from_ssd(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(200, SIZE)
    for k, payload in wanted.items():
        assert client.put({k: payload}) == [PutResult.STORED]
        if k[0] % 16 == 0:
            client.ask(wire.Flush())  # the disk must not fall behind
    client.ask(wire.Flush())
    reply = client.match(list(wanted))
    assert reply.count == 200
    assert reply.tiers[1] > 100
    assert reply.tiers[0] > 10
    assert client.get(list(wanted), stream=True) == wanted
    stats = client.stats()
    assert stats["promoted_blocks"]["ssd"] > 100
    assert stats["used_bytes"]["memory"] <= 4 * MIB
    assert stats["used_bytes"]["ssd"] <= 64 * MIB


def test_prompt_larger_than_memory_is_served(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"))
    attached = attach(daemon.ipc_path)
    arena = SharedArena.attach(os.dup(attached.fd), attached.answer["capacity"])
    client = connect(daemon.ipc, block_bytes=[SIZE], arena=attached.token)
    wanted = blocks(200, SIZE)  # three times the memory, in one chain
    chain = list(wanted)
    for n in range(0, 200, 10):
        some = {k: wanted[k] for k in chain[n : n + 10]}
        parents = [chain[n + i - 1] if n + i else None for i in range(10)]
        assert client.put(some, parents=parents) == [PutResult.STORED] * 10
        client.ask(wire.Flush())  # the disk must not fall behind
    assert client.match(chain).count == 200
    for _ in range(2):
        assert client.get(chain, stream=True) == wanted
    for n in range(0, 200, 20):
        lent = client.lend(chain[n : n + 20])
        assert all(lent.leases)
        where = zip(lent.offsets, lent.lengths, strict=True)
        found = [bytes(arena.view(at, length)) for at, length in where]
        assert found == [wanted[k] for k in chain[n : n + 20]]
        client.release(list(dict.fromkeys(lent.leases)))
    assert client.stats()["used_bytes"]["memory"] <= 4 * MIB
    arena.close()
    attached.close()


def put_and_flush(client: RawClient, wanted: dict[bytes, bytes]) -> None:
    """In parts that the write queue has room for, so that nothing depends on how fast it is."""
    chain = list(wanted)
    for n in range(0, len(chain), 10):
        some = {k: wanted[k] for k in chain[n : n + 10]}
        assert client.put(some) == [PutResult.STORED] * len(some)
        client.ask(wire.Flush())


def ssd_writes(client: RawClient) -> int:
    """How many blocks the SSD has stored, without those deleted."""
    stats = client.stats()
    return int(stats["blocks"]["ssd"] + stats.get("evicted_blocks", {}).get("ssd", 0))


@pytest.mark.parametrize(
    ("size", "count", "memory", "space"),
    [
        pytest.param(SIZE, 400, "8MiB", "4MiB", id="fewer bytes"),
        pytest.param(4 * KIB, 1500, "4MiB", "16MiB", id="full index"),
    ],
)
def test_ssd_with_fewer_blocks_than_memory_writes_each_once(
    start: StartDaemon,
    connect: Connect,
    folder: Path,
    size: int,
    count: int,
    memory: str,
    space: str,
) -> None:
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", space)
    daemon = start("--memory", memory, *ssd)
    client = connect(daemon.endpoint, block_bytes=[size])
    put_and_flush(client, blocks(count, size))
    stats = client.stats()
    assert stats["blocks"]["ssd"] < stats["blocks"]["memory"] < count
    assert ssd_writes(client) == count
    assert daemon.terminate() == 0
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[size])
    assert again.stats()["blocks"]["ssd"] == stats["blocks"]["ssd"]


def test_block_used_since_the_ssd_evicted_it_is_written_again(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    """When memory evicts it. The SSD has seen nothing of that use."""
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "4MiB")
    daemon = start("--memory", "8MiB", *ssd)
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    put_and_flush(client, blocks(100, SIZE))
    assert client.get([key(0)]) == {key(0): block(0, SIZE)}
    assert client.stats()["hit_blocks"] == {"memory": 1}
    assert ssd_writes(client) == 100
    count = 100
    while client.tiers([key(0)]) == [MEMORY] and count < 400:
        put_and_flush(client, blocks(10, SIZE, start=count))
        count += 10
    assert client.tiers([key(0), key(1)]) == [SSD, 0]
    assert ssd_writes(client) == count + 1
    assert client.get([key(0)]) == {key(0): block(0, SIZE)}


def test_block_promoted_from_backing_is_written_to_ssd_when_memory_evicts_it(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    shared = f"file://{folder / 'shared'}"
    backing = ("--backing", shared, "--backing-space", "1GiB", "--backing-timeout", "30s")
    (folder / "shared").mkdir()
    first = start("--memory", "4MiB", *backing)
    put_and_flush(connect(first.endpoint, block_bytes=[SIZE]), blocks(1, SIZE))
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"), *backing)
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    assert client.get([key(0)]) == {key(0): block(0, SIZE)}
    client.ask(wire.Flush())
    assert ssd_writes(client) == 0
    put_and_flush(client, blocks(100, SIZE, start=1))
    assert client.tiers([key(0)]) == [SSD]
    assert ssd_writes(client) == 101


def test_sigterm_writes_everything_and_a_restart_finds_it(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(100, SIZE)
    for k, payload in wanted.items():
        assert client.put({k: payload}) == [PutResult.STORED]
    assert daemon.terminate() == 0
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SIZE])
    assert again.match(list(wanted)).tiers == [0, 100, 0]
    # It knows its disk before anybody reads from it, and nothing has moved for that.
    eventually(lambda: again.stats().get("read_bytes_per_second", {}).get("ssd", 0) > 0)
    assert again.match(list(wanted)).tiers == [0, 100, 0]
    assert again.get(list(wanted), stream=True) == wanted
    assert again.match(list(wanted)).tiers == [100, 0, 0]
    assert daemon.terminate() == 0
    sound = verify(folder / "ssd")
    assert sound.returncode == 0
    assert "100 blocks" in sound.stdout


def test_durable_put_survives_kill_9(start: StartDaemon, connect: Connect, folder: Path) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(20, SIZE)
    assert set(client.put(wanted, Durability.DISK)) == {PutResult.STORED}
    assert set(client.put(wanted, Durability.DISK)) == {PutResult.PRESENT}
    daemon.kill()
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SIZE])
    assert again.get(list(wanted)) == wanted


def test_flush_makes_everything_durable(start: StartDaemon, connect: Connect, folder: Path) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(20, SIZE)
    client.put(wanted)
    client.ask(wire.Flush())
    daemon.kill()
    daemon.restart()
    assert connect(daemon.endpoint, block_bytes=[SIZE]).get(list(wanted)) == wanted


def test_deleted_blocks_stay_deleted(start: StartDaemon, connect: Connect, folder: Path) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    for start_at in range(0, 100, 10):  # deleted while they are being written behind
        some = blocks(10, SIZE, start_at)
        client.put(some)
        assert client.ask(wire.Delete(KEY_BYTES, list(some))).count == 10
    keys = [key(n) for n in range(100)]
    client.ask(wire.Flush())
    assert client.tiers(keys) == [0] * 100
    assert daemon.terminate() == 0
    daemon.restart()
    assert connect(daemon.endpoint, block_bytes=[SIZE]).tiers(keys) == [0] * 100


def test_deleted_blocks_stay_deleted_after_crash(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    client.put(blocks(10, SIZE), Durability.DISK)
    keys = [key(n) for n in range(10)]
    assert client.ask(wire.Delete(KEY_BYTES, keys[3:7])).count == 4
    daemon.kill()
    daemon.restart()
    there = connect(daemon.endpoint, block_bytes=[SIZE]).tiers(keys)
    assert [bool(tier) for tier in there] == [True] * 3 + [False] * 4 + [True] * 3


def test_blocks_on_ssd_can_be_leased_and_pinned(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start("--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    client.put(blocks(30, SIZE))
    assert daemon.terminate() == 0
    daemon.restart()
    attached = attach(daemon.ipc_path)
    client = connect(daemon.ipc, block_bytes=[SIZE], arena=attached.token)
    lent = client.lend([key(n) for n in range(10)])
    assert all(lent.leases)
    assert client.match([key(n) for n in range(30)], pin_ms=60_000).tiers == [10, 20, 0]
    eventually(lambda: client.stats()["pins"] == 30)
    assert client.match([key(n) for n in range(30)]).tiers == [30, 0, 0]
    attached.close()


def test_namespace_shape_survives_restart(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"))
    connect(daemon.endpoint, block_bytes=[SIZE]).put(blocks(3, SIZE))
    assert daemon.terminate() == 0
    known = json.loads((folder / "ssd" / "namespaces.json").read_text())
    assert known["namespaces"][NAMESPACE.hex()]["block_bytes"] == [SIZE]
    daemon.restart()
    looker = connect(daemon.endpoint, block_bytes=[])
    [(name, row)] = looker.ask(wire.Info()).facts["by_namespace"].items()
    assert (name, row["model"]) == (key_prefix(NAMESPACE).hex(), "test")
    assert (row["ssd_blocks"], row["ssd_bytes"], row["memory_blocks"]) == (3, 3 * SIZE, 0)
    with pytest.raises(Refused) as refused:
        connect(daemon.endpoint, block_bytes=[2 * SIZE])
    assert refused.value.code is ErrorCode.MISMATCH
    assert daemon.terminate() == 0
    (folder / "ssd" / "namespaces.json").write_text("{not json")
    daemon.restart()
    assert "namespaces.json is not used" in daemon.logs
    connect(daemon.endpoint, block_bytes=[2 * SIZE])


def test_second_daemon_on_ssd_folder_is_refused(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    first = start(*SMALL, "--ssd", str(folder / "ssd"))
    other = DaemonProcess(folder, *SMALL, "--ssd", str(folder / "ssd"))
    other.launch()
    assert other.wait() == 2, "no restart mends it"
    assert f"is in use by process {first.pid}" in other.logs
    assert "Traceback" not in other.logs
    connect(first.endpoint, block_bytes=[SIZE]).put(blocks(1, SIZE))
    locked = verify(folder / "ssd")
    assert locked.returncode == 2
    assert "is in use" in locked.stderr


def test_foreign_ssd_folder_is_refused(folder: Path) -> None:
    (folder / "ssd").mkdir()
    (folder / "ssd" / "holiday.jpg").write_bytes(b"x")
    daemon = DaemonProcess(folder, *SMALL, "--ssd", str(folder / "ssd"))
    daemon.launch()
    assert daemon.wait() == 2
    assert "holiday.jpg" in daemon.logs
    assert "Traceback" not in daemon.logs
    assert os.listdir(folder / "ssd") == ["holiday.jpg"] or "LOCK" in os.listdir(folder / "ssd")


def test_verify_finds_damage(start: StartDaemon, connect: Connect, folder: Path) -> None:
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"))
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    wanted = blocks(10, SIZE)
    client.put(wanted)
    assert daemon.terminate() == 0
    data = folder / "ssd" / "data"
    content = data.read_bytes()
    at = content.index(block(3, SIZE))
    with data.open("r+b") as file:
        file.seek(at + 1000)
        file.write(b"flipped")
    damaged = verify(folder / "ssd")
    assert damaged.returncode == 1
    assert "1 blocks do not match their checksum" in damaged.stdout
    assert key(3).hex() in damaged.stdout
    daemon.restart()
    again = connect(daemon.endpoint, block_bytes=[SIZE])
    assert again.get(list(wanted)) == {k: v for k, v in wanted.items() if k != key(3)}
    assert again.stats()["damaged_blocks"]["ssd"] == 1


def test_two_daemons_share_a_backing_folder(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    backing = f"file://{folder / 'shared'}"
    (folder / "shared").mkdir()
    options = ("--memory", "16MiB", "--backing", backing, "--backing-space", "1GiB")
    one = start(*options, "--backing-timeout", "30s")
    other = start(*options, "--backing-timeout", "30s")
    client = connect(one.endpoint, block_bytes=[SIZE])
    wanted = blocks(10, SIZE)
    client.put(wanted)
    client.ask(wire.Flush())
    reader = connect(other.endpoint, block_bytes=[SIZE])
    assert reader.match([*wanted, key(99)]).tiers == [0, 0, 10]
    assert reader.tiers([key(0), key(99)]) == [3, 0]
    assert reader.get([*wanted, key(99)], stream=True) == wanted
    assert reader.match(list(wanted)).tiers == [10, 0, 0]
    assert reader.ask(wire.Delete(KEY_BYTES, [key(0)])).count == 1
    assert reader.tiers([key(0)]) == [0]
    assert one.terminate() == 0
    assert other.terminate() == 0


def test_quota_protects_other_namespaces(start: StartDaemon, connect: Connect) -> None:
    greedy, modest = bytes([0xAB]) * 32, bytes([0xCD]) * 32
    quota = f"{key_prefix(greedy).hex()[:8]}=1MiB"
    daemon = start("--memory", "4MiB", "--memory-quota", "2MiB", "--memory-quota", quota)
    one = connect(daemon.endpoint, namespace=modest)
    for n in range(256):
        one.put(blocks(1, start=n))
    other = connect(daemon.endpoint, namespace=greedy)
    assert f"namespace {quota[:8]}" in daemon.logs  # where its name is to be found
    for n in range(2000):
        other.put(blocks(1, start=n))
    assert one.match([key(n) for n in range(256)]).count == 256
    held = sum(tier == 1 for n in range(2000) for tier in other.tiers([key(n)]))
    assert held == MIB // 4096


def test_tiny_namespaces_do_not_evict_large_one(start: StartDaemon, connect: Connect) -> None:
    daemon = start("--memory", "4MiB", "--memory-quota", "eeeeee=1MiB")
    large = connect(daemon.endpoint, namespace=bytes([0xAB]) * 32)
    for n in range(900):
        large.put(blocks(1, start=n))
    for n in range(40):
        other = connect(daemon.endpoint, namespace=bytes([n]) * 32)
        assert other.put(blocks(1)) == [PutResult.STORED]
    assert sum(tier == 1 for tier in large.tiers([key(n) for n in range(900)])) == 900


def test_quota_applies_to_clients_that_only_look_up(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    """Promoted blocks count, even if such a client is the first after a restart."""
    daemon = start(*SMALL, "--ssd", str(folder / "ssd"), "--memory-quota", "1MiB")
    wanted = blocks(40, SIZE)
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    for k, payload in wanted.items():
        client.put({k: payload}, Durability.DISK)
    assert daemon.terminate() == 0
    daemon.restart()
    reader = connect(daemon.endpoint, block_bytes=[])
    assert reader.get(list(wanted), stream=True) == wanted
    assert reader.stats()["used_bytes"]["memory"] <= MIB


def test_oversized_reply_stops_reading_early(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    daemon = start(
        "--memory", "32MiB", "--ssd-space", "64MiB", "--ssd", str(folder / "ssd"), "--workers", "1"
    )  # fmt: skip
    wanted = blocks(700, SIZE)
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    for k, payload in wanted.items():
        assert client.put({k: payload}, Durability.DISK) == [PutResult.STORED]
    assert daemon.terminate() == 0
    daemon.restart()
    client = connect(daemon.endpoint, block_bytes=[SIZE])
    with pytest.raises(Refused) as refused:
        client.get(list(wanted))
    assert refused.value.code is ErrorCode.TOO_LARGE
    eventually(lambda: client.stats()["reply_bytes"] == 0)
    assert client.stats()["promoted_blocks"]["ssd"] < 400
    assert client.get(list(wanted), stream=True) == wanted


def test_failing_backing_folder_is_counted(
    start: StartDaemon, connect: Connect, folder: Path
) -> None:
    shared = folder / "shared"
    shared.mkdir()
    backing = ("--backing", f"file://{shared}", "--backing-ttl", "1d", "--backing-timeout", "30s")
    one = start("--memory", "16MiB", *backing)
    client = connect(one.endpoint, block_bytes=[SIZE])
    client.put(blocks(1, SIZE))
    client.ask(wire.Flush())
    (file,) = (f for f in shared.rglob("*") if f.is_file() and f.stat().st_size >= SIZE)
    file.write_bytes(bytes(file.stat().st_size))
    other = start("--memory", "16MiB", *backing)
    reader = connect(other.endpoint, block_bytes=[SIZE])
    assert reader.get([key(0)]) == {}
    assert reader.stats()["damaged_blocks"]["backing"] == 1
    shared.rename(folder / "gone")
    reader.put(blocks(3, SIZE, start=7))
    eventually(lambda: reader.stats().get("failed_writes") == {"backing": 3})
    with pytest.raises(Refused, match="3 blocks could not be written to backing"):
        reader.ask(wire.Flush())
