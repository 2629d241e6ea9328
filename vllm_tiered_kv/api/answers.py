"""Compares two answers to one prompt: whether they differ, at which token, and how much.

With a temperature of 0 the model returns the likeliest token. If two tokens are about equally
likely, the last bit of a sum decides, and another batch or kernel may decide differently: such a
tie says nothing about the cache. After the first different token nothing can be compared.
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
    """A generated token and its alternatives."""

    name: str  # token id, or its text if the server does not return ids
    logprob: float
    others: Mapping[str, float]  # logprobs of the likeliest tokens here, including this one


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt."""

    tokens: tuple[Token, ...]
    text: str = ""
    cached_tokens: int | None = None  # cached prompt tokens, if the server reports them


class Outcome(str, enum.Enum):
    """Result of comparing two answers. The value appears in reports."""

    EQUAL = "equal"
    TIE = "tie"  # the tokens differ first where two were about equally likely
    DRIFT = "drift"  # the same tokens with different logprobs
    DIFFERENT = "different"
    FAILED = "failed"  # no answer to compare


@dataclass(frozen=True)
class AnswerComparison:
    """Result of `compare_answers`, with the position and the size of the difference."""

    outcome: Outcome
    index: int | None = None  # first different token, or the token that drifted most
    gap: float = 0.0
    """Logprob of the first answer's token minus that of the other's token, in the first answer."""
    drift: float = 0.0  # largest change of a logprob before the first different token


def compare_answers(
    computed: Answer, other: Answer, tie: float, max_drift: float
) -> AnswerComparison:
    drift, drifted_at = 0.0, None
    shorter = min(len(computed.tokens), len(other.tokens))
    for index in range(shorter):
        mine, theirs = computed.tokens[index], other.tokens[index]
        if mine.name != theirs.name:
            return _compare_different(mine, theirs, index, drift, tie)
        change = _change(mine.logprob, theirs.logprob)
        if change > drift:
            drift, drifted_at = change, index
    if len(computed.tokens) != len(other.tokens):
        # One answer ended earlier. The server does not report how likely the end was.
        return AnswerComparison(Outcome.DIFFERENT, shorter, math.inf, drift)
    if drift > max_drift:
        return AnswerComparison(Outcome.DRIFT, drifted_at, 0.0, drift)
    return AnswerComparison(Outcome.EQUAL, None, 0.0, drift)


def _compare_different(
    mine: Token, theirs: Token, index: int, drift: float, tie: float
) -> AnswerComparison:
    gap = mine.logprob - mine.others.get(theirs.name, -math.inf)
    outcome = Outcome.TIE if gap <= tie else Outcome.DIFFERENT
    return AnswerComparison(outcome, index, gap, drift)


def _change(one: float, other: float) -> float:
    if one == other:
        return 0.0
    change = abs(one - other)
    return change if math.isfinite(change) else math.inf


def read_answer(reply: Mapping[str, Any]) -> Answer:
    """Reads the reply of an OpenAI-compatible server to a completion or chat request."""
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
            raise ValueError("there is text but no tokens")
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answer(tuple(tokens), text, cached if isinstance(cached, int) else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplayError(
            f"the server's reply has no logprobs in the format of vLLM: {error!r}"
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
