"""A toy engine with speculative decoding: some drafts are wrong and leave wrong KV behind.

A step writes the KV of all its drafts before it is known which are right. A later step overwrites
the KV of wrong drafts, or none does. With asynchronous scheduling vLLM counts all drafts of a step
in flight as accepted, and the worker corrects its positions itself.

`DraftingToyEngine` also has a draft layer with KV of its own, like EAGLE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.engine.delayed_copier import LAYERS
from tests.engine.toy_engine import VOCAB, ToyEngine, next_token, play
from tests.engine.toy_groups import ToyGroup, WrongRead

DRAFTS = 3
_WRONG = 2  # a token that the model never samples
_NONSENSE = -7  # the KV of a wrong draft
_STRIDE = 64  # more than there are tokens, a power of two
assert VOCAB < _STRIDE


@dataclass
class SpeculatingToyEngine(ToyEngine):
    """A toy engine that drafts up to `DRAFTS` tokens per step."""

    layers: int = len(LAYERS)  # of the model itself; further ones are draft layers

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
                request_id,
                self.caches[: self.layers],
                blocks,
                states,
                range(start, stop),
                self._before_layer,
            )
            self._forward_draft(request_id, group, blocks, range(start, end))
        if end < max(known, self.requests[request_id].num_tokens):
            return []  # the step covers only tokens that are known already
        self.accepted += right_drafts
        self.rejected += len(drafts) - right_drafts
        self._known[request_id] = end + 1
        return [next_token(int(state)) for state in states[end - right_drafts - 1 : end]]

    def _forward_draft(
        self, request_id: str, group: ToyGroup, blocks: Sequence[int], span: range
    ) -> None:
        """For subclasses: runs the draft layer over the accepted tokens."""

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


@dataclass
class DraftingToyEngine(SpeculatingToyEngine):
    """A toy engine whose last layer belongs to a draft model. Its KV depends on the token at its
    own position ("draft_model"), or on that and the next one ("eagle")."""

    layers: int = len(LAYERS) - 1
    method: str = "eagle"

    def _adjust(self, config: VllmConfig) -> None:
        # Set only now: no draft model is loaded.
        config.speculative_config.method = self.method

    def _forward_draft(
        self, request_id: str, group: ToyGroup, blocks: Sequence[int], span: range
    ) -> None:
        """The draft layer runs after sampling, so it knows the token after the accepted ones. After
        these it writes the KV of its own drafts."""
        self._before_layer(self.layers)
        start, stop = span.start, span.stop
        tokens = np.array(self._said[request_id])
        right = group.kv(self._draft_kv(self._right(request_id), tokens), self.layers)
        rows = group.rows(self.caches[self.layers])
        drafted = min(stop + DRAFTS, len(blocks) * group.block_size)
        table, place = group.table(blocks, drafted)
        first = 0 if group.window is None else max(0, start - group.window + 1)
        read = rows[table[first:start], place[first:start]]
        is_wrong = read != right[first:start]
        if self.prefix_caching:
            # Of two GPU blocks with equal tokens, vLLM finds the one computed first, whichever
            # token followed it.
            ends = place[first:start] == group.block_size - 1
            is_wrong &= ~(ends & ((read ^ right[first:start]) < _STRIDE))
        if is_wrong.any():
            at = first + int(is_wrong.argmax())
            raise WrongRead(f"{request_id} drafts from wrong KV at token {at} of {start}")
        rows[table[start:stop], place[start:stop]] = right[start:stop]
        rows[table[stop:], place[stop:]] = _NONSENSE

    def _draft_kv(self, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if self.method == "draft_model":
            return states * _STRIDE
        following = np.append(tokens[1:], _WRONG)[: len(states)]
        return states * _STRIDE + following
