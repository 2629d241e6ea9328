"""Estimates the memory of unfinished messages, and returns it to the system afterwards.

zmq uses at least 64 bytes for each part of a message, and a part may take 2 bytes on the wire. What
unfinished messages really need is therefore measured, as the memory that malloc has handed out
since they began and that is not accounted for otherwise. The kernel counts no bytes of ipc
connections, so their clients are suspected when there is more of it than all tcp connections
explain and they have sent no message meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from vllm_tiered_kv.native.memory import allocated_bytes, trim
from vllm_tiered_kv.server.net.network_memory import NetworkMemory

NEGLIGIBLE_BYTES = 4096
"""A shorter unfinished message may wait forever."""
_PART_FACTOR = 32  # zmq uses 64 bytes for a part, which takes at least 2 bytes on the wire
_SUSPECT_SILENCE_S = 1.0  # of an ipc client
_OTHER_BYTES = 256 << 20  # growth that ipc clients are not suspected of, as of buffers of the tiers
_TRIM_DELAY_S = 10.0  # how long memory use must be low before the heap is trimmed
_TRIM_DELAY_AFTER_CLOSE_S = 1.0
_TRIM_PEAK_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class UnfinishedMessage:
    """The unfinished message that a connection may have. `Connections` sets the first fields,
    `UnfinishedMemory` the others."""

    is_local: bool  # over ipc: neither its bytes nor its age are known
    nbytes: int = 0  # read but not delivered, as of the last check
    age_s: float = 0.0  # 0 if it has begun since the last check
    is_after_another: bool = False  # over ipc: one was delivered since the last estimate
    silent_s: float = 0.0  # over ipc, since one was delivered
    others_bytes: int = sys.maxsize  # unexplained memory when it began
    part_bytes: int = 0  # estimated memory of its parts, beyond its bytes

    @property
    def memory_bytes(self) -> int:
        return self.nbytes + self.part_bytes


class UnfinishedMemory:
    """Measures with every check of `Connections`, which has one. Runs on the reactor's thread."""

    def __init__(self, network: NetworkMemory, index_bytes: Callable[[], int | None]) -> None:
        """`index_bytes` returns an upper bound of the memory of the tiers' indexes; None while it
        is unknown."""
        self._network = network
        self._index_bytes = index_bytes
        self._unexplained = sys.maxsize  # memory that nothing accounts for, at the last check
        self._of_indexes = 0  # memory of the indexes, at the last check
        self.is_freeing = False
        """Whether memory of closed connections is being freed, as of the last estimate."""

    def begin(self, is_local: bool) -> UnfinishedMessage:
        """The first message of a new connection."""
        return UnfinishedMessage(is_local, others_bytes=self._unexplained)

    def estimate(
        self, messages: Collection[UnfinishedMessage], elapsed: float, is_closing: bool
    ) -> None:
        """Divides the memory that has grown since unfinished messages began among them.
        `is_closing` says whether zmq has yet to close a connection and free its messages."""
        allocated, of_indexes = allocated_bytes(), self._index_bytes()
        if allocated is None:  # only bytes of messages count
            return
        if of_indexes is None:
            self.is_freeing = True  # soon
            return
        # Indexes keep the memory of blocks that have left, so that less is explained then.
        shrunk = max(0, self._of_indexes - of_indexes)
        self._of_indexes = of_indexes
        before, now = self._unexplained + shrunk, self._unexplained_of(allocated, messages)
        self._unexplained = now
        self.is_freeing = is_closing or now < before  # others must not pay for it until then
        limits: dict[UnfinishedMessage, int] = {}
        for one in messages:
            one.others_bytes = min(one.others_bytes + shrunk, now)
            if one.is_local:
                one.silent_s = 0.0 if one.is_after_another else one.silent_s + elapsed
                if one.is_after_another:
                    one.others_bytes = min(before, now)
                one.is_after_another = False
                continue
            if not one.age_s:
                one.others_bytes = min(before, now)
            if one.nbytes > NEGLIGIBLE_BYTES:
                limits[one] = min(_PART_FACTOR * one.nbytes, now - one.others_bytes)
            else:
                one.part_bytes = 0
        if self.is_freeing or not limits:
            return
        grown = now - min(one.others_bytes for one in limits)
        total = sum(limits.values())
        for one, limit in limits.items():
            one.part_bytes = limit * min(grown, total) // max(1, total)

    def _unexplained_of(self, allocated: int, messages: Collection[UnfinishedMessage]) -> int:
        """Memory that is neither the indexes' nor payloads and replies nor bytes of unfinished
        messages. Most of it is always there; only its growth means something."""
        unfinished = sum(one.nbytes for one in messages)
        return allocated - self._network.buffers - unfinished - self._of_indexes

    def suspects(self, messages: Collection[UnfinishedMessage]) -> list[UnfinishedMessage]:
        """Those over ipc that may have filled the memory, if it is full. It cannot be told which
        has, so these are all whose clients have sent no message since."""
        silent = [one for one in messages if one.is_local and one.silent_s >= _SUSPECT_SILENCE_S]
        if self.is_freeing or not silent:
            return []
        grown = self._unexplained - min(one.others_bytes for one in silent)
        of_tcp = _PART_FACTOR * sum(one.nbytes for one in messages)
        excess = grown - of_tcp - _OTHER_BYTES
        if excess <= 0 or self._network.total + excess <= self._network.limit:
            return []
        return silent


class HeapTrimmer:
    """Returns freed memory to the system after a peak of network memory. malloc keeps it otherwise,
    which is right while messages come and go. `Connections` has one, on the reactor's thread."""

    def __init__(self, network: NetworkMemory) -> None:
        self._network = network
        self._peak = 0  # of network memory, since the last trim
        self._quiet_s = 0.0
        self.is_requested = False
        """Whether connections were closed that may have used much memory; a trim resets it."""

    def watch_peak(self) -> None:
        """Must be called often enough to see the peaks."""
        self._peak = max(self._peak, self._network.total)

    def check(self, elapsed: float, is_freeing: bool) -> None:
        """Trims if it is time to. `is_freeing` says whether zmq has yet to free messages, which it
        does when it closes their connection."""
        is_quiet = self._peak > _TRIM_PEAK_BYTES and self._network.total < _TRIM_PEAK_BYTES // 4
        is_due = (is_quiet or self.is_requested) and not is_freeing
        self._quiet_s = self._quiet_s + elapsed if is_due else 0.0
        if self._quiet_s > (_TRIM_DELAY_AFTER_CLOSE_S if self.is_requested else _TRIM_DELAY_S):
            self._peak = 0
            self._quiet_s = 0.0
            self.is_requested = False
            with contextlib.suppress(RuntimeError):  # no thread can be started; the next peak will
                threading.Thread(target=trim, name="tiered-kv-trim", daemon=True).start()
