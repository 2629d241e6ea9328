"""A store behind the daemon beside its own client library, over loopback.

    python -m benchmarks.distributed_store --store redis --out result.json

Starts a Redis server, or a Mooncake master with two store nodes, and moves blocks between it and
buffers that exist before: with the store that the daemon uses, and with the client library, as its
users would do it. With redis-py these are pipelines (`SET … NX`, `GET` and a copy into the buffer,
`EXISTS`), with Mooncake its batched calls on registered memory. A client neither verifies nor
checksums; the store does both. To tell what that costs, Mooncake's client also runs with what the
store adds: `client_header` moves a header beside each block, in memory of its own as the store
does, and `client_verified` computes the checksums too. Each round runs all, the first one last in
the next round; ratios are of the same round and above 1 where the client alone is slower.
`cpu_seconds` is the processor time of this process, as others may be busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.result_files import describe_environment, save, spread
from tests.stores.mooncake_servers import mooncake_servers
from tests.stores.redis_servers import redis_server
from vllm_tiered_kv.core.store import PutItem, PutResult, StoreKey
from vllm_tiered_kv.native.cpu import HostRegion, hash_buffers
from vllm_tiered_kv.options import format_size, parse_size
from vllm_tiered_kv.stores.block_format import HEADER_BYTES
from vllm_tiered_kv.stores.registry import BackingOptions, BackingStore, open_store

ACTIONS = ("put", "get", "get_one", "match")
BATCH_BYTES = 8 << 20  # of one call, for both
LOOKUPS = 2048


def key(number: int) -> StoreKey:
    return StoreKey(bytes(16) + number.to_bytes(17, "little") + bytes(8))


class Side(Protocol):
    """What is measured, for a fixed set of blocks."""

    def clear(self) -> None: ...

    def put(self, blocks: Sequence[memoryview]) -> None: ...

    def get(self, into: Sequence[memoryview]) -> None: ...

    def get_one(self, into: Sequence[memoryview]) -> None: ...

    def match(self, into: Sequence[memoryview]) -> None: ...


class OurStore:
    """The store of the daemon."""

    def __init__(self, store: BackingStore, block: int, count: int) -> None:
        self._store = store
        self._keys = [key(n) for n in range(count)]
        self._batch = max(1, BATCH_BYTES // block)
        self._lookups = [key(n % count) for n in range(LOOKUPS)]

    def clear(self) -> None:
        self._store.delete(self._keys)

    def put(self, blocks: Sequence[memoryview]) -> None:
        items = [PutItem(key, None, b) for key, b in zip(self._keys, blocks, strict=True)]
        for start in range(0, len(items), self._batch):
            results = self._store.put(items[start : start + self._batch])
            assert set(results) == {PutResult.STORED}, results

    def get(self, into: Sequence[memoryview]) -> None:
        for start in range(0, len(into), self._batch):
            some = slice(start, start + self._batch)
            assert all(self._store.get(self._keys[some], into[some]))

    def get_one(self, into: Sequence[memoryview]) -> None:
        for key, buffer in zip(self._keys, into, strict=True):
            assert self._store.get([key], [buffer]) == [True]

    def match(self, into: Sequence[memoryview]) -> None:
        assert self._store.match(self._lookups) == len(self._lookups)


class RedisPy:
    """redis-py, as its users would move blocks."""

    def __init__(self, client: Any, block: int, count: int) -> None:
        self._client = client
        self._keys = [f"beside:{n}" for n in range(count)]
        self._batch = max(1, BATCH_BYTES // block)
        self._lookups = [f"beside:{n % count}" for n in range(LOOKUPS)]

    def clear(self) -> None:
        self._client.unlink(*self._keys)

    def put(self, blocks: Sequence[memoryview]) -> None:
        for start in range(0, len(blocks), self._batch):
            pipeline = self._client.pipeline(transaction=False)
            for n in range(start, min(start + self._batch, len(blocks))):
                pipeline.set(self._keys[n], blocks[n], nx=True)
            assert all(pipeline.execute())

    def get(self, into: Sequence[memoryview]) -> None:
        for start in range(0, len(into), self._batch):
            pipeline = self._client.pipeline(transaction=False)
            for key in self._keys[start : start + self._batch]:
                pipeline.get(key)
            for n, value in enumerate(pipeline.execute(), start):
                into[n][:] = value

    def get_one(self, into: Sequence[memoryview]) -> None:
        for key, buffer in zip(self._keys, into, strict=True):
            buffer[:] = self._client.get(key)

    def match(self, into: Sequence[memoryview]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in self._lookups:
            pipeline.exists(key)
        assert all(pipeline.execute())


class MooncakeLibrary:
    """Mooncake's own client, as its users would move blocks between it and registered memory; on
    demand with a header beside each block, and with the time of computing checksums."""

    def __init__(
        self, client: Any, block: int, count: int, header: int = 0, checksums: bool = False
    ) -> None:
        """`header`: the address of `HEADER_BYTES` for each block of a call; 0: without."""
        self._client = client
        self._size = block
        self._header = header
        self._checksums = checksums
        self._keys = [f"beside:{n}" for n in range(count)]
        self._batch = max(1, BATCH_BYTES // block)
        self._lookups = [f"beside:{n % count}" for n in range(LOOKUPS)]

    def clear(self) -> None:
        self._client.batch_remove(self._keys, True)

    def put(self, blocks: Sequence[memoryview]) -> None:
        for start in range(0, len(blocks), self._batch):
            some = slice(start, start + self._batch)
            if self._checksums:
                hash_buffers(blocks[some], threads=0)
            where = [address_of(block) for block in blocks[some]]
            sizes = [self._size] * len(where)
            if self._header:
                codes = self._client.batch_put_from_multi_buffers(
                    self._keys[some], *self._with_headers(where)
                )
            else:
                codes = self._client.batch_put_from(self._keys[some], where, sizes)
            assert not any(codes), codes

    def get(self, into: Sequence[memoryview], batch: int = 0) -> None:
        batch = batch or self._batch
        for start in range(0, len(into), batch):
            some = slice(start, start + batch)
            where = [address_of(buffer) for buffer in into[some]]
            sizes = [self._size] * len(where)
            if self._header:
                codes = self._client.batch_get_into_multi_buffers(
                    self._keys[some], *self._with_headers(where)
                )
            else:
                codes = self._client.batch_get_into(self._keys[some], where, sizes)
            assert set(codes) == {self._size + (HEADER_BYTES if self._header else 0)}, codes
            if self._checksums:
                hash_buffers(into[some], threads=0)

    def _with_headers(self, where: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        parts = [[self._header + n * HEADER_BYTES, address] for n, address in enumerate(where)]
        return parts, [[HEADER_BYTES, self._size]] * len(where)

    def get_one(self, into: Sequence[memoryview]) -> None:
        self.get(into, 1)

    def match(self, into: Sequence[memoryview]) -> None:
        assert set(self._client.batch_is_exist(self._lookups)) == {1}


Open = Callable[
    [int, int, Sequence[memoryview]], tuple[BackingStore, dict[str, Side], Callable[[], Any]]
]
"""Opens store and client for blocks of a size, their number, and the memory that they move in;
returns the store, the client in all its ways, and what closes it."""


@contextmanager
def beside_redis(url: str | None) -> Iterator[Open]:
    import redis

    def open_both(block: int, count: int, memory: Sequence[memoryview]) -> Any:
        client = redis.Redis.from_url(used, protocol=2)
        store = open_store(BackingOptions(used, timeout_s=60.0))
        return store, {"client": RedisPy(client, block, count)}, client.close

    if url is not None:
        used = url
        yield open_both
        return
    with redis_server() as server:
        used = server.url
        yield open_both


@contextmanager
def beside_mooncake(node_bytes: int) -> Iterator[Open]:
    from mooncake.store import MooncakeDistributedStore

    kept: list[memoryview] = []  # as long as a client may write to it

    def open_both(block: int, count: int, memory: Sequence[memoryview]) -> Any:
        client = MooncakeDistributedStore()
        master = f"127.0.0.1:{servers.master.port}"
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
        store = open_store(BackingOptions(servers.url, timeout_s=60.0))
        for view in memory:
            store.use_memory(HostRegion(address_of(view), view.nbytes))
        headers = memoryview(bytearray(max(1, BATCH_BYTES // block) * HEADER_BYTES))
        for view in (*memory, headers):
            client.register_buffer(address_of(view), view.nbytes)
        header = address_of(headers)
        sides = {
            "client": MooncakeLibrary(client, block, count),
            "client_header": MooncakeLibrary(client, block, count, header),
            "client_verified": MooncakeLibrary(client, block, count, header, checksums=True),
        }
        kept.append(headers)
        return store, sides, client.close

    with mooncake_servers(node_bytes) as servers:
        yield open_both


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    begin, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - used


def measure(open_both: Open, block: int, total: int, rounds: int) -> dict[str, Any]:
    count = max(1, total // block)
    content = memoryview(bytearray(os.urandom(count * block)))
    arena = memoryview(bytearray(count * block))
    blocks = [content[n * block : (n + 1) * block] for n in range(count)]
    into = [arena[n * block : (n + 1) * block] for n in range(count)]
    store, clients, close_client = open_both(block, count, [content, arena])
    sides: dict[str, Side] = {"store": OurStore(store, block, count), **clients}
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {
        action: {side: [] for side in sides} for action in ACTIONS
    }
    for number in range(rounds + 1):  # the first one warms up
        for side, one in sorted(sides.items(), reverse=bool(number % 2)):
            one.clear()
            for action in ACTIONS:
                where = blocks if action == "put" else into
                took = timed(lambda one=one, a=action, w=where: getattr(one, a)(w))  # type: ignore[misc]
                if number:
                    samples[action][side].append(took)
            assert arena == content, f"{side} returned other bytes"
            arena[:] = bytes(len(arena))
            one.clear()
    store.close()
    close_client()
    return {"block_bytes": block, "blocks": count, **{a: row(samples[a], count * block, a)
                                                     for a in ACTIONS}}  # fmt: skip


def row(by_side: dict[str, list[tuple[float, float]]], nbytes: int, action: str) -> dict[str, Any]:
    found: dict[str, Any] = beside(by_side["store"], by_side["client"])
    for side, samples in by_side.items():
        seconds = statistics.median(wall for wall, _ in samples)
        if action == "match":
            found[side] = {"us_per_key": round(1e6 * seconds / LOOKUPS, 2)}
        else:
            found[side] = {"gb_per_s": round(nbytes / seconds / 1e9, 3)}
        found[side]["cpu_seconds"] = round(statistics.median(cpu for _, cpu in samples), 4)
        if side not in ("store", "client"):
            found[side] |= beside(samples, by_side["client"])
    if "client_verified" in by_side:
        found["of_client_verified"] = beside(by_side["store"], by_side["client_verified"])
    return found


def beside(samples: list[tuple[float, float]], client: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        name: spread([them[n] / one[n] for one, them in zip(samples, client, strict=True)])
        for n, name in enumerate(("ratio", "cpu_ratio"))
    }


CLIENTS = {"redis": ("redis", "hiredis"), "mooncake": ("mooncake-transfer-engine-non-cuda",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=CLIENTS, required=True)
    parser.add_argument("--url", help="of a Redis that may be used; default: start one")
    parser.add_argument("--blocks", nargs="+", default=["256KiB", "1MiB", "4MiB"])
    parser.add_argument("--total", default="256MiB", help="bytes of all blocks of a size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args()
    total = parse_size("--total", args.total)
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "store": args.store,
        "client": [f"{name} {version(name)}" for name in CLIENTS[args.store]],
        "load_average_before": os.getloadavg()[0],
        "sizes": [],
    }
    begin = beside_redis(args.url) if args.store == "redis" else beside_mooncake(2 * total)
    with begin as open_both:
        for block in (parse_size("--blocks", size) for size in args.blocks):
            found = measure(open_both, block, total, args.rounds)
            report["sizes"].append(found)
            for action in ACTIONS:
                one = found[action]
                print(format_size(block), action, f"ratio {one['ratio']['median']}",
                      f"cpu {one['cpu_ratio']['median']}", one["store"], one["client"],
                      flush=True)  # fmt: skip
            save(args.out, report)


if __name__ == "__main__":
    main()
