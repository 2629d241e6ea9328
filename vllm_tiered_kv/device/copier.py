"""The protocol of a back-end that copies blocks between a device's layers and the arena.

Calls enqueue copies and return; `poll` returns the finished ones. The engine's step never waits on
the host for a copy, except where a method says so.

The protocol is mainly about order. Violating any of these rules can produce a wrong token:
- `store` reads blocks after all work enqueued so far on the compute stream, at any later time.
  Stores finish in the order in which they were enqueued.
- `wait_for_stores` must precede anything that writes a block which a store may still read. Work
  enqueued on the compute stream afterwards runs after these stores; so do loads after a later
  fence.
- `fence` marks the point on the compute stream that later `load` calls must not overtake.
- `load` writes blocks after the last fence. It does not wait for the forward pass enqueued since
  the fence, because then copies and compute would never overlap. A `Channel` keeps the same order.
- `step_load` is for blocks that the next forward pass reads. The compute stream waits for them, as
  a whole or layer by layer, and work enqueued after `finish_step_loads` runs after all of
  them. With `overtakes` it waits only for the stores passed to `wait_for_stores`, not the fence:
  the caller knows that no running step uses the blocks.
- `load_early` does the same while the step is still being planned. It writes after the last fence,
  and work enqueued after `begin_step` runs after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array
from vllm_tiered_kv.errors import NativeError
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native.cpu import HostRegion


@dataclass(frozen=True)
class StoreDone:
    """Result of a store: the first `stored` blocks of the job are in their slots."""

    job_id: int
    stored: int
    reason: DropReason | None = None


@dataclass(frozen=True)
class LoadDone:
    """Result of a load: all blocks of a request are on the device, or `error` says why not."""

    request_id: str
    error: str | None = None
    ended_at: float | None = None
    """When the load finished, by `time.monotonic`; None if the back-end does not know it."""


@dataclass(frozen=True)
class PinnedBlocks:
    """GPU blocks of one group, and the offsets of their slots in a pinned region."""

    group_id: int
    block_ids: Int64Array
    region: HostRegion
    offsets: Int64Array

    def part(self, start: int, stop: int) -> PinnedBlocks:
        which = slice(start, stop)
        return PinnedBlocks(self.group_id, self.block_ids[which], self.region, self.offsets[which])

    def require_within(self, nbytes: int) -> None:
        """Checks slot offsets before a DMA, which accepts any address. Kernels check them."""
        if not len(self.offsets):
            return
        if self.offsets.min() < 0 or self.offsets.max() + nbytes > self.region.nbytes:
            raise NativeError(
                f"slot_offsets: not all lie in a region of {self.region.nbytes} bytes"
            )

    def require_blocks(self, num_blocks: int) -> None:
        """Checks block ids before a DMA, which accepts any address."""
        ids = self.block_ids
        if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
            raise NativeError(f"block_ids: not all are in [0, {num_blocks})")


class Channel(Protocol):
    """Copies blocks to the device from memory other than the arena.

    One thread uses a channel, such as the one that loads blocks from a daemon. The memory must be
    pinned if the device requires it.
    """

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        """Enqueues a copy from these offsets of the region to the blocks; may return before it
        finishes."""

    def finish(self) -> None:
        """Waits until every copy of this channel has finished, also after an error."""

    def close(self) -> None: ...


class Copier(Protocol):
    """Copies blocks of one device. The worker's main thread calls it."""

    def open_channel(self) -> Channel:
        """Opens a channel for another thread. Close it before the copier."""

    def fence(self) -> None:
        """Marks the compute stream before a step's forward pass."""

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        """Copies blocks from the device to the arena."""

    def wait_for_stores(self, newest: int) -> None:
        """Makes the compute stream wait for the unfinished stores up to this job."""

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        """Copies blocks from the arena to the device."""

    def locate(self, transfer: GroupTransfer) -> PinnedBlocks:
        """Returns the offsets in the arena of a transfer's slots."""

    def step_load(
        self,
        job_ids: Sequence[int],
        blocks: Sequence[PinnedBlocks],
        by_layer: bool,
        overtakes: bool = False,
    ) -> None:
        """Copies blocks to the device before the forward pass that reads them; once per step.

        With `by_layer`, each layer of the forward pass must call `wait_for_layer` before it reads.
        After an error no copy is running any more, and the content of the blocks is undefined.
        """

    def can_load_early(self) -> bool:
        """Returns whether all earlier work is on the stream that a fence would mark now."""

    def load_early(self, job_ids: Sequence[int], blocks: Sequence[PinnedBlocks]) -> None:
        """Like `step_load`, but before the step begins, and any number of times."""

    def begin_step(self) -> None:
        """Makes work enqueued from now on wait for all loads of `load_early`."""

    def wait_for_layer(self, name: str) -> None:
        """Makes the compute stream wait for this layer's part of `step_load`."""

    def finish_step_loads(self) -> None:
        """Called after the forward pass has been enqueued."""

    def settle(self) -> None:
        """Waits on the host until no copy is running; the next polls return all of them."""

    def poll_step_loads(self) -> list[int]:
        """Returns the jobs of `step_load` and `load_early` that finished since the last call."""

    def settle_sources(self) -> None:
        """Waits on the host until every source block of a `store` has been read."""

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        """Returns the stores and loads that finished since the last call; never waits."""

    def close(self) -> None:
        """Waits for running copies and releases all resources. Idempotent."""
