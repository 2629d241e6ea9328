"""Every error this package raises on purpose.

Errors carry their facts as fields, so that callers decide on types and values, never on text.
"""

from __future__ import annotations


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


class NativeError(TieredKVError, ValueError):
    """An argument of a native call is out of bounds, misaligned or overlapping."""


class NoDeviceError(TieredKVError, RuntimeError):
    """A CUDA call was made where there is no CUDA device or driver."""


class CudaError(TieredKVError, RuntimeError):
    """A CUDA runtime call failed."""
