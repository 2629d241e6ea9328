"""Plays chats against an engine and notes what became of every turn. No torch, no vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from benchmarks.chat_workloads import Session, token_ids


class Answer(NamedTuple):
    """What one request got; times are those of `time.perf_counter`."""

    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed, wherever they came from."""
    sent: float
    first: float
    end: float
    queue_s: float
    """In the engine, until a step took the request."""
    compute_s: float
    """From then to its first token."""
    engine: int
    """Counts the engines that were started for this run."""


@dataclass(frozen=True)
class Row:
    """One turn of one chat."""

    chat: int
    turn: int
    engine: int
    start_s: float
    ttft_ms: float
    duration_ms: float
    prompt: int
    cached: int
    answer: int
    queue_ms: float
    compute_ms: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_ms / 1e3


COLUMNS = tuple(field.name for field in fields(Row))

Ask = Callable[[list[int], int], Awaitable[Answer]]
"""Prompt and number of tokens to generate; a request that is cut off is asked again inside."""


class Played(NamedTuple):
    rows: list[Row]
    digests: list[str]
    """Of all tokens generated in each chat."""


async def play(
    sessions: Sequence[Session],
    ask: Ask,
    vocab: int,
    seed: int,
    seconds: float | None = None,
    after_turn: Callable[[int], None] = lambda turns: None,
) -> Played:
    """Plays all chats at once. `after_turn` gets the number of turns that have ended."""
    rows: list[Row] = []
    begin = time.perf_counter()

    async def chat(number: int, session: Session) -> str:
        digest = hashlib.sha256()
        history: list[int] = []
        await asyncio.sleep(session.start_s)
        for at, turn in enumerate(session.turns, 1):
            if turn.pause_s and at > 1:
                await asyncio.sleep(turn.pause_s)
            if seconds is not None and time.perf_counter() - begin >= seconds:
                break
            prompt = token_ids(turn.pieces, vocab, seed)
            if turn.grows:
                prompt = history + prompt
            answer = await ask(prompt, turn.answer_tokens)
            rows.append(_row(number, at, len(prompt), answer, begin))
            digest.update(b"".join(token.to_bytes(4, "little") for token in answer.tokens))
            if turn.grows:
                history = prompt + answer.tokens
            after_turn(len(rows))
        return digest.hexdigest()[:12]

    digests = await asyncio.gather(*(chat(at, one) for at, one in enumerate(sessions)))
    return Played(sorted(rows, key=lambda row: (row.chat, row.turn)), digests)


def _row(chat: int, turn: int, prompt: int, answer: Answer, begin: float) -> Row:
    return Row(
        chat=chat,
        turn=turn,
        engine=answer.engine,
        start_s=round(answer.sent - begin, 4),
        ttft_ms=round((answer.first - answer.sent) * 1e3, 2),
        duration_ms=round((answer.end - answer.sent) * 1e3, 2),
        prompt=prompt,
        cached=answer.cached,
        answer=len(answer.tokens),
        queue_ms=round(answer.queue_s * 1e3, 2),
        compute_ms=round(answer.compute_s * 1e3, 2),
    )


def to_lists(rows: Sequence[Row]) -> list[list[Any]]:
    return [list(astuple(row)) for row in rows]


def from_lists(columns: Sequence[str], lists: Sequence[Sequence[Any]]) -> list[Row]:
    return [Row(**dict(zip(columns, values, strict=True))) for values in lists]
