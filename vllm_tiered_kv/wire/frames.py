"""Combines the header and the payload of a message to the frames of one zmq multipart message.

Frames are plain buffers: this module copies nothing and does not depend on zmq.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from vllm_tiered_kv.errors import ErrorCode, ProtocolError
from vllm_tiered_kv.wire.header import Buffer, peek_request_id
from vllm_tiered_kv.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES

_F = TypeVar("_F", bound=Buffer)

__all__ = ["Buffer", "pack", "peek_request_id", "size_of", "split"]


def size_of(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def pack(header: bytes, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    frames: list[Buffer] = [header, *payload]
    _check(frames)
    return frames


def split(frames: Sequence[_F]) -> tuple[_F, list[_F]]:
    """Checks the limits of a message and returns its header and its payload frames."""
    _check(frames)
    return frames[0], list(frames[1:])


def _check(frames: Sequence[Buffer]) -> None:
    if not frames:
        raise ProtocolError(ErrorCode.BAD_MESSAGE, "the message has no header")
    header, payload = frames[0], frames[1:]
    if size_of(header) > MAX_HEADER_BYTES:
        raise _too_large(header, f"a header of {size_of(header)} bytes", MAX_HEADER_BYTES)
    if len(payload) > MAX_FRAMES:
        raise _too_large(header, f"{len(payload)} payload frames", MAX_FRAMES)
    total = sum(map(size_of, payload))
    if total > MAX_MESSAGE_BYTES:
        raise _too_large(header, f"a payload of {total} bytes", MAX_MESSAGE_BYTES)


def _too_large(header: Buffer, what: str, limit: int) -> ProtocolError:
    return ProtocolError(
        ErrorCode.TOO_LARGE, f"{what}; at most {limit} are allowed", peek_request_id(header)
    )
