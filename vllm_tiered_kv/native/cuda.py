"""Block copies on an NVIDIA GPU, and the few CUDA objects they need.

Importing this needs neither a GPU nor the compiled module; `why_unavailable` says what is missing,
and every other call then raises `NoDeviceError` with the same sentence. Copies are queued on the
caller's stream and the calls return at once: the caller keeps both memories alive until the stream
has passed. A bad argument is a `NativeError` that begins with its name, a failed CUDA call a
`CudaError` with the call's name.
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
            reason = f"the CUDA module does not load: {missing}"
        raise NoDeviceError(reason) from missing
    return _cuda


def why_unavailable() -> str | None:
    """One sentence, or None where there is a device to use."""
    try:
        device_count()
    except NoDeviceError as reason:
        return str(reason)
    return None


def available() -> bool:
    return why_unavailable() is None


def device_count() -> int:
    """At least 1; `NoDeviceError` otherwise."""
    count: int = _load().device_count()
    return count


def host_register(address: int, nbytes: int, device: int | None = None) -> None:
    """Pin memory for DMA by every device and map it at its own address.

    `device` says whose context does it, None the calling thread's. Name it on a thread that has
    not chosen one: CUDA would take the first device, which may be another process's.
    """
    _load().host_register(device, address, nbytes)


def host_unregister(address: int, device: int | None = None) -> None:
    _load().host_unregister(device, address)


class Event:
    """A point in a stream's work. Without timing, which would slow it down."""

    def __init__(self, device: int) -> None:
        self._native: _cuda.Event = _load().Event(device)

    def record(self, stream_handle: int) -> None:
        self._native.record(stream_handle)

    def wait_in(self, stream_handle: int) -> None:
        """Let later work of any stream wait for this point; the caller does not."""
        self._native.wait_in(stream_handle)

    def query(self) -> bool:
        """Whether the work before the last `record` is done; true where nothing was recorded."""
        return self._native.query()

    def synchronize(self) -> None:
        self._native.synchronize()

    def close(self) -> None:
        self._native.close()


class Stream:
    """A stream that does not wait for the default stream.

    Its priority is the lowest there is, which ordinary streams have too, those of vLLM among them:
    copies come second only where somebody computes at a higher one. `low_priority=False` takes the
    highest.
    """

    def __init__(self, device: int, low_priority: bool = True) -> None:
        self._native: _cuda.Stream = _load().Stream(device, low_priority)

    @property
    def handle(self) -> int:
        return self._native.handle

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for the event; the caller does not."""
        self._native.wait(event._native)

    def synchronize(self) -> None:
        self._native.synchronize()

    def close(self) -> None:
        self._native.close()


class DeviceBuffer:
    """Memory of a device. `close` waits for the device; a closed buffer has no address."""

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
    """`native.cpu.BlockLayout` for blocks in device memory; holds its table of runs there."""

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
        """Bytes the kernel moves at once (16, 8, 4 or 1), given a target aligned as well."""
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
    """Queue a kernel that copies block `block_ids[i]` to byte `slot_offsets[i]` of the target.

    The target is device memory, or host memory that is pinned and mapped: then a few thread blocks
    (`ctas=8`) fill the bus and leave the rest of the device alone. `ctas=0` takes all of it. Slot
    offsets are multiples of 64 and the slots disjoint.
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
    """As `gather` in the other direction; the block ids are unique, slots may repeat.

    With a part, only pieces (of at most 16 KiB) that begin in these bytes of a slot are copied:
    parts that follow each other copy everything, and after one of them all bytes before its end
    are there.
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
    """Queue DMA of `nbytes_each` bytes from each source offset to its target offset.

    Ranges that continue each other on both sides travel as one. `device` is made current for the
    call; None leaves the calling thread's own. `host_piece_bytes` says that the host memory was
    registered in pieces of so many bytes, counted from its address: no copy spans two of them.
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
    """As `copy_to_host` in the other direction."""
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
