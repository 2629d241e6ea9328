"""Reads the prompts of a replay: a file with one prompt per line, as JSON or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiered_kv.errors import ReplayError

_MAX_TITLE = 40  # characters


@dataclass(frozen=True)
class Prompt:
    """The prompt of one line. `fields` are added to the request unchanged."""

    line: int
    fields: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.fields

    @property
    def title(self) -> str:
        """The beginning of the prompt, for the report."""
        content = self.fields.get("prompt")
        if self.is_chat:
            last = self.fields["messages"][-1]
            content = last.get("content") if isinstance(last, Mapping) else last
        text = " ".join((content if isinstance(content, str) else json.dumps(content)).split())
        return text if len(text) <= _MAX_TITLE else text[: _MAX_TITLE - 1] + "…"


def read_prompts(path: Path) -> list[Prompt]:
    """Returns all prompts of a file; ReplayError names the first invalid line."""
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
        raise ReplayError(f"{path} has no prompts; write one per line")
    return prompts


def read_prompt(line: str) -> Prompt:
    """Returns the prompt of one line that is not from a file."""
    if not line.strip():
        raise ReplayError("the prompt is empty")
    return _prompt(Path("PROMPT"), 1, line)


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
