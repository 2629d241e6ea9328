"""Compares recomputed blocks with the cached blocks of a tier (option verify_fraction).

The worker copies the recomputed block from the GPU into a spare slot of the arena, like a store.
When the copy has ended, a thread compares it with the block in the CPU tier, or reads the daemon's
block and compares it with that. The verifier reports every job exactly once, even a failed one,
because the scheduler keeps the job's slots until then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered_kv.core.arena_geometry import ArenaGeometry
from vllm_tiered_kv.core.block_compare import LayerNumbers, compare
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import Int64Array, StoreJob
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict, VerifyJob
from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.copier import StoreDone

logger = logging.getLogger(__name__)

ReadRemote = Callable[[str, BlockKey, memoryview], bool]
"""Reads this rank's shard of a block from the daemon at an address; False if it is not there."""

_NOT_COMPARED = BlockVerdict(Verdict.NOT_COMPARED)
_NO_OBJECTION = BlockVerdict(Verdict.EQUAL)  # neutral: the scheduler takes the worst of all ranks


@dataclass(frozen=True)
class _CopiedJob:
    job: VerifyJob
    copied: int
    arena: Arena
    read_remote: ReadRemote | None


class BlockVerifier:
    """Runs the verification jobs of one worker. `WorkerHalf` calls it from the model's thread; the
    comparisons run in a thread that starts with the first job."""

    def __init__(self, geometry: ArenaGeometry, tolerance: float) -> None:
        self._geometry = geometry
        self._tolerance = tolerance
        self._layers: Mapping[int, Sequence[LayerNumbers]] = {}
        self._due: list[VerifyJob] = []  # jobs of this step, to be copied after its forward
        self._copying: dict[int, VerifyJob] = {}
        self._copied: queue.SimpleQueue[_CopiedJob | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, list[BlockVerdict]]] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def describe(self, layers: Mapping[int, Sequence[LayerNumbers]]) -> None:
        """Sets the number formats of each group's layers; without them, blocks compare by bytes."""
        self._layers = layers

    def begin_step(
        self, jobs: Sequence[VerifyJob], is_ours: Callable[[BlockKey], bool] = lambda first: True
    ) -> None:
        """Takes the jobs of the coming step; gives up those of a step that vLLM did not finish.
        `is_ours` returns whether this rank compares the job with this first block."""
        for job in self._due:
            self._done.put((job.job_id, [_NOT_COMPARED] * len(job.keys)))
        self._due = []
        for job in jobs:
            if is_ours(job.keys[0]):
                self._due.append(job)
            else:
                # The rank that compares the job reports any difference.
                self._done.put((job.job_id, [_NO_OBJECTION] * len(job.keys)))

    def take_copies(self) -> list[StoreJob]:
        """Returns the copies to enqueue behind the forward."""
        due, self._due = self._due, []
        self._copying.update({job.job_id: job for job in due})
        return [StoreJob(job.job_id, job.copy) for job in due]

    def copied(self, done: StoreDone, arena: Arena, read_remote: ReadRemote | None) -> bool:
        """Compares the job whose copy has ended; False if the copy is not a verification's."""
        job = self._copying.pop(done.job_id, None)
        if job is None:
            return False
        if self._thread is None and not self._stopping and not self._start_thread():
            self._done.put((job.job_id, [_NOT_COMPARED] * len(job.keys)))
            return True
        self._copied.put(_CopiedJob(job, done.stored, arena, read_remote))
        return True

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name="tiered-kv-verify", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # raised in the model's thread, it would end the engine
            logger.warning("cannot start the verification thread, skipping this job: %s", error)
            return False
        self._thread = thread
        return True

    def take_verdicts(self) -> dict[int, list[list[BlockVerdict]]]:
        verdicts = {}
        while not self._done.empty():
            job_id, of_blocks = self._done.get()
            verdicts[job_id] = [of_blocks]
        return verdicts

    def close(self) -> None:
        """Stops the thread; nothing reads the arena after that. Idempotent."""
        self._stopping = True
        if self._thread is not None:
            self._copied.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._copied.get()) is not None:
            verdicts: list[BlockVerdict] = []
            try:
                while len(verdicts) < item.copied and not self._stopping:
                    verdicts.append(self._compare(item, len(verdicts)))
            except Exception:  # the scheduler keeps the job's slots until it is reported
                logger.exception("verification job %d failed", item.job.job_id)
            missing = len(item.job.keys) - len(verdicts)
            self._done.put((item.job.job_id, verdicts + [_NOT_COMPARED] * missing))

    def _compare(self, item: _CopiedJob, number: int) -> BlockVerdict:
        job = item.job
        computed = self._block(item.arena, job, job.copy.slots, number)
        if job.held_slots is not None:
            held = self._block(item.arena, job, job.held_slots, number)
        else:
            assert job.address is not None
            held = np.empty(job.block_bytes, np.uint8)
            into = memoryview(held.data)
            if item.read_remote is None or not item.read_remote(
                job.address, job.keys[number], into
            ):
                return _NOT_COMPARED
        layers = self._layers.get(job.copy.group_id, ())
        return compare(held, computed, layers, self._tolerance)

    def _block(self, arena: Arena, job: VerifyJob, slots: Int64Array, number: int) -> np.ndarray:
        size_class = self._geometry.class_of_block(job.block_bytes)
        (offset,) = self._geometry.offsets(slots[number : number + 1], size_class).tolist()
        return arena.bytes_at(offset, job.block_bytes)
