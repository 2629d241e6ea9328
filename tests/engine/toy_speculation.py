"""A toy engine with speculative decoding: some drafts are wrong and leave wrong KV behind.

A step writes the KV of all its drafts before it is known which are right. A later step overwrites
the KV of wrong drafts, or none does. With asynchronous scheduling vLLM counts all drafts of a step
in flight as accepted, and the worker corrects its positions itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.engine.toy_engine import ToyEngine, next_token, play

DRAFTS = 3
_WRONG = 2  # a token that the model never samples
_NONSENSE = -7  # the KV of a wrong draft


@dataclass
class SpeculatingToyEngine(ToyEngine):
    """A toy engine that drafts up to `DRAFTS` tokens per step."""

    def __post_init__(self) -> None:
        drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3}
        self.engine_args = {**self.engine_args, "speculative_config": drafts}
        super().__post_init__()
        self.accepted = self.rejected = 0
        self._said: dict[str, list[int]] = {}  # prompts with their right answers
        self._known: dict[str, int] = {}  # tokens that the worker has sampled or was given
        self._drafted: dict[str, list[int]] = {}  # drafts of the step in execution
        self._offered: deque[DraftTokenIds] = deque()  # drafts of steps in flight

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        salt: str = "",
        model: str = "",
        **request_args: Any,
    ) -> str:
        request_id = super().add(prompt, max_tokens, salt, model, **request_args)
        # Two steps may run past the end, each with all its drafts.
        tokens, right = play(prompt, max_tokens + 2 * (DRAFTS + 1) + 2, salt + model)
        self._truth[request_id] = right
        self._said[request_id] = [*prompt, *tokens]
        self._known[request_id] = len(prompt)
        return request_id

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._drafted = output.scheduled_spec_decode_tokens
        done = super()._execute(output)
        if not self.async_scheduling:
            self._offered.append(
                DraftTokenIds(done.req_ids, [self._draft(r) for r in done.req_ids])
            )
        return done

    def _process_oldest(self) -> None:
        super()._process_oldest()
        if self._offered:
            self.scheduler.update_draft_token_ids(self._offered.popleft())

    def _draft(self, request_id: str) -> list[int]:
        first = self._known[request_id]
        guesses = self._said[request_id][first : first + self.rng.randrange(DRAFTS + 1)]
        return [token if self.rng.random() < 0.75 else _WRONG for token in guesses]

    def _forward(self, request_id: str, count: int) -> list[int]:
        running, known = self._running[request_id], self._known[request_id]
        drafts = self._drafted.get(request_id, [])
        start = running.computed
        if self.async_scheduling and (drafts or start >= known):
            start = known - 1
        stop = start + count
        right_drafts = self._right_ones(request_id, drafts, stop - len(drafts))
        end = stop - len(drafts) + right_drafts  # end of the accepted tokens
        states = self._right(request_id)[:stop].copy()
        states[end:] = _NONSENSE
        for group, blocks in zip(self.groups, running.blocks, strict=True):
            group.forward(
                request_id, self.caches, blocks, states, range(start, stop), self._before_layer
            )
        if end < max(known, self.requests[request_id].num_tokens):
            return []  # the step covers only tokens that are known already
        self.accepted += right_drafts
        self.rejected += len(drafts) - right_drafts
        self._known[request_id] = end + 1
        return [next_token(int(state)) for state in states[end - right_drafts - 1 : end]]

    def _right_ones(self, request_id: str, drafts: Sequence[int], first: int) -> int:
        """How many drafts, from token `first` on, the model would sample itself."""
        said = self._said[request_id][first : first + len(drafts)]
        # With asynchronous scheduling the scheduler has only placeholders: any draft may be right.
        is_placeholder = self.async_scheduling
        right = [
            self.rng.random() < 0.75 if is_placeholder else draft == token
            for draft, token in zip(drafts, said, strict=False)
        ]
        return int(np.argmin([*right, False]))
