from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class BlockLayout:
    def __init__(
        self,
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

def gather(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    address: int,
    nbytes: int,
    slot_offsets: NDArray[np.int64],
    threads: int,
) -> None: ...
def scatter(
    layout: BlockLayout,
    block_ids: NDArray[np.int64],
    address: int,
    nbytes: int,
    slot_offsets: NDArray[np.int64],
    threads: int,
) -> None: ...
def checksum(
    address: int,
    region_nbytes: int,
    offsets: NDArray[np.int64],
    nbytes: int,
    threads: int,
) -> NDArray[np.uint64]: ...
def xxh3_64(data: Buffer) -> int: ...
def hash_buffers(buffers: Sequence[Buffer], threads: int) -> list[int]: ...
def copy_and_hash(into: Sequence[Buffer], sources: Sequence[Buffer], threads: int) -> list[int]: ...
def read_file_blocks(
    fd: int, offsets: NDArray[np.int64], into: Sequence[Buffer], threads: int
) -> tuple[list[int], list[int]]: ...
def write_file_blocks(
    fd: int,
    offsets: NDArray[np.int64],
    sources: Sequence[Buffer],
    expected: Sequence[int | None],
    threads: int,
) -> tuple[list[int], list[int]]: ...
def sha256(data: Buffer) -> bytes: ...
def extend_keys(
    parent: bytes,
    tokens: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
    start: int,
    stop: int,
    block_size: int,
    extras: dict[int, bytes] | None,
    suffix: bytes,
) -> tuple[list[bytes], bytes]: ...
def _force_portable(on: bool) -> None: ...
