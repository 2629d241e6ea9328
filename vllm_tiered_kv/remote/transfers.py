"""Blocks in bulk over one connection, several requests deep.

A large `get` or `put` is cut into requests of a bounded size, and the next ones are under way while
the bytes of one are copied or checked, so that the wire does not idle. What arrives is copied and
checked in one pass by the thread that received it, which is faster than the wire.
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

READ_BYTES = 4 << 20  # of one request: the last bytes wait for so many to be copied
READS_UNDER_WAY = 6
# Nobody waits for a block that is written, and each request costs the daemon a turn of its loop.
# But what a connection has under way should fit a heap of glibc's (64 MiB): further ones are mostly
# given back to the kernel when they fall empty, also after `keep_large_buffers`.
WRITE_BYTES = 16 << 20
WRITES_UNDER_WAY = 3
SMALL_WRITE_BYTES = 4 << 20  # the first and the last

_T = TypeVar("_T")


@dataclass(slots=True)
class ReadTask:
    """A block to read, and what became of it."""

    key: bytes  # as it travels
    into: memoryview
    found: bool = False
    damaged: bool = False


@dataclass(slots=True)
class WriteTask:
    """A block to write, and what became of it."""

    key: bytes  # as it travels
    parent: bytes | None
    item: PutItem
    result: PutResult = PutResult.FAILED


@dataclass(slots=True)
class _Reading:
    tasks: list[ReadTask]
    seen: set[int] = field(default_factory=set)


def read(connection: Connection, tasks: Sequence[ReadTask], deadline: float) -> None:
    """Fills in the tasks. When it raises, those that are marked found are whole and verified, and
    nothing is written to the others' buffers any more."""
    keep_large_buffers()
    lengths = [task.into.nbytes for task in tasks]
    waiting = deque(_cut(tasks, lengths, _read_bytes, connection.limits))
    reading: dict[int, _Reading] = {}

    def ask() -> None:
        while waiting and len(reading) < READS_UNDER_WAY:
            some = waiting.popleft()
            request = Get(len(some[0].key), [task.key for task in some], stream=True)
            reading[connection.send(request, deadline=deadline)] = _Reading(some)

    ask()
    while reading:
        incoming = connection.receive(deadline=deadline)
        assert isinstance(incoming.reply, GetReply)
        asked = reading[incoming.request_id]
        if not incoming.reply.more:
            del reading[incoming.request_id]
            ask()
        _land(_arrivals(incoming, incoming.reply, asked))


def _arrivals(incoming: Incoming, reply: GetReply, asked: _Reading) -> list[_Arrival]:
    """What came, as far as it fits what was asked for."""
    arrivals = []
    facts = zip(reply.positions, reply.checksums, incoming.payload, strict=True)
    for position, checksum, payload in facts:
        if position >= len(asked.tasks) or position in asked.seen:
            raise ConnectionLost("the daemon sent a block that was not asked for")
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


def _land(arrivals: Sequence[_Arrival]) -> None:
    checksums = copy_and_hash(
        [arrival.task.into for arrival in arrivals], [arrival.payload for arrival in arrivals]
    )
    for arrival, checksum in zip(arrivals, checksums, strict=True):
        arrival.task.found = checksum == arrival.checksum
        arrival.task.damaged = not arrival.task.found


def write(
    connection: Connection, tasks: Sequence[WriteTask], durability: Durability, deadline: float
) -> None:
    """Fills in the results. No payload is read after it has returned or raised."""
    headless: set[bytes] = set()  # found no room, or follow one that did not
    for task in tasks:
        if task.item.payload.nbytes > connection.limits.message_bytes:
            task.result = PutResult.DROPPED
            headless.add(task.key)
    headless |= _descendants(tasks, headless)
    fitting = [task for task in tasks if task.result is not PutResult.DROPPED]
    lengths = [task.item.payload.nbytes for task in fitting]
    waiting = deque(_cut(fitting, lengths, _write_bytes, connection.limits))
    writing: dict[int, list[WriteTask]] = {}

    def offer() -> None:
        while waiting and len(writing) < WRITES_UNDER_WAY:
            some = []
            for task in waiting.popleft():
                if task.parent in headless:  # it could never be found
                    task.result = PutResult.DROPPED
                else:
                    some.append(task)
            if some:
                writing[_send_put(connection, some, durability, deadline)] = some

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
        dropped = {task.key for task in sent if task.result is PutResult.DROPPED}
        if dropped:
            headless |= dropped
            headless.update(_descendants(tasks, headless))
        offer()
    connection.settle(deadline=deadline)


def hash_first(tasks: Sequence[WriteTask]) -> None:
    """Checksums for the first request, which cannot leave without them: for when there is something
    else to wait for. No more than that, for the daemon may have the blocks."""
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
    """What follows the heads in their chains. Tasks are in chain order."""
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
    """Less at both ends: the wire idles until the first request is hashed, and the caller waits
    until the last one is copied."""
    growing = SMALL_WRITE_BYTES << min(2 * number, 16)
    return max(SMALL_WRITE_BYTES, min(WRITE_BYTES, growing, left // 2))


def _cut(
    tasks: Sequence[_T],
    lengths: Sequence[int],
    request_bytes: Callable[[int, int], int],
    limits: Limits,
) -> Iterator[list[_T]]:
    """Runs of tasks whose bytes fit one request; a block that is larger goes alone.
    `request_bytes` says how many those are, of the number of a request and the bytes left."""
    most_blocks = max(1, min(MAX_FRAMES, limits.frames, limits.keys))
    left = sum(lengths)
    first = 0
    for number in itertools.count():
        if first == len(tasks):
            return
        most_bytes = min(request_bytes(number, left), limits.message_bytes)
        last, nbytes = first + 1, lengths[first]
        while (
            last < len(tasks)
            and last - first < most_blocks
            and nbytes + lengths[last] <= most_bytes
        ):
            nbytes += lengths[last]
            last += 1
        yield list(tasks[first:last])
        first, left = last, left - nbytes
