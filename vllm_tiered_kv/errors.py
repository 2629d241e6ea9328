"""All exception types of this package.

Errors carry their details as fields, so that callers branch on types and values, never on text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping


class TieredKVError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(TieredKVError, ValueError):
    """A configuration key or value is invalid; the text names it and says what is expected."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class UnsupportedError(TieredKVError, RuntimeError):
    """This vLLM version, model or device is not supported; the text says why."""


class InvariantError(TieredKVError, AssertionError):
    """The bookkeeping is inconsistent. This is always a bug, never a user's mistake."""


class ArenaError(TieredKVError, RuntimeError):
    """Shared memory cannot be allocated or mapped, or does not match its description."""


class NativeError(TieredKVError, ValueError):
    """An argument of a native call is out of bounds, misaligned or overlapping."""


class NoDeviceError(TieredKVError, RuntimeError):
    """A CUDA call was made on a machine without a CUDA device or driver."""


class CudaError(TieredKVError, RuntimeError):
    """A CUDA runtime call failed."""


class UnsafeAnswerError(TieredKVError, RuntimeError):
    """A forward pass read KV blocks whose content was invalid, so its output is wrong."""


class ErrorCode(str, enum.Enum):
    """Why a daemon refused a request. The value is the code on the wire."""

    BAD_MESSAGE = "bad_message"  # a header, field or payload that violates the protocol
    UNKNOWN_OP = "unknown_op"
    UNSUPPORTED_VERSION = "unsupported_version"
    NO_HELLO = "no_hello"  # the session has not sent hello yet
    MISMATCH = "mismatch"  # the namespace is in use with another block size or layout
    UNAUTHORIZED = "unauthorized"
    READ_ONLY = "read_only"
    TOO_LARGE = "too_large"  # exceeds a limit of the protocol or of this daemon
    UNAVAILABLE = "unavailable"  # shutting down or overloaded; retry later
    NO_ARENA = "no_arena"  # no shared memory is attached to this session
    NOT_WRITTEN = "not_written"  # no disk, or the disk failed to write or to delete
    INTERNAL = "internal"


class ProtocolError(TieredKVError, ValueError):
    """A message violates the protocol or cannot be served. It never ends the session's loop.

    `request_id` and `op` identify the request, as far as they could be read.
    """

    def __init__(
        self, code: ErrorCode, message: str, request_id: int | None = None, op: str = ""
    ) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.request_id = request_id
        self.op = op


class StoreLockedError(TieredKVError, RuntimeError):
    """Another process uses the folder of a store; `pid` is 0 if it is not known."""

    def __init__(self, folder: str, pid: int) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{folder} is in use by {holder}")
        self.folder = folder
        self.pid = pid


class StoreFormatError(TieredKVError, RuntimeError):
    """A folder is not a store of this format and version; its content was not changed."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(f"{folder} cannot be used: {reason}. Nothing in it was changed")
        self.folder = folder
        self.reason = reason


class NotDeletedError(TieredKVError, RuntimeError):
    """A store could not delete all requested blocks; `blocks` of them may still be present."""

    def __init__(self, blocks: int, reason: str) -> None:
        super().__init__(f"{blocks} blocks could not be deleted: {reason}")
        self.blocks = blocks
        self.reason = reason


class TransferPending(TieredKVError, RuntimeError):
    """A transfer has not ended by its deadline, and may still read or write its buffers."""

    def __init__(self, on_end: Callable[[Callable[[], None]], None]) -> None:
        """`on_end` calls a function when the transfer has ended, at once if it has already."""
        super().__init__("the store has not answered in time")
        self.on_end = on_end


class ReplayError(TieredKVError, RuntimeError):
    """A replay of prompts cannot continue; the text says what to change."""


class DeploymentError(TieredKVError, RuntimeError):
    """A process of a deployment could not start or ended by itself; the text says which and how."""


class ModelConfigError(TieredKVError, ValueError):
    """A model's config.json cannot be read, or lacks what `tiered-kv model` needs."""


class TokenCacheError(TieredKVError, RuntimeError):
    """A `TokenCache` could not use daemons; `failures` maps their addresses to the reasons."""

    def __init__(self, what: str, failures: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{address} ({reason})" for address, reason in failures.items())
        super().__init__(f"{what}: {reasons}")
        self.failures = dict(failures)


class RemoteError(TieredKVError, RuntimeError):
    """A call to a daemon failed. It never leaves `remote/`: the caller there sees a miss."""


class RemoteTimeout(RemoteError):
    """The daemon did not reply before the deadline."""


class ConnectionLost(RemoteError):
    """Connecting failed, the connection broke, or the daemon violated the protocol."""


class HandshakeFailed(ConnectionLost):
    """The peer speaks, but keys do not match: one of the two has none, or another one."""


class SessionForgotten(ConnectionLost):
    """The daemon no longer knows the session; it drops sessions that are idle for long."""


class RemoteRefusal(RemoteError):
    """The daemon replied with an error. With `refuses_session` it rejects the whole session."""

    def __init__(self, code: ErrorCode, message: str, refuses_session: bool = False) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.refuses_session = refuses_session
