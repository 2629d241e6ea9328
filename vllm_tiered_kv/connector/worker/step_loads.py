"""A worker's step loads: the coming forward waits for them. Their blocks are in the CPU tier, or in
a daemon's memory that is mapped here and leased by the lookup.

The step already computes the request's remaining tokens, so a step load must not fail for a
foreseeable reason; the scheduler half plans one only if all its blocks are resident. If the copy
fails nevertheless, the copier retries with plain copies, page by page. If those fail too, the
blocks are reported as invalid, and vLLM discards the step. With asynchronous scheduling vLLM cannot
discard it, because the next step is already in flight; the error then ends the engine, as vLLM's
own next copy on such a GPU would.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

from vllm_tiered_kv.connector.worker.remote_io import RemoteIO
from vllm_tiered_kv.connector.worker.shared_region import Resident
from vllm_tiered_kv.core.transfer import LoadJob, RemoteTransfer
from vllm_tiered_kv.device.copier import Copier, PinnedBlocks
from vllm_tiered_kv.errors import CudaError, UnsafeAnswerError

logger = logging.getLogger(__name__)

_REMAP_S = 5.0


class StepLoads:
    """Step loads of one worker. `WorkerHalf` calls it from the model's thread."""

    def __init__(self, steps_can_be_discarded: bool) -> None:
        """`steps_can_be_discarded`: vLLM has no later step in flight when it learns of an error of
        this one, so that it can discard the step's result."""
        self._steps_can_be_discarded = steps_can_be_discarded
        self._ended: dict[int, list[bool]] = {}
        self._invalid_blocks: set[int] = set()
        self._residents: dict[int, list[Resident]] = {}  # by job, until its copies have ended

    def start(
        self,
        copier: Copier,
        remote: RemoteIO | None,
        jobs: Sequence[LoadJob],
        by_layer: bool,
        overtakes: bool,
    ) -> None:
        load = functools.partial(copier.step_load, by_layer=by_layer, overtakes=overtakes)
        self._start(copier, remote, jobs, load)

    def start_early(self, copier: Copier, remote: RemoteIO | None, jobs: Sequence[LoadJob]) -> None:
        self._start(copier, remote, jobs, copier.load_early)

    def _start(
        self,
        copier: Copier,
        remote: RemoteIO | None,
        jobs: Sequence[LoadJob],
        enqueue: Callable[[Sequence[int], Sequence[PinnedBlocks]], None],
    ) -> None:
        numbers = [job.step_load for job in jobs if job.step_load is not None]
        try:
            blocks: list[PinnedBlocks] = []
            for number, job in zip(numbers, jobs, strict=True):
                blocks += [copier.locate(transfer) for transfer in job.transfers]
                blocks += self._enter(number, job, remote)
            enqueue(numbers, blocks)
        except Exception as error:  # the requests must not use the blocks, whatever failed
            for number in numbers:
                self._leave(number)
            if not self._steps_can_be_discarded:
                raise CudaError(
                    f"blocks of this step cannot be copied to the GPU: {error}"
                ) from error
            logger.exception("step loads %s failed; their requests are recomputed", numbers)
            self._ended.update({number: [False] for number in numbers})
            for job in jobs:
                for local in job.transfers:
                    self._invalid_blocks.update(local.block_ids.tolist())
                for remote_transfer in job.remote:
                    self._invalid_blocks.update(remote_transfer.block_ids.tolist())

    def poll(self, copier: Copier) -> None:
        for number in copier.poll_step_loads():
            intact = all(resident.are_intact for resident in self._residents.get(number, ()))
            self._leave(number)
            if not intact:
                # The step may have returned tokens already. Only a daemon that reuses leased slots
                # or a scheduler that releases a lease too early can cause this.
                raise UnsafeAnswerError(
                    "a daemon's memory changed while a step read leased blocks from it; the engine "
                    "stops rather than return wrong tokens"
                )
            self._ended[number] = [True]

    def take_ended(self) -> dict[int, list[bool]]:
        """Returns the loads that ended since the last call, and whether each succeeded."""
        ended, self._ended = self._ended, {}
        return ended

    def take_invalid_blocks(self) -> set[int]:
        """Returns the GPU blocks that this step's forward read although their load failed."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """Releases all blocks. The caller has made sure that no copy is in flight."""
        for number in list(self._residents):
            self._leave(number)

    def _enter(self, number: int, job: LoadJob, remote: RemoteIO | None) -> list[PinnedBlocks]:
        residents = self._residents.setdefault(number, []) if job.remote else []
        for transfer in job.remote:
            residents.append(_resident(transfer, remote))
        return [part for resident in residents for part in resident.blocks]

    def _leave(self, number: int) -> None:
        for resident in self._residents.pop(number, ()):
            resident.leave()


def _resident(transfer: RemoteTransfer, remote: RemoteIO | None) -> Resident:
    """Returns the transfer's blocks. The worker reported the memory as mapped, and keeps it so; if
    it is being remapped, waiting is cheaper than failing the step."""
    end = time.monotonic() + _REMAP_S
    while remote is not None:
        resident = remote.resident(transfer)
        if resident is not None:
            return resident
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    raise CudaError(f"the memory of daemon {transfer.address} is not mapped in this worker")
