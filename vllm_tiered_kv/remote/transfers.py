"""Bulk transfers of blocks over one connection, with several requests in flight.

A large `get` or `put` is split into requests of a bounded size. While the bytes of one request are
copied or checked, the next ones are in flight, so that the network does not idle. The receiving
thread copies and checks blocks in one pass, which is faster than the network.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult
from vllm_tiered_kv.errors import ConnectionLost
from vllm_tiered_kv.native.cpu import copy_and_hash, hash_buffers
from vllm_tiered_kv.native.memory import keep_large_buffers
from vllm_tiered_kv.remote.connection import Connection, Incoming
from vllm_tiered_kv.wire.limits import MAX_FRAMES
from vllm_tiered_kv.wire.messages import Get, GetReply, Limits, Put, PutReply, put_results

READ_BYTES = 4 << 20  # of one request: a load ends only after the last request is copied
READS_IN_FLIGHT = 6
# Writes are larger: no request waits for a block that is written, and each message costs the daemon
# a turn of its event loop. But the bytes in flight of a connection should fit one glibc heap
# (64 MiB), because glibc returns most further heaps to the kernel when they become empty, even
# after `keep_large_buffers`.
WRITE_BYTES = 16 << 20
WRITES_IN_FLIGHT = 3
SMALL_WRITE_BYTES = 4 << 20  # of the first and the last request

_T = TypeVar("_T")


@dataclass(slots=True)
class ReadTask:
    """A block to read, and the result."""

    key: bytes  # without its namespace
    into: memoryview
    found: bool = False
    damaged: bool = False


@dataclass(slots=True)
class WriteTask:
    """A block to write, and the result."""

    key: bytes  # without its namespace
    parent: bytes | None
    item: PutItem
    result: PutResult = PutResult.FAILED


@dataclass(slots=True)
class _Reading:
    tasks: list[ReadTask]
    seen: set[int] = field(default_factory=set)


def read(connection: Connection, tasks: Sequence[ReadTask], deadline: float) -> None:
    """Reads blocks and sets the tasks' results. If it raises, tasks marked as found are complete
    and verified, and nothing writes to the buffers of the others after that."""
    keep_large_buffers()
    lengths = [task.into.nbytes for task in tasks]
    waiting = deque(_cut(tasks, lengths, _read_bytes, connection.limits))
    reading: dict[int, _Reading] = {}

    def ask() -> None:
        while waiting and len(reading) < READS_IN_FLIGHT:
            batch = waiting.popleft()
            request = Get(len(batch[0].key), [task.key for task in batch], stream=True)
            reading[connection.send(request, deadline=deadline)] = _Reading(batch)

    ask()
    while reading:
        incoming = connection.receive(deadline=deadline)
        assert isinstance(incoming.reply, GetReply)
        asked = reading[incoming.request_id]
        if not incoming.reply.more:
            del reading[incoming.request_id]
            ask()
        _copy_and_check(_arrivals(incoming, incoming.reply, asked))


def _arrivals(incoming: Incoming, reply: GetReply, asked: _Reading) -> list[_Arrival]:
    """Matches received blocks to their tasks; leaves out blocks of an unexpected length."""
    arrivals = []
    facts = zip(reply.positions, reply.checksums, incoming.payload, strict=True)
    for position, checksum, payload in facts:
        if position >= len(asked.tasks) or position in asked.seen:
            raise ConnectionLost("the daemon sent a block that was not requested")
        asked.seen.add(position)
        task = asked.tasks[position]
        if payload.nbytes == task.into.nbytes:
            arrivals.append(_Arrival(task, payload, checksum))
    return arrivals


@dataclass(frozen=True, slots=True)
class _Arrival:
    task: ReadTask
    payload: memoryview
    checksum: int


def _copy_and_check(arrivals: Sequence[_Arrival]) -> None:
    checksums = copy_and_hash(
        [arrival.task.into for arrival in arrivals], [arrival.payload for arrival in arrivals]
    )
    for arrival, checksum in zip(arrivals, checksums, strict=True):
        arrival.task.found = checksum == arrival.checksum
        arrival.task.damaged = not arrival.task.found


def write(
    connection: Connection, tasks: Sequence[WriteTask], durability: Durability, deadline: float
) -> None:
    """Writes blocks and sets the tasks' results. No payload is read after it returns or raises."""
    dropped: set[bytes] = set()  # blocks that did not fit, and their descendants
    for task in tasks:
        if task.item.payload.nbytes > connection.limits.message_bytes:
            task.result = PutResult.DROPPED
            dropped.add(task.key)
    dropped |= _descendants(tasks, dropped)
    fitting = [task for task in tasks if task.result is not PutResult.DROPPED]
    lengths = [task.item.payload.nbytes for task in fitting]
    waiting = deque(_cut(fitting, lengths, _write_bytes, connection.limits))
    writing: dict[int, list[WriteTask]] = {}

    def offer() -> None:
        while waiting and len(writing) < WRITES_IN_FLIGHT:
            batch = []
            for task in waiting.popleft():
                if task.parent in dropped:  # without its parent no lookup would find it
                    task.result = PutResult.DROPPED
                else:
                    batch.append(task)
            if batch:
                writing[_send_put(connection, batch, durability, deadline)] = batch

    offer()
    while writing:
        incoming = connection.receive(deadline=deadline)
        assert isinstance(incoming.reply, PutReply)
        sent = writing.pop(incoming.request_id)
        results = put_results(incoming.reply.results)
        if len(results) != len(sent):
            raise ConnectionLost(f"{len(results)} results for {len(sent)} blocks")
        for task, result in zip(sent, results, strict=True):
            task.result = result
        newly_dropped = {task.key for task in sent if task.result is PutResult.DROPPED}
        if newly_dropped:
            dropped |= newly_dropped
            dropped.update(_descendants(tasks, dropped))
        offer()
    connection.settle(deadline=deadline)


def hash_first_request(tasks: Sequence[WriteTask]) -> None:
    """Computes the checksums of the first request's blocks, while the caller waits for another
    reply. It hashes no more than these, because the daemon may have the blocks already."""
    nbytes = 0
    first = []
    for task in tasks:
        nbytes += task.item.payload.nbytes
        if nbytes > SMALL_WRITE_BYTES:
            break
        if task.item.checksum is None:
            first.append(task)
    sums = hash_buffers([task.item.payload for task in first])
    for task, checksum in zip(first, sums, strict=True):
        task.item = task.item._replace(checksum=checksum)


def _descendants(tasks: Sequence[WriteTask], heads: set[bytes]) -> set[bytes]:
    """Returns the blocks that follow the heads in their chains. Tasks are in chain order."""
    found: set[bytes] = set()
    for task in tasks:
        if task.parent is not None and (task.parent in heads or task.parent in found):
            found.add(task.key)
    return found


def _send_put(
    connection: Connection, tasks: list[WriteTask], durability: Durability, deadline: float
) -> int:
    items = [task.item for task in tasks]
    sums = iter(hash_buffers([item.payload for item in items if item.checksum is None]))
    request = Put(
        len(tasks[0].key),
        [task.key for task in tasks],
        [task.parent for task in tasks],
        [item.payload.nbytes for item in items],
        [next(sums) if item.checksum is None else item.checksum for item in items],
        durability,
    )
    return connection.send(request, [item.payload for item in items], deadline=deadline)


def _read_bytes(number: int, left: int) -> int:
    return READ_BYTES


def _write_bytes(number: int, left: int) -> int:
    """Returns the size of a write request. The first and last are smaller: the network idles until
    the first one is hashed, and the caller waits until the last one is copied."""
    growing = SMALL_WRITE_BYTES << min(2 * number, 16)
    return max(SMALL_WRITE_BYTES, min(WRITE_BYTES, growing, left // 2))


def _cut(
    tasks: Sequence[_T],
    lengths: Sequence[int],
    request_bytes: Callable[[int, int], int],
    limits: Limits,
) -> Iterator[list[_T]]:
    """Splits tasks into runs that fit one request; a block larger than a request goes alone.
    `request_bytes` returns the size of a request from its number and the bytes left."""
    max_blocks = max(1, min(MAX_FRAMES, limits.frames, limits.keys))
    left = sum(lengths)
    first = 0
    for number in itertools.count():
        if first == len(tasks):
            return
        max_bytes = min(request_bytes(number, left), limits.message_bytes)
        last, nbytes = first + 1, lengths[first]
        while (
            last < len(tasks) and last - first < max_blocks and nbytes + lengths[last] <= max_bytes
        ):
            nbytes += lengths[last]
            last += 1
        yield list(tasks[first:last])
        first, left = last, left - nbytes
