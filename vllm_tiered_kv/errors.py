"""Every error this package raises on purpose.

Errors carry their facts as fields, so that callers decide on types and values, never on text.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class TieredKVError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(TieredKVError, ValueError):
    """A configuration key or value is wrong; the text says which and what to write instead."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class UnsupportedError(TieredKVError, RuntimeError):
    """This vLLM, model or device cannot be served; one sentence says why."""


class InvariantError(TieredKVError, AssertionError):
    """A `check()` found the bookkeeping inconsistent: a bug, never a user's mistake."""


class ArenaError(TieredKVError, RuntimeError):
    """Shared memory cannot be had, or is not what its owner said it was."""


class NativeError(TieredKVError, ValueError):
    """An argument of a native call is out of bounds, misaligned or overlapping."""


class NoDeviceError(TieredKVError, RuntimeError):
    """A CUDA call was made where there is no CUDA device or driver."""


class CudaError(TieredKVError, RuntimeError):
    """A CUDA runtime call failed."""


class UnsafeAnswerError(TieredKVError, RuntimeError):
    """Something was computed from bytes that were not those they should have been."""


class ErrorCode(str, enum.Enum):
    """Why a daemon refused a request, as it is written on the wire."""

    BAD_MESSAGE = "bad_message"  # a header, field or payload that breaks the protocol
    UNKNOWN_OP = "unknown_op"
    UNSUPPORTED_VERSION = "unsupported_version"
    NO_HELLO = "no_hello"  # the session has not said hello yet
    MISMATCH = "mismatch"  # a known namespace with another block size or layout
    UNAUTHORIZED = "unauthorized"
    READ_ONLY = "read_only"
    TOO_LARGE = "too_large"  # beyond a limit of the protocol or of this daemon
    UNAVAILABLE = "unavailable"  # shutting down or overloaded: try again later
    NO_ARENA = "no_arena"  # no shared memory is attached to this session
    NOT_WRITTEN = "not_written"  # no disk, or one that did not take what it was to keep, or delete
    INTERNAL = "internal"


class ProtocolError(TieredKVError, ValueError):
    """A message that breaks the protocol, or cannot be served; never the end of a session's loop.

    `request_id` and `op` are those of the request it belongs to, where they could be read.
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
    """Another process uses the folder of a store; `pid` is 0 where it is not known."""

    def __init__(self, folder: str, pid: int) -> None:
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{folder} is in use by {holder}")
        self.folder = folder
        self.pid = pid


class StoreFormatError(TieredKVError, RuntimeError):
    """A folder is not a store of this format and version; nothing in it was touched."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(f"{folder} cannot be used: {reason}. Nothing in it was changed")
        self.folder = folder
        self.reason = reason


class NotDeletedError(TieredKVError, RuntimeError):
    """A store could not delete all it was told to: so many blocks may still be there."""

    def __init__(self, blocks: int, reason: str) -> None:
        super().__init__(f"{blocks} blocks could not be deleted: {reason}")
        self.blocks = blocks
        self.reason = reason


class ReplayError(TieredKVError, RuntimeError):
    """A replay of prompts cannot go on; the sentence says what to change."""


class TokenCacheError(TieredKVError, RuntimeError):
    """Daemons could not be used, told to those who ask for it; `failures` is why, by address."""

    def __init__(self, what: str, failures: Mapping[str, str]) -> None:
        reasons = "; ".join(f"{address} ({why})" for address, why in failures.items())
        super().__init__(f"{what}: {reasons}")
        self.failures = dict(failures)


class RemoteError(TieredKVError, RuntimeError):
    """A call to a daemon brought no answer. Never leaves `remote/`: a caller sees a miss."""


class RemoteTimeout(RemoteError):
    """The deadline passed."""


class ConnectionLost(RemoteError):
    """The connection could not be made or broke, or the daemon broke the protocol."""


class SessionForgotten(ConnectionLost):
    """The daemon does not know the session any more: it drops those unused for long."""


class RemoteRefusal(RemoteError):
    """The daemon answered, with an error: to one request, or to being talked to at all."""

    def __init__(self, code: ErrorCode, message: str, refuses_session: bool = False) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
        self.refuses_session = refuses_session
