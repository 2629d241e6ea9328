"""Calls to Mooncake's client library: when to make one, and what its answer says of the store.

The library has no deadline of its own that is short enough: a transfer from a node that hangs takes
seconds, and cannot be ended. So a call returns when the library does, and whoever cannot wait so
long makes it on a thread of an executor (`server/tiers/store_executor.py`). What this module adds
is that such a call counts against the store while it still runs, so that few others follow it.

After a minute the library gives up a transfer that may still write to its buffers. Such a call
returns only when the library's client, with its sockets, is closed; later calls use another one.

The library holds the interpreter's lock while it connects, for seconds if nobody answers. So a
plain connection to the master is tried first.
"""

from __future__ import annotations

import enum
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from vllm_tiered_kv.core.breaker import Attempt, Breaker
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.stores.mooncake.settings import MooncakeSettings

logger = logging.getLogger(__name__)

_CONNECT_S = 1.0
_CLOSE_S = 1.0
_LIBRARY_GIVES_UP_S = 55.0  # it does after 60; a call that took less has no transfer left


class Code(enum.IntEnum):
    """Answers of the library that mean something to this client; all others are failures."""

    NO_SPACE = -200
    TOO_SMALL = -600  # the buffer, for this value
    BUSY = -703  # another client is writing this value
    ABSENT = -704
    PRESENT = -705
    NO_MASTER = -900
    MASTER_LATE = -901


_NO_ANSWER = (Code.NO_MASTER, Code.MASTER_LATE)


@dataclass(slots=True, eq=False)
class _Running:
    attempt: Attempt
    deadline: float


class MooncakeClient:
    """One client of a Mooncake Store; it connects with the first call. Any thread may call it."""

    def __init__(self, settings: MooncakeSettings, on_unanswered: Callable[[], None]) -> None:
        """`on_unanswered` is called for each call that is not made or not answered."""
        self._settings = settings
        self._on_unanswered = on_unanswered
        self.breaker = Breaker(f"the Mooncake master at {settings.master}")
        self.replicas = ReplicateConfig()
        self.replicas.replica_num = settings.replicas
        self._library = MooncakeDistributedStore()
        self._is_open = False
        self._is_tainted = False  # a transfer may go on that its call has given up
        self._inside = 0  # calls in the library
        self._closed = False
        self._regions: list[HostRegion] = []
        self._running: dict[_Running, None] = {}
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._ended = threading.Condition(self._lock)

    def call(
        self, work: Callable[[MooncakeDistributedStore], list[int]], allowed_s: float
    ) -> list[int] | None:
        """What `work` returns: a code or a number for each key. None if the master does not answer,
        or is not asked because it has not answered before. A call that takes longer than
        `allowed_s` counts as a failure of the store from then on, although it goes on."""
        self._fail_overdue()
        attempt = None if self._closed else self.breaker.begin()
        if attempt is None:
            self._on_unanswered()
            return None
        codes: list[int] | None = None
        running = _Running(attempt, time.monotonic() + allowed_s)
        with self._lock:
            self._running[running] = None
        try:
            if self._connect(attempt):
                codes = self._enter(work)
                gone = next((Code(code) for code in codes or () if code in _NO_ANSWER), None)
                if gone is not None:
                    codes = None
                    self.breaker.fail(attempt, "no answer", is_absent=gone is Code.NO_MASTER)
                elif codes is not None:
                    self.breaker.succeed(attempt)
        finally:
            self.breaker.forget(attempt)
            with self._lock:
                self._running.pop(running, None)
                self._ended.notify_all()
        if codes is None:
            self._on_unanswered()
        return codes

    def _enter(self, work: Callable[[MooncakeDistributedStore], list[int]]) -> list[int] | None:
        with self._lock:
            if not self._is_open:  # it is being replaced
                return None
            self._inside += 1
            library = self._library
        begin = time.monotonic()
        try:
            return work(library)
        finally:
            with self._lock:
                self._inside -= 1
                self._ended.notify_all()
                if time.monotonic() - begin > _LIBRARY_GIVES_UP_S:
                    self._replace(library)

    def _replace(self, library: MooncakeDistributedStore) -> None:
        """Returns when no transfer of this client of the library is left. Holds the lock."""
        if self._library is not library:
            return
        self._is_open, self._is_tainted = False, True
        self._ended.wait_for(lambda: not self._inside or self._library is not library)
        if self._library is library:
            logger.warning("Mooncake has not ended a transfer; connecting to it anew")
            library.close()
            self._library = MooncakeDistributedStore()
            self._is_tainted = False

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [running for running in self._running if running.deadline < now]
            for running in overdue:
                running.deadline = float("inf")
        for running in overdue:
            self.breaker.fail(running.attempt, "a call has not ended in time")

    def connect(self) -> None:
        """Connects now, if the master answers."""
        self.call(lambda library: [], self._settings.timeout_s)

    def _connect(self, attempt: Attempt) -> bool:
        if self._is_open:
            return True
        if not self._opening.acquire(blocking=False):
            return False  # another call connects; nobody waits for it
        try:
            return self._set_up(attempt)
        finally:
            self._opening.release()

    def _set_up(self, attempt: Attempt) -> bool:
        with self._lock:
            if self._is_open or self._is_tainted:
                return self._is_open
        settings = self._settings
        try:
            connect_s = min(_CONNECT_S, settings.timeout_s)
            with socket.create_connection(settings.master, connect_s) as probe:
                host = settings.host or probe.getsockname()[0]
                with socket.create_server((probe.getsockname()[0], 0), family=probe.family) as free:
                    port = free.getsockname()[1]
        except OSError as error:
            self.breaker.fail(attempt, error.strerror or str(error), is_absent=True)
            return False
        # The library reads these when it connects. What an operator has set counts.
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(max(1, int(1000 * settings.timeout_s))))
        for variable in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
            os.environ.setdefault(variable, str(math.ceil(settings.timeout_s)))
        # With a port in the name the library tries once, not twenty times.
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        status = self._library.setup(
            name,
            settings.metadata,
            settings.segment_bytes,
            0,  # buffers of its own: blocks move from and to ours
            settings.protocol,
            settings.devices,
            str(settings.master),
        )
        if status != 0:
            self.breaker.fail(attempt, f"its client library cannot connect, error {status}")
            return False
        with self._lock:
            for region in self._regions:
                self._register(region)
            self._is_open = True
        return True

    def use_memory(self, region: HostRegion) -> None:
        """Registers memory with the network, now or when the client connects."""
        with self._lock:
            self._regions.append(region)
            if self._is_open:
                self._register(region)

    def _register(self, region: HostRegion) -> None:
        status = self._library.register_buffer(region.address, region.nbytes)
        if status != 0:
            logger.error(
                "Mooncake cannot register %d bytes of memory (error %d); over RDMA their blocks "
                "are neither read nor written",
                region.nbytes,
                status,
            )

    def close(self) -> None:
        """Later calls are not made. A client that hangs in a call is left to the process's end."""
        self._closed = True
        with self._lock:
            self._ended.wait_for(lambda: not self._running, _CLOSE_S)
            if self._is_open and not self._running:
                self._is_open = False
                self._library.close()
