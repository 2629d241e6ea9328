"""Sends frames through a zmq socket that is known only by its address."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.native import _cpu


def send_frames(function: int, socket: int, buffers: Sequence[memoryview], flags: int) -> int:
    """Sends each buffer with the function at this address, which must be zmq_send_const.

    Nothing is copied, so the memory must stay valid until zmq has sent it. Returns 0, or the errno
    of the first buffer that zmq refused.
    """
    return _cpu.send_frames(function, socket, buffers, flags)
