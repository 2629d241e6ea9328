"""Block copies on an NVIDIA GPU, and the few CUDA objects they need.

Importing this module needs neither a GPU nor the compiled module. `why_unavailable` says what is
missing, and every other call then raises `NoDeviceError` with the same text. Copies are enqueued on
the caller's stream and the calls return at once; the caller keeps source and target memory alive
until the copies have finished. An invalid argument raises a `NativeError` whose text begins with
its name; a failed CUDA call raises a `CudaError` that names the call.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.errors import NoDeviceError

if TYPE_CHECKING:
    from vllm_tiered_kv.native import _cuda


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
        device_count()
    except NoDeviceError as reason:
        return str(reason)
    return None


def available() -> bool:
    return why_unavailable() is None


def device_count() -> int:
    """Returns the number of devices, at least 1; raises `NoDeviceError` if there is none."""
    count: int = _load().device_count()
    return count


def runtime_version() -> int:
    """Returns the version of the CUDA runtime in the module, 13000 for 13.0; needs no GPU. Raises
    `NoDeviceError` if the module was not built or does not load."""
    version: int = _load().RUNTIME_VERSION
    return version


def host_register(address: int, nbytes: int, device: int | None = None) -> None:
    """Pins memory for DMA by all devices and maps it at its host address.

    The call uses the context of `device`, or the calling thread's context if it is None. A thread
    that has not selected a device must name one: CUDA would use the first device, which may belong
    to another process.
    """
    _load().host_register(device, address, nbytes)


def host_unregister(address: int, device: int | None = None) -> None:
    _load().host_unregister(device, address)


class Event:
    """A point in the work of a stream, created without timing because that is faster."""

    def __init__(self, device: int) -> None:
        self._native: _cuda.Event = _load().Event(device)

    def record(self, stream_handle: int) -> None:
        self._native.record(stream_handle)

    def wait_in(self, stream_handle: int) -> None:
        """Makes later work of a stream wait for this point; does not block the caller."""
        self._native.wait_in(stream_handle)

    def query(self) -> bool:
        """Returns whether the work before the last `record` is done; True before any `record`."""
        return self._native.query()

    def synchronize(self) -> None:
        self._native.synchronize()

    def close(self) -> None:
        self._native.close()


class Stream:
    """A stream that does not synchronize with the default stream.

    It has the lowest priority. Ordinary streams, including those of vLLM, have the same priority,
    so copies yield only to work on streams of a higher one. `low_priority=False` selects the
    highest priority.
    """

    def __init__(self, device: int, low_priority: bool = True) -> None:
        self._native: _cuda.Stream = _load().Stream(device, low_priority)

    @property
    def handle(self) -> int:
        return self._native.handle

    def wait(self, event: Event) -> None:
        """Makes later work of this stream wait for the event; does not block the caller."""
        self._native.wait(event._native)

    def synchronize(self) -> None:
        self._native.synchronize()

    def close(self) -> None:
        self._native.close()


class DeviceBuffer:
    """Device memory. `close` waits for the device; a closed buffer has no address."""

    def __init__(self, device: int, nbytes: int) -> None:
        self._native: _cuda.DeviceBuffer = _load().DeviceBuffer(device, nbytes)

    @property
    def address(self) -> int:
        return self._native.address

    @property
    def nbytes(self) -> int:
        return self._native.nbytes

    def close(self) -> None:
        self._native.close()


class CudaBlockLayout:
    """Like `native.cpu.BlockLayout`, for device memory; its table of runs is on the device."""

    def __init__(
        self,
        device: int,
        addresses: NDArray[np.uint64],
        block_strides: NDArray[np.int64],
        run_bytes: NDArray[np.int64],
        slot_offsets: NDArray[np.int64],
        num_blocks: int,
    ) -> None:
        self._native: _cuda.CudaBlockLayout = _load().CudaBlockLayout(
            device, addresses, block_strides, run_bytes, slot_offsets, num_blocks
        )

    @property
    def num_blocks(self) -> int:
        return self._native.num_blocks

    @property
    def num_runs(self) -> int:
        return self._native.num_runs

    @property
    def block_bytes(self) -> int:
        return self._native.block_bytes

    @property
    def alignment(self) -> int:
        """Bytes the kernel moves at once (16, 8, 4 or 1), if the target is aligned as well."""
        return self._native.alignment


def gather(
    layout: CudaBlockLayout,
    block_ids: NDArray[np.int64],
    target_address: int,
    target_nbytes: int,
    slot_offsets: NDArray[np.int64],
    stream_handle: int,
    ctas: int = 0,
) -> None:
    """Enqueues a kernel that copies block `block_ids[i]` to byte `slot_offsets[i]` of the target.

    The target is device memory, or pinned and mapped host memory. For host memory a few thread
    blocks (`ctas=8`) saturate the bus and leave the rest of the device to others; `ctas=0` uses the
    whole device. Slot offsets must be multiples of 64 and slots disjoint.
    """
    _load().gather(
        layout._native, block_ids, target_address, target_nbytes, slot_offsets, stream_handle, ctas
    )


def scatter(
    layout: CudaBlockLayout,
    block_ids: NDArray[np.int64],
    target_address: int,
    target_nbytes: int,
    slot_offsets: NDArray[np.int64],
    stream_handle: int,
    ctas: int = 0,
    part_begin: int = 0,
    part_end: int | None = None,
) -> None:
    """Like `gather`, in the other direction. Block ids must be unique; slots may repeat.

    With a part, only pieces (of at most 16 KiB) that begin in these bytes of a slot are copied.
    Consecutive parts copy everything, and after each part all bytes before its end are copied.
    """
    _load().scatter(
        layout._native,
        block_ids,
        target_address,
        target_nbytes,
        slot_offsets,
        stream_handle,
        ctas,
        part_begin,
        part_end,
    )


def copy_to_host(
    src_address: int,
    src_offsets: NDArray[np.int64],
    dst_address: int,
    dst_offsets: NDArray[np.int64],
    nbytes_each: int,
    stream_handle: int,
    device: int | None = None,
    host_piece_bytes: int = 0,
) -> None:
    """Enqueues DMA of `nbytes_each` bytes from each source offset to its target offset.

    Ranges that are adjacent on both sides are merged. `device` is current during the call; None
    keeps the device of the calling thread. If `host_piece_bytes` is not 0, the host memory was
    registered in pieces of this size, starting at its address, and no copy spans two of them.
    """
    _load().copy_to_host(
        src_address,
        src_offsets,
        dst_address,
        dst_offsets,
        nbytes_each,
        stream_handle,
        device,
        host_piece_bytes,
    )


def copy_to_device(
    src_address: int,
    src_offsets: NDArray[np.int64],
    dst_address: int,
    dst_offsets: NDArray[np.int64],
    nbytes_each: int,
    stream_handle: int,
    device: int | None = None,
    host_piece_bytes: int = 0,
) -> None:
    """Like `copy_to_host`, in the other direction."""
    _load().copy_to_device(
        src_address,
        src_offsets,
        dst_address,
        dst_offsets,
        nbytes_each,
        stream_handle,
        device,
        host_piece_bytes,
    )
