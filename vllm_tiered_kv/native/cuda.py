"""Block copies on an NVIDIA GPU, and the few CUDA objects they need: the compiled module `_cuda`.

Importing this module needs neither a GPU nor the compiled module. `why_unavailable` says what is
missing, and any other use then raises `NoDeviceError` with the same text. Copies are enqueued on
the caller's stream and the calls return at once; the caller keeps source and target memory alive
until the copies have finished. An invalid argument raises a `NativeError` whose text begins with
its name; a failed CUDA call raises a `CudaError` that names the call. `_cuda.pyi` describes each of
the functions and classes.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.errors import NoDeviceError

if TYPE_CHECKING:
    from vllm_tiered_kv.native._cuda import (
        RUNTIME_VERSION,
        CudaBlockLayout,
        DeviceBuffer,
        Event,
        Stream,
        copy_to_device,
        copy_to_host,
        device_count,
        gather,
        host_register,
        host_unregister,
        scatter,
    )
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules asks for such names
            raise AttributeError(name)
        return getattr(_load(), name)


__all__ = ["RUNTIME_VERSION", "CudaBlockLayout", "DeviceBuffer", "Event", "Stream"]
__all__ += ["copy_to_device", "copy_to_host", "device_count", "gather", "host_register"]
__all__ += ["host_unregister", "scatter", "why_unavailable"]


def _load() -> ModuleType:
    try:
        from vllm_tiered_kv.native import _cuda
    except ImportError as missing:
        if missing.name in (None, "vllm_tiered_kv.native", "vllm_tiered_kv.native._cuda"):
            reason = "the CUDA module was not built (no nvcc at install time)"
        else:
            reason = f"the CUDA module cannot be loaded: {missing}"
        raise NoDeviceError(reason) from missing
    return _cuda


def why_unavailable() -> str | None:
    """Returns why no CUDA device can be used, or None if one can."""
    try:
        _load().device_count()
    except NoDeviceError as reason:
        return str(reason)
    return None
