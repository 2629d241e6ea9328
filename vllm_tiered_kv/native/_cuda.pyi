import numpy as np
from numpy.typing import NDArray

RUNTIME_VERSION: int

def device_count() -> int: ...
def host_register(device: int | None, address: int, nbytes: int) -> None: ...
def host_unregister(device: int | None, address: int) -> None: ...

class Event:
    def __init__(self, device: int) -> None: ...
    def record(self, stream_handle: int) -> None: ...
    def wait_in(self, stream_handle: int) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...

class Stream:
    def __init__(self, device: int, low_priority: bool) -> None: ...
    @property
    def handle(self) -> int: ...
    def wait(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...

class DeviceBuffer:
    def __init__(self, device: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def close(self) -> None: ...

class CudaBlockLayout:
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
    def alignment(self) -> int: ...

def gather(
    layout: CudaBlockLayout,
    block_ids: NDArray[np.int64],
    target_address: int,
    target_nbytes: int,
    slot_offsets: NDArray[np.int64],
    stream_handle: int,
    ctas: int,
) -> None: ...
def scatter(
    layout: CudaBlockLayout,
    block_ids: NDArray[np.int64],
    target_address: int,
    target_nbytes: int,
    slot_offsets: NDArray[np.int64],
    stream_handle: int,
    ctas: int,
    part_begin: int,
    part_end: int | None,
) -> None: ...
def copy_to_host(
    src_address: int,
    src_offsets: NDArray[np.int64],
    dst_address: int,
    dst_offsets: NDArray[np.int64],
    nbytes_each: int,
    stream_handle: int,
    device: int | None,
    host_piece_bytes: int,
) -> None: ...
def copy_to_device(
    src_address: int,
    src_offsets: NDArray[np.int64],
    dst_address: int,
    dst_offsets: NDArray[np.int64],
    nbytes_each: int,
    stream_handle: int,
    device: int | None,
    host_piece_bytes: int,
) -> None: ...
