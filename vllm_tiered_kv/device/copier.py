"""The protocol of a back-end that moves blocks between a device's layers and the arena.

Nothing here waits for a copy on the engine's path: calls enqueue, `poll` tells what has ended.

Order is the whole point (each line is a way to a wrong token if broken):
- `store` reads the blocks as they are after all work enqueued so far on the compute stream, any
  time later. Stores end in the order in which they began.
- `wait_for_stores` comes before anything that writes a block which a store may still read: what is
  enqueued on the compute stream from then on runs after these stores, and so do loads behind a
  later fence.
- `fence` marks the point on the compute stream that later `load` calls must not overtake.
- `load` writes blocks after the last fence; not after the forward enqueued since the fence, which
  would end all overlap. A `Channel` keeps the same order.
- `load_ahead` is for blocks that the coming forward reads: the compute stream waits for them, as a
  whole or layer by layer, and what is enqueued after `finish_ahead` comes after all of them.
  With `overtakes` it does not wait for the fence, only for stores that were waited for: the caller
  knows that no step under way uses the blocks.
- `load_early` is the same while the step is still being planned: it writes after the last fence,
  and what is enqueued after `begin_step` comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_tiered_kv.core.transfer import GroupTransfer, Int64Array
from vllm_tiered_kv.metrics.names import DropReason
from vllm_tiered_kv.native.cpu import HostRegion


@dataclass(frozen=True)
class StoreDone:
    """The first `stored` blocks of the job are in their slots."""

    job_id: int
    stored: int
    reason: DropReason | None = None


@dataclass(frozen=True)
class LoadDone:
    """All blocks of a request are on the device, or `error` says why not."""

    request_id: str
    error: str | None = None
    ended_at: float | None = None
    """By `time.monotonic`, if that is known better than that it has ended."""


@dataclass(frozen=True)
class PinnedBlocks:
    """GPU blocks of one group, and their places in a pinned region."""

    group_id: int
    block_ids: Int64Array
    region: HostRegion
    offsets: Int64Array


class Channel(Protocol):
    """Copies blocks in from memory other than the arena, in a thread of its own.

    The memory is pinned where the device asks for that.
    """

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        """Starts to copy from these places of the region; may return before the copy ends."""

    def finish(self) -> None:
        """Waits until every copy of this channel has ended, also after an error."""

    def close(self) -> None: ...


class Copier(Protocol):
    def open_channel(self) -> Channel:
        """Another way in, for one thread. Close it before the copier."""

    def fence(self) -> None:
        """Marks the compute stream before a step's forward."""

    def store(self, job_id: int, transfer: GroupTransfer) -> None:
        """Copies blocks out."""

    def wait_for_stores(self, newest: int) -> None:
        """Lets the compute stream wait for the stores up to this job that have not ended."""

    def load(self, request_id: str, transfers: Sequence[GroupTransfer]) -> None:
        """Copies blocks in."""

    def locate(self, transfer: GroupTransfer) -> PinnedBlocks:
        """Where the slots of a transfer lie in the arena."""

    def load_ahead(
        self,
        job_ids: Sequence[int],
        blocks: Sequence[PinnedBlocks],
        by_layer: bool,
        overtakes: bool = False,
    ) -> None:
        """Copies blocks in ahead of the forward that reads them; once a step.

        With `by_layer`, each layer of the forward has to call `wait_for_layer` before it reads.
        An error means that nothing is under way any more and that the blocks hold anything.
        """

    def can_load_early(self) -> bool:
        """Whether all earlier work is known to be on the stream that a fence would mark now."""

    def load_early(self, job_ids: Sequence[int], blocks: Sequence[PinnedBlocks]) -> None:
        """As `load_ahead`, before the step has begun, and any number of times."""

    def begin_step(self) -> None:
        """What is enqueued from now on waits for all that `load_early` began."""

    def wait_for_layer(self, name: str) -> None:
        """Lets the compute stream wait for this layer's part of `load_ahead`."""

    def finish_ahead(self) -> None:
        """The forward has been enqueued."""

    def settle(self) -> None:
        """Waits until no copy is under way: the next polls tell of all of them."""

    def poll_ahead(self) -> list[int]:
        """Jobs of `load_ahead` that have ended since the last call."""

    def settle_sources(self) -> None:
        """Waits on the host until every source block of a `store` has been read."""

    def poll(self) -> tuple[list[StoreDone], list[LoadDone]]:
        """What has ended since the last call; never waits."""

    def close(self) -> None:
        """Waits for copies under way and frees everything. Idempotent."""
