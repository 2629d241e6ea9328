"""Receives messages of zmq clients with one call and without exceptions.

pyzmq makes an object for every frame and raises an exception whenever a socket is empty. Either
takes longer than receiving the message.
"""

from __future__ import annotations

from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import ZmqReceiver
from vllm_tiered_kv.native.zmq_sender import zmq_function

__all__ = ["ZmqReceiver", "make_zmq_receiver"]

_FUNCTIONS = (
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


def make_zmq_receiver(router: int) -> ZmqReceiver:
    """Returns a receiver of identities and headers of this ROUTER, given as the address of its zmq
    socket. It belongs to the socket's thread."""
    functions = [zmq_function(name) for name in _FUNCTIONS]
    found = [function for function in functions if function is not None]
    if len(found) < len(functions):
        raise NativeError("pyzmq does not export the functions of libzmq; install its wheel")
    return ZmqReceiver(router, *found)
