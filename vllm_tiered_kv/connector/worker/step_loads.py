"""A worker's loads that the coming forward waits for: from the CPU tier, and from a daemon's memory
that is mapped here and leased by the lookup.

vLLM has promised the request's tokens to this very step, so such a load must not fail for want of
anything that could be foreseen; the scheduler half plans it only where all is at hand. What fails
nevertheless is tried again by plain copies, page by page. Should those fail too, it is reported by
block, where vLLM can still throw the step away. With asynchronous scheduling it cannot: the next
step, already under way, would be believed. A GPU that takes no copies at all ends the engine then,
as it would at vLLM's own next copy.
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

_MAPPED_ANEW_S = 5.0


class StepLoads:
    def __init__(self, steps_can_be_discarded: bool) -> None:
        """`steps_can_be_discarded`: vLLM has no later step under way when it hears of an error of
        this one, so that its result can be thrown away."""
        self._steps_can_be_discarded = steps_can_be_discarded
        self._ended: dict[int, list[bool]] = {}
        self._invalid_blocks: set[int] = set()
        self._residents: dict[int, list[Resident]] = {}  # by job, while its copies may be under way

    def __bool__(self) -> bool:
        """Whether there is something to report."""
        return bool(self._ended)

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
        except Exception as error:  # whatever it was, the requests must hear of it
            for number in numbers:
                self._leave(number)
            if not self._steps_can_be_discarded:
                raise CudaError(
                    f"blocks of this step cannot be copied to the GPU: {error}"
                ) from error
            logger.exception("a load failed; its requests are recomputed")
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
                # What the step computed from it may have been told already. Nothing but a daemon
                # or a scheduler that broke its word can bring this about.
                raise UnsafeAnswerError(
                    "a daemon's memory changed while a step read blocks it had leased: the engine "
                    "ends rather than answer from them"
                )
            self._ended[number] = [True]

    def take_ended(self) -> dict[int, list[bool]]:
        """Jobs that ended since the last call, and whether they went well."""
        ended, self._ended = self._ended, {}
        return ended

    def take_invalid_blocks(self) -> set[int]:
        """GPU blocks that this step's forward read although their load had failed."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def close(self) -> None:
        """No copy is under way any more."""
        for number in list(self._residents):
            self._leave(number)

    def _enter(self, number: int, job: LoadJob, remote: RemoteIO | None) -> list[PinnedBlocks]:
        residents = self._residents.setdefault(number, []) if job.remote else []
        for transfer in job.remote:
            residents.append(_resident(transfer, remote))
        return [resident.blocks for resident in residents]

    def _leave(self, number: int) -> None:
        for resident in self._residents.pop(number, ()):
            resident.leave()


def _resident(transfer: RemoteTransfer, remote: RemoteIO | None) -> Resident:
    """It was said to be mapped and stays so. If it is being mapped anew, waiting is worth it."""
    end = time.monotonic() + _MAPPED_ANEW_S
    while remote is not None:
        resident = remote.resident(transfer)
        if resident is not None:
            return resident
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    raise CudaError(f"memory of {transfer.address} is not mapped here")
