"""Two answers to one prompt: whether they are the same, and if not, where they part and how far.

With a temperature of 0 the likeliest token is taken. Where two are about equally likely, the last
bit of a sum decides, and another batch or another kernel may decide otherwise: such a tie says
nothing about the cache. Behind the first token that differs nothing can be compared.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered_kv.errors import ReplayError


@dataclass(frozen=True)
class Token:
    name: str  # its id, or its text from a server that does not tell ids
    logprob: float
    others: Mapping[str, float]  # the likeliest tokens in its place, itself among them


@dataclass(frozen=True)
class Answer:
    tokens: tuple[Token, ...]
    text: str = ""
    cached_tokens: int | None = None  # of the prompt, if the server tells


class Outcome(str, enum.Enum):
    EQUAL = "equal"
    TIE = "tie"  # parted where two tokens were about equally likely
    DRIFT = "drift"  # the same tokens, with other probabilities
    DIFFERENT = "different"
    FAILED = "failed"  # no answer to compare


@dataclass(frozen=True)
class AnswerComparison:
    outcome: Outcome
    index: int | None = None  # of the token where they part, or that drifted most
    gap: float = 0.0
    """Where they part: how much likelier the first answer held its own token than the other's."""
    drift: float = 0.0  # largest change of a logprob ahead of that


def compare_answers(
    computed: Answer, other: Answer, tie: float, max_drift: float
) -> AnswerComparison:
    drift, drifted_at = 0.0, None
    shorter = min(len(computed.tokens), len(other.tokens))
    for index in range(shorter):
        mine, theirs = computed.tokens[index], other.tokens[index]
        if mine.name != theirs.name:
            return _parted(mine, theirs, index, drift, tie)
        change = _change(mine.logprob, theirs.logprob)
        if change > drift:
            drift, drifted_at = change, index
    if len(computed.tokens) != len(other.tokens):
        # One stopped: whether stopping was as likely is not told.
        return AnswerComparison(Outcome.DIFFERENT, shorter, math.inf, drift)
    if drift > max_drift:
        return AnswerComparison(Outcome.DRIFT, drifted_at, 0.0, drift)
    return AnswerComparison(Outcome.EQUAL, None, 0.0, drift)


def _parted(mine: Token, theirs: Token, index: int, drift: float, tie: float) -> AnswerComparison:
    gap = mine.logprob - mine.others.get(theirs.name, -math.inf)
    outcome = Outcome.TIE if gap <= tie else Outcome.DIFFERENT
    return AnswerComparison(outcome, index, gap, drift)


def _change(one: float, other: float) -> float:
    if one == other:
        return 0.0
    change = abs(one - other)
    return change if math.isfinite(change) else math.inf


def read_answer(reply: Mapping[str, Any]) -> Answer:
    """From what an OpenAI-compatible server replies, for completions and for chats."""
    try:
        (choice,) = reply["choices"]
        logprobs = choice["logprobs"] or {}
        if "message" in choice:
            tokens = [_chat_token(entry) for entry in logprobs.get("content") or ()]
            text = choice["message"].get("content") or ""
        else:
            tokens = _completion_tokens(logprobs)
            text = choice["text"]
        if text and not tokens:
            raise ValueError("no tokens beside the text")
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answer(tuple(tokens), text, cached if isinstance(cached, int) else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(
            f"the server's reply has no logprobs as vLLM sends them: {error!r}"
        ) from None


def _chat_token(entry: Mapping[str, Any]) -> Token:
    others = {other["token"]: float(other["logprob"]) for other in entry["top_logprobs"]}
    return Token(entry["token"], float(entry["logprob"]), others)


def _completion_tokens(logprobs: Mapping[str, Any]) -> list[Token]:
    columns = (logprobs.get(name) or () for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        Token(name, float(logprob), dict(others or {}))
        for name, logprob, others in zip(*columns, strict=True)
    ]
