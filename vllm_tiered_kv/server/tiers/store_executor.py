"""An executor with a deadline; all calls to the slower stores run on one.

A call to a network file system whose server is gone cannot be interrupted and returns only when the
server is back. So each store has a few threads of its own. After a deadline the caller continues
without the result, while the thread stays in the call. If every thread is past its deadline, the
store is hung: calls fail at once until one of the threads returns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_tiered_kv.metrics import server_names as names
from vllm_tiered_kv.metrics.recorder import Recorder

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class StoreHungError(Exception):
    """The store did not finish a call before its deadline, or is hung already."""


def _ignore(*result: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[], Any]
    done: Callable[[Any], None]
    failed: Callable[[], None]
    deadline: float = math.inf
    is_running: bool = False


class StoreExecutor:
    """Runs the calls to one store. Used from any thread. Results are delivered on the executor's
    threads, refusals on the caller's. The threads are daemon threads, so hung ones do not keep the
    process alive."""

    def __init__(
        self,
        name: str,
        threads: int,
        timeout_s: float = math.inf,
        recorder: Recorder | None = None,
        keeps_queue: bool = False,
    ) -> None:
        """`recorder` counts calls that miss the deadline. With `keeps_queue`, calls queued while
        the store hangs run once it answers again; otherwise they fail."""
        self._name = name
        self._threads = threads
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._keeps_queue = keeps_queue
        self._queue: deque[_Call] = deque()
        # In the order in which clients are served.
        self._by_client: OrderedDict[Hashable, deque[_Call]] = OrderedDict()
        self._is_clients_turn = False
        self._timed: dict[_Call, None] = {}  # calls with a deadline and no result, earliest first
        self._hung_threads = 0
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        for n in range(threads):
            self._start_thread(self._run, f"tiered-kv-{name}-{n}")
        if timeout_s < math.inf:
            self._start_thread(self._watch, f"tiered-kv-{name}-watch")

    @staticmethod
    def _start_thread(run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    @property
    def is_hung(self) -> bool:
        """Whether every thread is past its deadline."""
        return self._hung_threads == self._threads

    def submit(
        self,
        work: Callable[[], _Result],
        done: Callable[[_Result], None] = _ignore,
        failed: Callable[[], None] = _ignore,
        client: Hashable = None,
    ) -> None:
        """Calls `done` with the result of `work`. Calls `failed` instead if `work` is refused,
        raises or misses its deadline; a late `work` still runs to its end, without effect.

        Calls with a client are fair-queued per client, and their deadline counts from the start of
        the call. Without a client it counts from now, including the time in the queue.
        """
        call = _Call(work, done, failed)
        with self._lock:
            is_taken = not (self._closed or (self.is_hung and not self._keeps_queue))
            if is_taken:
                if client is not None:
                    self._by_client.setdefault(client, deque()).append(call)
                else:
                    self._queue.append(call)
                    self._set_deadline(call)
                self._work.notify()
        if not is_taken:
            self._fail([call])

    def call(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns or raises; StoreHungError after the deadline."""
        ended: Future[Future[_Result]] = Future()

        def attempt() -> Future[_Result]:
            outcome: Future[_Result] = Future()
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)
            return outcome

        error = StoreHungError(f"{self._name} has not answered for {self._timeout_s:g} s")
        self.submit(attempt, ended.set_result, lambda: ended.set_exception(error))
        return ended.result().result()

    def close(self, runs_queue: bool = False) -> bool:
        """Accepts no more calls, runs or fails queued ones, and returns when all have ended or
        missed their deadline. False if hung threads are left. Idempotent."""
        with self._lock:
            self._closed = True
            queued = [] if runs_queue else self._drop_queue()
            self._work.notify_all()
        self._fail(queued)
        with self._lock:
            while self._timed or self._by_client:
                self._ended.wait()
            self._ended.notify_all()  # wakes the deadline thread
            return not self._hung_threads

    # ---- threads --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (call := self._next()) is not None:
            has_failed, result = False, None
            try:
                result = call.work()
            except Exception:
                logger.exception("a call to %s failed", self._name)
                has_failed = True
            if not self._end(call):
                continue
            try:
                if has_failed:
                    call.failed()
                else:
                    call.done(result)
            except Exception:
                logger.exception("the receiver of a result of %s failed", self._name)

    def _next(self) -> _Call | None:
        """Alternates between calls with and without a client, so that neither kind starves."""
        with self._lock:
            while not (self._queue or self._by_client):
                if self._closed:
                    return None
                self._work.wait()
            if self._by_client and (self._is_clients_turn or not self._queue):
                client, line = self._by_client.popitem(last=False)
                call = line.popleft()
                if line:
                    self._by_client[client] = line  # behind the other clients
                self._set_deadline(call)
                self._is_clients_turn = False
            else:
                call = self._queue.popleft()
                self._is_clients_turn = True
            call.is_running = True
            return call

    def _set_deadline(self, call: _Call) -> None:
        call.deadline = time.monotonic() + self._timeout_s
        self._timed[call] = None

    def _end(self, call: _Call) -> bool:
        """Whether the caller still waits for the result."""
        with self._lock:
            is_awaited = call in self._timed
            if is_awaited:
                del self._timed[call]
            else:
                if self.is_hung:
                    logger.warning("%s answers again", self._name)
                self._hung_threads -= 1
            if self._closed:
                self._ended.notify_all()
            return is_awaited

    # ---- deadlines ------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._lock:
                while (left_s := self._until_deadline_s()) > 0:
                    if self._closed and not self._timed:
                        return
                    self._ended.wait(min(left_s, threading.TIMEOUT_MAX))
                overdue = self._take_overdue()
                self._ended.notify_all()
            self._fail(overdue)

    def _until_deadline_s(self) -> float:
        """Time until the first deadline. Calls that are added later have later deadlines."""
        first = next(iter(self._timed), None)
        return self._timeout_s if first is None else first.deadline - time.monotonic()

    def _take_overdue(self) -> list[_Call]:
        """Removes calls past their deadline; also all queued ones if no thread is left for them."""
        now = time.monotonic()
        overdue = [call for call in self._timed if call.deadline <= now]
        for call in overdue:
            del self._timed[call]
            if call.is_running:
                self._hung_threads += 1
            else:
                self._queue.remove(call)
        if self.is_hung:
            if any(call.is_running for call in overdue):
                logger.warning(
                    "%s has not answered for %g s; it is not used until it does",
                    self._name,
                    self._timeout_s,
                )
            if not self._keeps_queue:
                overdue += self._drop_queue()
        return overdue

    def _drop_queue(self) -> list[_Call]:
        queued = [*self._queue, *(call for line in self._by_client.values() for call in line)]
        self._queue.clear()
        self._by_client.clear()
        for call in queued:
            self._timed.pop(call, None)
        return queued

    def _fail(self, calls: list[_Call]) -> None:
        for call in calls:
            if self._recorder is not None:
                self._recorder.add(names.BACKING_LATE, 1)
            try:
                call.failed()
            except Exception:
                logger.exception("the receiver of a missed deadline of %s failed", self._name)
