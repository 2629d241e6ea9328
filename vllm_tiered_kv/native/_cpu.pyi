from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

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
def follow(first: Any, last: Any, next: str, wanted: str, most: int) -> list[Any]:
    """Returns the attribute `wanted` of `first` and of the objects that follow it by `next`, before
    `last`, at most `most` of them. A Python loop over thousands of objects is slow."""

def send_frames(function: int, socket: int, buffers: Sequence[Buffer], flags: int) -> int:
    """Sends each buffer with the function at this address, which must be zmq_send_const.

    Nothing is copied, so the memory must stay valid until zmq has sent it. Returns 0, or the errno
    of the first buffer that zmq refused."""

def copy_and_hash(into: Sequence[Buffer], sources: Sequence[Buffer], threads: int) -> list[int]: ...

class ZmqReceiver:
    def __init__(
        self,
        socket: int,
        recv: int,
        msg_init: int,
        msg_recv: int,
        msg_data: int,
        msg_size: int,
        msg_more: int,
        msg_get: int,
        msg_gets: int,
        msg_close: int,
    ) -> None: ...
    def receive(self, most: int) -> tuple[bytes, bytes, int, int | None, str, bool] | None: ...
    def drop(self, most: int) -> tuple[int, int, bool]: ...

MAX_REPLY_BLOCKS: int

def read_get(
    header: Buffer, prefix: bytes, width: int, most: int
) -> tuple[int, list[Any]] | None: ...
def pack_get_reply(
    request_id: int, blocks: list[Any], allowed: Set[int]
) -> tuple[bytes, int] | None: ...

class ZmqSender:
    def __init__(self, send: int, msg_init_data: int, msg_send: int, msg_close: int) -> None: ...
    def send(
        self,
        socket: int,
        identity: bytes,
        header: bytes,
        payload: Sequence[Buffer],
        copies: bool,
        ticket: int,
    ) -> int: ...
    def send_get_reply(
        self,
        socket: int,
        identity: bytes,
        request_id: int,
        blocks: list[Any],
        allowed: Set[int],
        ticket: int,
    ) -> int: ...
    def take_sent(self) -> list[int]: ...

class FillPool:
    """Copies received blocks to their slots without blocking the caller. Thread-safe.

    The daemon's event loop starts copies and collects finished ones when `descriptor` is readable.
    """

    @property
    def descriptor(self) -> int:
        """Readable while there are finished copies to collect. Closed with this pool."""

    def start(
        self, ticket: int, into: Sequence[Buffer], sources: Sequence[Buffer], threads: int
    ) -> None:
        """Like `copy_and_hash`, but returns at once. The buffers are held until the ticket is
        collected. Each ticket must be larger than the one before."""

    def collect(self) -> list[tuple[int, list[int]]]:
        """Returns the tickets finished since the last call, with the checksums of their blocks."""

    def wait(self) -> None:
        """Waits until all copies started before the call have finished and can be collected."""

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
) -> tuple[list[bytes], bytes]:
    """Returns the keys of the blocks of `tokens[start:stop]`, and the digest for the next call.

    `digest[i] = SHA-256(digest[i - 1] || u32le(len(extra)) || extra || tokens of block i, u32le)`
    with `parent` (32 bytes) before the first and `extra = extras.get(i, b"")`, where `i` counts the
    blocks of this call from 0. A key is the first 16 bytes of its digest, followed by `suffix`. A
    token outside `[0, 2**32)` raises NativeError, because a placeholder must never get a key.
    """

def _force_portable(on: bool) -> None: ...

EVICTION_POLICIES: list[str]

def release_free_memory() -> None: ...

class SlotPool:
    def __init__(
        self, capacity_bytes: int, slab_bytes: int, num_slabs: int, slots_per_slab: int
    ) -> None: ...
    def add_class(self, slot_bytes: int) -> int: ...
    def allocate(self, size_class: int) -> int | None: ...
    def adopt(self, slots: Sequence[int], size_classes: Sequence[int]) -> None: ...
    def release(self, slot: int) -> None: ...

class Ghosts:
    EVICTED_AFTER_SENT: int
    def __init__(self, max: int) -> None: ...
    def __len__(self) -> int: ...
    def dropped(self, key: bytes, reason: int) -> None: ...
    def find(self, key: bytes) -> tuple[float, int, int] | None: ...
    def evicted_run(self, keys: Sequence[bytes], start: int, stop: int) -> list[int]: ...

class BlockIndex:
    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        num_slabs: int,
        slots_per_slab: int,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None,
        may_evict: Callable[[bytes], bool] | None,
        is_below: Callable[[bytes], bool] | None,
        now: Callable[[], int] | None,
        ghosts: Ghosts | None,
    ) -> None: ...
    def add_class(self, slot_bytes: int, owner: bytes) -> int: ...
    def reuse_class(self, slot_bytes: int, owner: bytes) -> int | None: ...
    def set_quota(self, owner: bytes, quota_bytes: int) -> None: ...
    def forget_quota(self, owner: bytes) -> None: ...
    @property
    def quotas(self) -> int: ...
    def limit(self, usable_bytes: int) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def readable(self) -> int: ...
    @property
    def held(self) -> int: ...
    def lookup(self, key: bytes) -> int: ...
    def match_prefix(self, keys: Sequence[bytes], start: int, stop: int) -> int: ...
    def match_known(self, keys: Sequence[bytes], start: int, stop: int) -> int: ...
    def are_readable(self, keys: Sequence[bytes]) -> list[bool]: ...
    def are_missing(self, keys: Sequence[bytes]) -> list[bool]: ...
    def slot_of(self, key: bytes) -> int | None: ...
    def block_in(self, slot: int) -> tuple[bytes, bytes | None]: ...
    def blocks_in(self, slots: Sequence[int]) -> list[tuple[bytes, bytes | None]]: ...
    def slots(self) -> list[tuple[int, bytes, bool, int, int]]: ...
    def touch(self, keys: Sequence[bytes]) -> None: ...
    def mark_dead(self, keys: Sequence[bytes]) -> None: ...
    def expect_again(self, keys: Sequence[bytes], seconds: float) -> None: ...
    def pin(self, keys: Iterable[bytes]) -> list[int]: ...
    def pin_slots(self, slots: Iterable[int]) -> None: ...
    def unpin(self, slots: Iterable[int]) -> None: ...
    def reserve(
        self, key: bytes, parent: bytes | None, size_class: int, more: int
    ) -> int | None: ...
    def reserve_missing(
        self,
        keys: Sequence[bytes],
        start: int,
        stop: int,
        skip_start: int,
        skip_stop: int,
        size_class: int,
    ) -> tuple[list[int], list[int], int]: ...
    def reserve_all(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None], size_class: int
    ) -> list[int]: ...
    def commit(self, slot: int) -> bool: ...
    def commit_all(self, slots: Sequence[int]) -> list[bool]: ...
    def commit_each(self, slots: Sequence[int]) -> list[bool | str]: ...
    def mark_sent(self, slots: Sequence[int]) -> None: ...
    def abort(self, slot: int) -> None: ...
    def remove(self, key: bytes, in_slot: int | None) -> bool: ...
    def clear(self) -> None: ...
    def take_evicted(self) -> tuple[int, int]: ...
    def check(self) -> None: ...

class DurableIndex(BlockIndex):
    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        num_slabs: int,
        slots_per_slab: int,
        eviction: str,
        on_evict: Callable[[bytes, int], None] | None,
        on_leave: Callable[[int], None] | None,
    ) -> None: ...
    def free_slots(self, size_class: int) -> int: ...
    def owned_slots(self, size_class: int) -> int: ...
    def coldest_first(self) -> list[int]: ...
    def make_room(self, size_class: int, slots: int, parent: bytes | None) -> int: ...
    def evict_coldest(self, parent: bytes | None) -> bool: ...
    @property
    def has_quarantined(self) -> bool: ...
    def take_quarantined(self) -> list[int]: ...
    def quarantine_again(self, slots: Iterable[int]) -> None: ...
    def release(self, slots: Iterable[int]) -> None: ...
    def retire(self, slot: int) -> None: ...
    def set_facts(self, slot: int, length: int, checksum: int) -> None: ...
    def facts_in(self, slot: int) -> tuple[int, int]: ...
    def rows(
        self, width: int
    ) -> tuple[
        NDArray[np.uint8],
        NDArray[np.uint8],
        NDArray[np.uint8],
        NDArray[np.uint8],
        NDArray[np.int64],
        NDArray[np.uint32],
        NDArray[np.uint64],
    ]: ...
    def restore_rows(
        self,
        keys: NDArray[np.uint8],
        key_bytes: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        parent_bytes: NDArray[np.uint8],
        slots: NDArray[np.int64],
        size_classes: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> None: ...
    def restore(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        slots: Sequence[int],
        size_classes: Sequence[int],
    ) -> None: ...
