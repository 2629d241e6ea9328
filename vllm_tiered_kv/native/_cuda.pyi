import numpy as np
from numpy.typing import NDArray

RUNTIME_VERSION: int
"""The version of the CUDA runtime in the module, 13000 for 13.0."""

def device_count() -> int:
    """Returns the number of devices, at least 1; raises `NoDeviceError` if there is none."""

def host_register(address: int, nbytes: int, device: int | None = None) -> None:
    """Pins memory for DMA by all devices and maps it at its host address.

    The call uses the context of `device`, or the calling thread's context if it is None. A thread
    that has not selected a device must name one: CUDA would use the first device, which may belong
    to another process.
    """

def host_unregister(address: int, device: int | None = None) -> None: ...

class Event:
    """A point in the work of a stream, created without timing because that is faster."""

    def __init__(self, device: int) -> None: ...
    def record(self, stream_handle: int) -> None: ...
    def wait_in(self, stream_handle: int) -> None:
        """Makes later work of a stream wait for this point; does not block the caller."""

    def query(self) -> bool:
        """Returns whether the work before the last `record` is done; True before any `record`."""

    def synchronize(self) -> None: ...
    def close(self) -> None: ...

class Stream:
    """A stream that does not synchronize with the default stream.

    It has the lowest priority. Ordinary streams, including those of vLLM, have the same priority,
    so copies yield only to work on streams of a higher one. `low_priority=False` selects the
    highest priority.
    """

    def __init__(self, device: int, low_priority: bool = True) -> None: ...
    @property
    def handle(self) -> int: ...
    def wait(self, event: Event) -> None:
        """Makes later work of this stream wait for the event; does not block the caller."""

    def synchronize(self) -> None: ...
    def close(self) -> None: ...

class DeviceBuffer:
    """Device memory. `close` waits for the device; a closed buffer has no address."""

    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...

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
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_runs(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def alignment(self) -> int:
        """Bytes the kernel moves at once (16, 8, 4 or 1), if the target is aligned as well."""

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
