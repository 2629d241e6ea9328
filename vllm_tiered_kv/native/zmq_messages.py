"""Receives and sends zmq messages with one native call each, beside pyzmq.

pyzmq makes an object for every frame and raises an exception whenever a socket is empty; either
takes longer than receiving a message. For every frame sent from the caller's memory, a thread of
pyzmq wakes up and competes for the GIL. The native receiver and sender call the functions of
pyzmq's libzmq themselves.
"""

from __future__ import annotations

import ctypes
import functools

from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import ZmqReceiver, ZmqSender

__all__ = ["ZmqReceiver", "ZmqSender", "make_zmq_receiver", "make_zmq_sender", "zmq_function"]

_RECEIVING = (
    "zmq_recv",
    "zmq_msg_init",
    "zmq_msg_recv",
    "zmq_msg_data",
    "zmq_msg_size",
    "zmq_msg_more",
    "zmq_msg_get",
    "zmq_msg_gets",
    "zmq_msg_close",
)
_SENDING = ("zmq_send", "zmq_msg_init_data", "zmq_msg_send", "zmq_msg_close")


def make_zmq_receiver(router: int) -> ZmqReceiver:
    """Returns a receiver of identities and headers of this ROUTER, given as the address of its zmq
    socket. It belongs to the socket's thread."""
    return ZmqReceiver(router, *_functions(_RECEIVING))


def make_zmq_sender() -> ZmqSender:
    """Returns a sender for sockets of pyzmq. `send` and `take_sent` belong to one thread."""
    return ZmqSender(*_functions(_SENDING))


def _functions(names: tuple[str, ...]) -> list[int]:
    found = [function for name in names if (function := zmq_function(name)) is not None]
    if len(found) < len(names):
        raise NativeError("pyzmq does not export the functions of libzmq; install its wheel")
    return found


@functools.cache
def zmq_function(name: str) -> int | None:
    """Returns the address of a function of pyzmq's libzmq; None if it is not exported."""
    try:
        from zmq.backend.cython import _zmq

        function = getattr(ctypes.CDLL(_zmq.__file__), name)
    except (ImportError, OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
