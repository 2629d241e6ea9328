"""The write fence: which stores a step waits for before it writes GPU blocks.

Stores read blocks where they lie and hold no reference to them, so a block may be given out again
while its read is still under way. A full block changes only after vLLM's block pool has handed it
out anew. So every block that is handed out is looked up here, and the step that writes it waits on
the device for the newest store that reads it. Stores of a rank end in the order of their job ids:
one number is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_tiered_kv.core.transfer import Int64Array, int64_array

_NEVER = -1


class WriteFence:
    """Called by the scheduler alone. A read lasts until all ranks have reported its job."""

    def __init__(self) -> None:
        self._last_read = np.full(0, _NEVER, np.int64)  # by GPU block: the newest job that reads it
        self._open: dict[int, None] = {}  # jobs under way, oldest first
        self._newest = _NEVER  # of the jobs that read blocks handed out since the last step

    def begin_read(self, job_id: int, block_ids: Int64Array) -> None:
        """A job that copies these blocks out is planned."""
        end = int(block_ids.max(initial=-1)) + 1
        if end > len(self._last_read):
            more = np.full(max(end, 2 * len(self._last_read)), _NEVER, np.int64)
            more[: len(self._last_read)] = self._last_read
            self._last_read = more
        self._last_read[block_ids] = job_id
        self._open[job_id] = None

    def end_read(self, job_id: int) -> None:
        """All ranks have reported the job."""
        del self._open[job_id]

    def hand_out(self, block_ids: Sequence[int]) -> bool:
        """These blocks are about to be written by the coming step; whether one may still be read
        until then."""
        oldest = next(iter(self._open), None)
        if oldest is None:
            return False
        ids = int64_array(block_ids)
        readers = self._last_read[ids[ids < len(self._last_read)]]
        newest = int(readers.max(initial=_NEVER))
        self._newest = max(self._newest, newest)
        return newest >= oldest

    @property
    def newest(self) -> int | None:
        """The newest store that the coming step waits for; None: it waits for nothing."""
        oldest = next(iter(self._open), None)
        # A closed job may be the last reader on one rank while another still reads for an earlier
        # one; waiting for all up to it covers that.
        return self._newest if oldest is not None and self._newest >= oldest else None

    def take(self) -> int | None:
        """As `newest`, for the step that has been planned; what follows concerns the next one."""
        newest, self._newest = self.newest, _NEVER
        return newest
