"""Sends zmq messages from memory that zmq references, and tells when zmq is done with it.

For every such frame pyzmq creates an object and a thread of pyzmq, which competes for the GIL,
wakes up when the frame is sent. The native sender calls the functions of pyzmq's libzmq itself.
"""

from __future__ import annotations

import ctypes
import functools

from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import ZmqSender

__all__ = ["ZmqSender", "make_zmq_sender", "zmq_function"]


def make_zmq_sender() -> ZmqSender:
    """Returns a sender for sockets of pyzmq. `send` and `take_sent` belong to one thread."""
    names = ("zmq_send", "zmq_msg_init_data", "zmq_msg_send", "zmq_msg_close")
    functions = [zmq_function(name) for name in names]
    found = [function for function in functions if function is not None]
    if len(found) < len(names):
        raise NativeError("pyzmq does not export the functions of libzmq; install its wheel")
    return ZmqSender(*found)


@functools.cache
def zmq_function(name: str) -> int | None:
    """Returns the address of a function of pyzmq's libzmq; None if it is not exported."""
    try:
        from zmq.backend.cython import _zmq

        function = getattr(ctypes.CDLL(_zmq.__file__), name)
    except (ImportError, OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
