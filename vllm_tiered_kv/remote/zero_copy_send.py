"""Sends payload directly from a caller's memory (zero-copy).

For every zero-copy frame pyzmq creates a tracker, and a pyzmq thread wakes up when zmq has sent the
frame. zmq sends the frames of a message in order, so a tracker for the last frame suffices; the
others are sent as constant memory without one. This holds while the connection is open. When it
breaks, only the end of the zmq context proves that zmq no longer reads the memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from vllm_tiered_kv.native.cpu import send_frames
from vllm_tiered_kv.native.zmq_messages import zmq_function


class ZeroCopySend:
    """The payload of one message. `Connection` makes it on the sending thread and keeps it until
    `wait` has returned or the zmq context has ended."""

    __slots__ = ("_payload", "_trackers")

    def __init__(self, payload: Sequence[memoryview]) -> None:
        self._payload = payload
        self._trackers: list[zmq.MessageTracker] = []

    def send(self, socket: zmq.SyncSocket) -> None:
        """Sends the payload frames. The header was sent before, with SNDMORE."""
        payload = self._payload
        last = len(payload) - 1
        first = 0
        if last > 0 and (function := zmq_function("zmq_send_const")) is not None:
            flags = zmq.NOBLOCK | zmq.SNDMORE
            error = send_frames(function, socket.underlying, payload[:last], flags)
            if error:
                raise zmq.ZMQError(error)
            first = last
        for index in range(first, last + 1):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
            # Zero-copy even if small: zmq copies small frames and reports them as sent at once.
            frame = zmq.Frame(payload[index], track=True, copy=False, copy_threshold=0)
            tracker: Any = socket.send(frame, flags, copy=False, track=True)
            self._trackers.append(tracker)

    def wait(self, deadline: float) -> None:
        """Waits until zmq has read the payload; raises zmq.NotDone at the deadline."""
        for tracker in self._trackers:
            tracker.wait(max(0.0, deadline - time.monotonic()))
