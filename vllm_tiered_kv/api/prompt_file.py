"""Prompts to replay: a file with one on each line, as JSON or as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ReplayError

_SHOWN = 40


@dataclass(frozen=True)
class Prompt:
    """One line. `fields` go into the request as they are."""

    line: int
    fields: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.fields

    @property
    def title(self) -> str:
        """Its beginning, for a person."""
        content = self.fields.get("prompt")
        if self.is_chat:
            last = self.fields["messages"][-1]
            content = last.get("content") if isinstance(last, Mapping) else last
        text = " ".join((content if isinstance(content, str) else json.dumps(content)).split())
        return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; ReplayError names the line that is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path} cannot be read: {error}") from None
    prompts = [
        _prompt(path, number, line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not prompts:
        raise ReplayError(f"{path} has no prompts: write one on each line")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(number, {"prompt": line})
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ReplayError(f"{path}, line {number}: not JSON: {error}") from None
    if ("prompt" in fields) == ("messages" in fields):
        raise ReplayError(
            f'{path}, line {number}: expected either "prompt" or "messages" in the object'
        )
    if "messages" in fields:
        messages = fields["messages"]
        if not isinstance(messages, list) or not messages:
            raise ReplayError(f'{path}, line {number}: "messages" must be a list of messages')
    elif not isinstance(fields["prompt"], (str, list)) or not fields["prompt"]:
        raise ReplayError(f'{path}, line {number}: "prompt" must be a text or a list of token ids')
    return Prompt(number, fields)
