"""The event loop: one thread that waits for sockets, descriptors, timers and posted callbacks.

All state of the daemon that is not a store is used on this thread only, so it needs no locks. Other
threads post callbacks. A callback that raises is logged and never stops the loop.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

Callback = Callable[[], None]

_MAX_POLL_S = 1.0  # bounds a turn of the idle loop, so that /healthz can tell it is alive
_BACKGROUND_S = 0.005  # time per turn for background callbacks


class Reactor:
    """The daemon's event loop. Only `post`, `run_on_loop` and `last_turn` may be used from other
    threads than the one that calls `run`."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._watched: dict[zmq.Socket[bytes] | int, Callback] = {}
        self._posted: deque[Callback] = deque()
        self._background: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = itertools.count()
        self._each_turn: list[Callback] = []
        self._running = False
        self._thread = 0
        self.last_turn = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.RLock()  # a signal handler may post during a post
        self.watch(self._wake, self._woken)

    def watch(self, source: zmq.Socket[bytes] | int, readable: Callback) -> None:
        """Calls `readable` whenever the socket or descriptor is readable, or hung up."""
        self._watched[source] = readable
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: zmq.Socket[bytes] | int) -> None:
        if self._watched.pop(source, None) is not None:
            self._poller.unregister(source)

    def post(self, callback: Callback) -> None:
        """Calls `callback` on the loop soon. From any thread, and from signal handlers."""
        self._posted.append(callback)
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def post_background(self, callback: Callback) -> None:
        """Queues one piece of long work, to run after everything else of a turn and after what was
        queued before it. From the loop's thread only."""
        self._background.append(callback)

    def run_on_loop(self, callback: Callback) -> None:
        """Calls `callback` on the loop's thread: now if this is that thread, otherwise soon."""
        if threading.get_ident() == self._thread:
            callback()
        else:
            self.post(callback)

    def after(self, seconds: float, callback: Callback) -> None:
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._order), callback))

    def every(self, seconds: float, callback: Callback) -> None:
        def again() -> None:
            self.after(seconds, again)
            callback()

        self.after(seconds, again)

    def each_turn(self, callback: Callback) -> None:
        """Calls `callback` at the end of every turn of the loop."""
        self._each_turn.append(callback)

    def run(self) -> None:
        """Runs the loop until `stop`."""
        self._running = True
        self._thread = threading.get_ident()
        try:
            while self._running:
                self.turn()
        finally:
            self._thread = 0  # from now on `run_on_loop` only queues, and nothing runs

    def stop(self) -> None:
        self._running = False

    def turn(self) -> None:
        """Waits for something to do and does it, once."""
        for source, _ in self._poller.poll(self._poll_timeout_ms()):
            ready = self._watched.get(source)  # an earlier callback may have unwatched it
            if ready is not None:
                self._call(ready)
        for _ in range(len(self._posted)):
            self._call(self._posted.popleft())
        now = self.last_turn = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._call(heapq.heappop(self._timers)[2])
        self._run_background()
        for callback in self._each_turn:
            self._call(callback)

    def close(self) -> None:
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    def _run_background(self) -> None:
        """Runs background callbacks while there is time, and at least one."""
        end = time.monotonic() + _BACKGROUND_S
        for _ in range(len(self._background)):
            self._call(self._background.popleft())
            if time.monotonic() >= end:
                break

    def _poll_timeout_ms(self) -> int:
        if self._posted or self._background:
            return 0
        wait = _MAX_POLL_S
        if self._timers:
            wait = min(wait, self._timers[0][0] - time.monotonic())
        return max(0, int(wait * 1000) + 1) if wait > 0 else 0

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    @staticmethod
    def _call(callback: Callback) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of the event loop failed; the daemon continues")
