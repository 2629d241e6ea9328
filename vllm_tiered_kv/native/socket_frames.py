"""Frames for a socket of zmq's, of which only the address is known here."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.native import _cpu


def send_frames(function: int, socket: int, buffers: Sequence[memoryview], flags: int) -> int:
    """Sends each with the function at this address, which is zmq_send_const: nothing is copied, and
    the memory must stay until zmq has sent it. 0, or the errno of the first that was refused."""
    return _cpu.send_frames(function, socket, buffers, flags)
