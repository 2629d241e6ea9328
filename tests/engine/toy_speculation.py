"""A toy engine with speculative decoding: some drafts are wrong and leave wrong KV behind.

A step writes the KV of all its drafts before it is known which are right. A later step overwrites
the KV of wrong drafts, or none does. With asynchronous scheduling vLLM counts all drafts of a step
in flight as accepted, and the worker corrects its positions itself.

Recurrent layers keep a state after each draft, in consecutive blocks of a request's table. Once it
is known which drafts are right, vLLM copies the state at a block's boundary to its own block
(`vllm/v1/worker/mamba_utils.py`), and the toy model does the same.

`DraftingToyEngine` also has a draft layer with KV of its own, like EAGLE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from tests.engine.delayed_copier import LAYERS
from tests.engine.toy_engine import VOCAB, ToyEngine, next_token, play
from tests.engine.toy_groups import EXPORTED_STATE, ToyGroup, WrongRead

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
        # Its config.json is that of a model without recurrent layers.
        with mock.patch.object(ModelConfig, "is_hybrid", True):
            super().__post_init__()
        self.accepted = self.rejected = 0
        self._said: dict[str, list[int]] = {}  # prompts with their right answers
        self._known: dict[str, int] = {}  # tokens that the worker has sampled or was given
        self._drafted: dict[str, list[int]] = {}  # drafts of the step in execution
        self._offered: deque[DraftTokenIds] = deque()  # drafts of steps in flight
        # Of recurrent layers: the last step's position in the table, and how many after it the
        # state of the last accepted token is.
        self._states: dict[str, tuple[int, int]] = {}

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

    def _update_batch(self, output: SchedulerOutput) -> None:
        super()._update_batch(output)
        started = [new.req_id for new in output.scheduled_new_reqs]
        for request_id in (*started, *output.scheduled_cached_reqs.resumed_req_ids):
            self._states.pop(request_id, None)

    def _span(self, request_id: str, count: int) -> range:
        span, known = super()._span(request_id, count), self._known[request_id]
        is_ahead = self._drafted.get(request_id) or span.start >= known
        if self.async_scheduling and is_ahead and not self.second_runner:
            return range(known - 1, known - 1 + count)
        return span

    def _state_positions(self, request_id: str, group: ToyGroup, span: range) -> tuple[int, int]:
        """Where the state before a step is in the table, and where the step's first one goes."""
        first = (span.start - 1) // group.block_size, 0
        before, accepted = self._states.get(request_id, first)
        return before + accepted, (span.stop - 1) // group.block_size

    def _move_state(
        self, request_id: str, group: ToyGroup, blocks: Sequence[int], span: range
    ) -> None:
        source, target = self._state_positions(request_id, group, span)
        is_moved = self._states.get(request_id, (source, 0))[0] != target
        if source >= 0 and is_moved:
            for cache in self.caches:
                cache[blocks[target]] = cache[blocks[source]]

    def _forward(self, request_id: str, count: int) -> list[int]:
        running, known = self._running[request_id], self._known[request_id]
        drafts = self._drafted.get(request_id, [])
        span = self._span(request_id, count)
        start, stop = span.start, span.stop
        right_drafts = self._right_ones(request_id, drafts, stop - len(drafts))
        end = stop - len(drafts) + right_drafts  # end of the accepted tokens
        if self.second_runner:
            running.computed = end
        states = self._right(request_id)[:stop].copy()
        states[end:] = _NONSENSE
        position: tuple[int, int] | None = None
        for group, blocks in zip(self.groups, running.blocks, strict=True):
            if group.is_recurrent:
                position = self._advance_states(request_id, group, blocks, states, span, end)
                if group.window == EXPORTED_STATE and not drafts:
                    self._export_state(group, blocks, states, span)
                continue
            group.forward(
                request_id, self.caches[: self.layers], blocks, states, span, self._before_layer
            )
            self._forward_draft(request_id, group, blocks, range(start, end))
        if position is not None:
            self._states[request_id] = position
        if end < max(known, self.requests[request_id].num_tokens):
            return []  # the step covers only tokens that are known already
        self.accepted += right_drafts
        self.rejected += len(drafts) - right_drafts
        self._known[request_id] = end + 1
        return [next_token(int(state)) for state in states[end - right_drafts - 1 : end]]

    def _advance_states(
        self,
        request_id: str,
        group: ToyGroup,
        blocks: Sequence[int],
        right: np.ndarray,
        span: range,
        end: int,
    ) -> tuple[int, int]:
        """Checks the state before a step, writes one after its known tokens and one after each
        draft, and copies that at a boundary to its block. Returns the entry of `_states`."""
        drafts = len(self._drafted.get(request_id, []))
        known = span.stop - drafts
        source, target = self._state_positions(request_id, group, span)
        if self._states.get(request_id, (source, 0))[0] != target:
            source = target  # it was moved before the forward
        written = blocks[target : target + 1 + drafts]
        if not all(written) or (span.start and not blocks[source]):
            raise WrongRead(f"{request_id} has no block for its state")
        boundary = end // group.block_size * group.block_size
        for layer, cache in enumerate(self.caches):
            self._before_layer(layer)
            rows = group.rows(cache)
            if span.start and (rows[blocks[source]] != group.state(right, span.start, layer)).any():
                raise WrongRead(
                    f"{request_id} reads a wrong state at token {span.start}, "
                    f"group {group.group_id}"
                )
            for number, block in enumerate(written):
                rows[block] = group.state(right, known + number, layer)
            if boundary >= known:
                state = rows[blocks[target + boundary - known]].copy()
                rows[blocks[boundary // group.block_size - 1]] = state
        is_full = boundary >= known and boundary // group.block_size - 1 == target
        return target, 0 if is_full else end - known

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
