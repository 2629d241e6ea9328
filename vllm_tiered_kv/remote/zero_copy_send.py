"""Payload that zmq sends out of a caller's memory.

For every frame that pyzmq sends in place it makes an object that zmq tells when it is done with it,
and a thread of its own wakes up for that. zmq is done with the frames of a message in their order,
so one that tells is enough, the last: the others are handed over as constant memory. That holds as
long as the connection does. When it breaks, only the end of the context proves anything.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any

import zmq

from vllm_tiered_kv.native.cpu import send_frames


class ZeroCopySend:
    """The payload of one message, made by `Connection` on the thread that sends. To be kept until
    `wait` has returned, or zmq's context ended."""

    __slots__ = ("_payload", "_trackers")

    def __init__(self, payload: Sequence[memoryview]) -> None:
        self._payload = payload
        self._trackers: list[zmq.MessageTracker] = []

    def send(self, socket: zmq.SyncSocket) -> None:
        """Behind a header that was sent with the word that more follows."""
        payload = self._payload
        last = len(payload) - 1
        first = 0
        if last > 0 and (function := _send_const()) is not None:
            flags = zmq.NOBLOCK | zmq.SNDMORE
            error = send_frames(function, socket.underlying, payload[:last], flags)
            if error:
                raise zmq.ZMQError(error)
            first = last
        for index in range(first, last + 1):
            flags = zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0)
            # In place, however small: a copy would be done with before the others are.
            frame = zmq.Frame(payload[index], track=True, copy=False, copy_threshold=0)
            tracker: Any = socket.send(frame, flags, copy=False, track=True)
            self._trackers.append(tracker)

    def wait(self, deadline: float) -> None:
        """Returns when zmq has read everything; zmq.NotDone if that takes too long."""
        for tracker in self._trackers:
            tracker.wait(max(0.0, deadline - time.monotonic()))


@functools.cache
def _send_const() -> int | None:
    """Where zmq_send_const is in the libzmq that pyzmq uses; None if it does not show it."""
    try:
        from zmq.backend.cython import _zmq

        function = ctypes.CDLL(_zmq.__file__).zmq_send_const
    except (ImportError, OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
