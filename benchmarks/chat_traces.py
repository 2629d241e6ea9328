"""Recorded traffic as sessions of `chats.py`: which blocks each request asks for, no text.

Two formats, told apart by their first line, one JSON object a line, plain or `.xz`:

- Mooncake's conversation trace: one request a line with `timestamp` in ms, `input_length`,
  `output_length` and `hash_ids` of 512-token blocks. Each request is a session of one turn that
  starts at its time, whatever the engine does (open loop).
- Agent sessions: one session a line with `block` tokens a block and delta-coded `rows` of [seconds,
  input tokens, output tokens, blocks kept of the previous list, [[first new id, count], ...],
  seconds of the answer, seconds of thought before]. The next request of a session follows its
  thought after the answer (closed loop). Ids are those of one session; sessions start at random.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chat_workloads import (
    TRACE_BLOCK,
    TRACE_TAIL,
    Piece,
    Session,
    Turn,
    Workload,
    piece_id,
    sessions,
)

_MOONCAKE_BLOCK = 512
_STARTS_WITHIN_S = 600.0
"""Agent sessions start at random within this time, before `speedup`."""


class Plan(NamedTuple):
    sessions: list[Session]
    too_long: int = 0
    """Requests of a trace that are left out, as they are longer than the model allows."""


class _Scale(NamedTuple):
    """Lengths follow the scaled block, which is a whole number of tokens."""

    block: int
    scaled_block: int

    @classmethod
    def of(cls, block: int, length_scale: float) -> _Scale:
        return cls(block, max(1, round(block * length_scale)))

    def tokens(self, tokens: int) -> int:
        return max(1, round(tokens * self.scaled_block / self.block))


def plan(workload: Workload, seed: int, trace: Path | None, max_model_len: int) -> Plan:
    """What the chats of any workload do; `trace` is the file of a workload of that kind."""
    if workload.kind != "trace":
        return Plan(sessions(workload, seed))
    if trace is None:
        raise ValueError("the workload `trace` needs a file")
    return read(trace, workload, seed, max_model_len)


def read(path: Path, workload: Workload, seed: int, max_model_len: int) -> Plan:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        return decode(lines, workload, seed, max_model_len)


def decode(lines: Iterable[str], workload: Workload, seed: int, max_model_len: int) -> Plan:
    rows = (json.loads(line) for line in lines if line.strip())
    first = next(rows, None)
    if first is None:
        raise ValueError("the trace is empty")
    found: list[Session] = []
    asked = 0
    if "hash_ids" in first:
        for row in _chain(first, rows, workload.max_requests):
            found.append(_mooncake(row, workload, asked))
            asked += 1
    elif "rows" in first:
        each = -(-workload.max_requests // workload.chats)
        for row in _chain(first, rows, workload.chats):
            found.append(_agent(row, workload, seed, len(found), each))
    else:
        raise ValueError(f"neither `hash_ids` nor `rows` in the trace, but {sorted(first)}")
    kept = [
        Session(session.start_s, [turn for turn in session.turns if _fits(turn, max_model_len)])
        for session in found
    ]
    too_long = _count(found) - _count(kept)
    return Plan([session for session in kept if session.turns], too_long)


def _chain(first: Any, rows: Iterable[Any], most: int) -> Iterable[Any]:
    yield first
    for _, row in zip(range(most - 1), rows, strict=False):
        yield row


def _mooncake(row: dict[str, Any], workload: Workload, number: int) -> Session:
    scale = _Scale.of(_MOONCAKE_BLOCK, workload.length_scale)
    ids = [piece_id(TRACE_BLOCK, 0, block) for block in row["hash_ids"]]
    tail = piece_id(TRACE_TAIL, number)
    turn = _turn(0.0, ids, tail, scale, row["input_length"], row["output_length"])
    return Session(row["timestamp"] / 1e3 / workload.speedup, [turn])


def _agent(row: dict[str, Any], workload: Workload, seed: int, at: int, most: int) -> Session:
    scale = _Scale.of(row["block"], workload.length_scale)
    ids: list[int] = []
    turns = []
    for number, (_, prompt, answer, keep, fresh, _, thought) in enumerate(row["rows"][:most]):
        new = [block for first, count in fresh for block in range(first, first + count)]
        ids = ids[:keep] + [piece_id(TRACE_BLOCK, at, block) for block in new]
        tail = piece_id(TRACE_TAIL, at, number)
        pause = (thought or 0.0) / workload.speedup
        turns.append(_turn(pause, ids, tail, scale, prompt, answer))
    start = random.Random(f"{seed}/{at}").uniform(0.0, _STARTS_WITHIN_S / workload.speedup)
    return Session(start, turns)


def _turn(
    pause_s: float, ids: list[int], tail: int, scale: _Scale, prompt: int, answer: int
) -> Turn:
    """As many tokens of the blocks as the prompt has; what is beyond them is this request's own."""
    left = scale.tokens(prompt)
    pieces = []
    for block in ids:
        if left <= 0:
            break
        pieces.append(Piece(block, min(scale.scaled_block, left)))
        left -= scale.scaled_block
    if left > 0:
        pieces.append(Piece(tail, left))
    return Turn(pause_s, tuple(pieces), scale.tokens(answer), grows=False)


def _fits(turn: Turn, max_model_len: int) -> bool:
    return sum(piece.tokens for piece in turn.pieces) + turn.answer_tokens <= max_model_len


def _count(found: list[Session]) -> int:
    return sum(len(list(session.turns)) for session in found)
