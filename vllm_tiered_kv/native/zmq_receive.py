"""Receives routing ids of zmq clients without exceptions.

pyzmq raises one whenever a socket is empty, which takes longer than receiving a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.native._cpu import receive_short_frame
from vllm_tiered_kv.native.zmq_sender import zmq_function

__all__ = ["routing_id_receiver"]


def routing_id_receiver(router: int) -> Callable[[], bytes | None]:
    """Returns a function that receives the routing id with which the next message of this ROUTER
    begins, or returns None if there is no message. `router` is the address of its zmq socket."""
    function = zmq_function("zmq_recv")
    if function is None:
        raise NativeError("pyzmq does not export the functions of libzmq; install its wheel")
    return functools.partial(receive_short_frame, function, router)
