"""A real engine that verifies every hit, watched by tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.engine.real_engine import Answer, RealEngine
from vllm_tiered_kv.core.verdict import BlockVerdict, Verdict


class VerifiedHits:
    """An engine that verifies every hit, and what its comparisons found."""

    def __init__(self, engine: RealEngine, settle: Callable[[RealEngine], None]) -> None:
        self.engine = engine
        self._settle = settle
        self.verdicts: list[BlockVerdict] = []
        report = engine.half.verification.report

        def watch(job_id: int, reports: list[list[BlockVerdict]]) -> None:
            self.verdicts += [verdict for of_rank in reports for verdict in of_rank]
            report(job_id, reports)

        engine.half.verification.report = watch

    def ask(self, prompts: list[list[int]], count: int = 4, rows: int = 256) -> list[Answer]:
        """Answers with an empty GPU cache, at most so many rows in a step."""
        self.engine.drop_gpu_cache()
        self.verdicts.clear()
        self.engine.scheduler.max_num_scheduled_tokens = rows
        answers = self.engine.ask(prompts, count)
        self._settle(self.engine)
        self.engine.assert_at_rest()
        return answers

    def count(self, verdict: Verdict) -> int:
        return sum(found.verdict is verdict for found in self.verdicts)

    @property
    def largest(self) -> float:
        return max(found.largest for found in self.verdicts)

    @property
    def overall(self) -> float:
        return max(found.overall for found in self.verdicts)

    def block(self, ids: list[int], position: int) -> np.ndarray:
        """The bytes of a block in the CPU tier."""
        half = self.engine.half
        request = Request("asked before", ids, SamplingParams(), None)
        keys = half._key_maker.keys_for(request)
        keys.extend(request, len(ids))
        slot = half.index.slot_of(keys.of_group[0][position])
        nbytes = half.block_bytes[0]
        return self.engine.worker_half.arena.bytes_at(slot * half.index.geometry.slab_bytes, nbytes)
