"""What the users of `chats.py` do: when each chat starts, how long it pauses, what it asks.

A plan depends on the workload and the seed alone, so every mode gets the same one. Prompts are made
of pieces; equal piece ids give equal tokens.
"""

from __future__ import annotations

import json
import lzma
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FIRST_TOKEN = 100
"""Smaller token ids are left to special tokens."""
_ID_BITS = 20  # of each part of a piece id, and of an offset within a piece
_SHARED, _PRIVATE, _WARM_UP, TRACE_BLOCK, TRACE_TAIL = range(5)


class Piece(NamedTuple):
    """A part of a prompt; its id says which tokens it has."""

    id: int
    tokens: int


class Turn(NamedTuple):
    pause_s: float
    """From the end of the last answer of this chat."""
    pieces: tuple[Piece, ...]
    answer_tokens: int
    grows: bool = True
    """The prompt is the chat so far, answers included, and then the pieces; else the pieces."""


class Session(NamedTuple):
    """One chat: its turns follow each other, other chats do not wait for it."""

    start_s: float
    turns: Iterable[Turn]


@dataclass(frozen=True)
class Workload:
    """Sizes of one workload; plain data, so that it can be written into the result."""

    name: str
    kind: str = "chats"
    """`chats` (closed loop), `prefill` (a constant number of outstanding prompts) or `trace`."""
    chats: int = 60
    """Chats, agents, outstanding prompts, or sessions of a trace."""
    turns: int = 5
    shared_tokens: int = 0
    """At the head of every first prompt, the same for all chats."""
    first_tokens: int = 8_000
    """Of the first prompt, those of this chat alone."""
    new_tokens: int = 400
    answer_tokens: int = 64
    think_s: float = 4.0
    """Mean of an exponential pause between turns."""
    pause_range_s: tuple[float, float] | None = None
    """Pauses between these, log-uniform, instead of exponential ones."""
    cache_tokens: int = 262_144
    """Size of the GPU's KV cache."""
    seconds: float | None = None
    """No turn starts later; None: all turns are played."""
    kill_after_turn: int | None = None
    """The engine is killed when this many turns per chat, on average, have ended."""
    speedup: float = 1.0
    """Of a trace: how much faster time passes."""
    length_scale: float = 1.0
    """Of a trace: what prompts and answers are shortened to."""
    max_requests: int = 1_000
    """Of a trace."""

    @property
    def mean_pause_s(self) -> float:
        if self.pause_range_s is None:
            return self.think_s
        low, high = self.pause_range_s
        return (high - low) / math.log(high / low) if high > low else low

    @property
    def longest_tokens(self) -> int:
        """Of the last prompt of a chat, with its answer."""
        growth = self.new_tokens * (self.turns - 1) + self.answer_tokens * self.turns
        return self.shared_tokens + self.first_tokens + (0 if self.kind == "prefill" else growth)

    @property
    def requests_that_fit(self) -> int:
        """How many average requests of a chat the GPU cache holds."""
        growth = (self.turns - 1) / 2 * (self.new_tokens + self.answer_tokens)
        return int(
            self.cache_tokens
            / (self.shared_tokens + self.first_tokens + growth + self.answer_tokens)
        )


PRESETS = {
    workload.name: workload
    for workload in (
        Workload("calm"),
        Workload("tight", chats=40, think_s=0.5, cache_tokens=131_072),
        Workload(  # recorded sessions of coding agents add 720 tokens a turn (median)
            "agents",
            chats=16,
            turns=6,
            shared_tokens=24_000,
            first_tokens=4_000,
            new_tokens=720,
            pause_range_s=(1.0, 30.0),
            cache_tokens=65_536,
        ),
        Workload(
            "prefill", "prefill", chats=16, first_tokens=10_240, answer_tokens=1, seconds=60.0
        ),
        Workload("trace", "trace", chats=16, cache_tokens=131_072, speedup=4.0, length_scale=0.25),
    )
}

_SMALL_CHATS = {"turns": 4, "first_tokens": 600, "new_tokens": 40, "answer_tokens": 8}
TINY: dict[str, dict[str, Any]] = {
    "calm": {**_SMALL_CHATS, "chats": 10, "think_s": 1.0, "cache_tokens": 4_096},
    "tight": {**_SMALL_CHATS, "chats": 8, "think_s": 0.5, "cache_tokens": 2_048},
    "agents": {
        "chats": 5,
        "turns": 4,
        "shared_tokens": 640,
        "first_tokens": 160,
        "new_tokens": 160,
        "answer_tokens": 8,
        "pause_range_s": (0.1, 1.0),
        "cache_tokens": 2_048,
    },
    "prefill": {"chats": 4, "first_tokens": 640, "seconds": 8.0, "cache_tokens": 4_096},
    "trace": {
        "chats": 8,
        "max_requests": 100,
        "cache_tokens": 2_048,
        "speedup": 60.0,
        "length_scale": 1 / 16,
    },
}
"""The same workloads for a tiny model without GPU. Their caches are too small for all chats."""


def piece_id(kind: int, one: int = 0, other: int = 0) -> int:
    if not (0 <= one < 1 << _ID_BITS and 0 <= other < 1 << _ID_BITS):
        raise ValueError(f"piece ids have two parts of {_ID_BITS} bits, not {one} and {other}")
    return kind << 2 * _ID_BITS | one << _ID_BITS | other


def token_ids(pieces: Sequence[Piece], vocab: int, seed: int) -> list[int]:
    """Tokens that look random: a hash of piece id, offset and seed."""
    import numpy as np

    counts = [piece.tokens for piece in pieces]
    ids = np.repeat(np.array([piece.id for piece in pieces], dtype=np.uint64), counts)
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    mixed = (ids << np.uint64(_ID_BITS)) | offsets.astype(np.uint64)
    mixed += np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)  # SplitMix64
    found: list[int] = (mixed % np.uint64(vocab - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)).tolist()
    return found


def sessions(workload: Workload, seed: int) -> list[Session]:
    """The chats of any workload but a trace, which `chat_traces.py` reads."""
    if workload.kind == "prefill":
        return [Session(0.0, _distinct_prompts(workload, at)) for at in range(workload.chats)]
    return [_chat(workload, seed, at) for at in range(workload.chats)]


def _chat(workload: Workload, seed: int, at: int) -> Session:
    rng = random.Random(f"{seed}/{at}")
    start = rng.uniform(0.0, workload.mean_pause_s)  # else all chats would arrive as one burst
    turns = []
    for number in range(workload.turns):
        own = workload.new_tokens if number else workload.first_tokens
        pieces = [Piece(piece_id(_PRIVATE, at, number), own)]
        if not number and workload.shared_tokens:
            pieces.insert(0, Piece(piece_id(_SHARED), workload.shared_tokens))
        pause = _pause(workload, rng) if number else 0.0
        turns.append(Turn(pause, tuple(pieces), workload.answer_tokens))
    return Session(start, turns)


def _pause(workload: Workload, rng: random.Random) -> float:
    if workload.pause_range_s is None:
        return rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0
    low, high = workload.pause_range_s
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _distinct_prompts(workload: Workload, at: int) -> Iterator[Turn]:
    for number in range(1 << _ID_BITS):
        piece = Piece(piece_id(_PRIVATE, at, number), workload.first_tokens)
        yield Turn(0.0, (piece,), workload.answer_tokens, grows=False)


def warm_up_piece(number: int, tokens: int) -> Piece:
    return Piece(piece_id(_WARM_UP, number), tokens)


def distinct_tokens(played: Iterable[Session]) -> int:
    """Tokens of all distinct pieces and all answers: what a cache that holds everything needs."""
    sizes: dict[int, int] = {}
    answers = 0
    for session in played:
        for turn in session.turns:
            answers += turn.answer_tokens
            for piece in turn.pieces:
                sizes[piece.id] = max(piece.tokens, sizes.get(piece.id, 0))
    return sum(sizes.values()) + answers


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
