"""The status page: a document without data, and the facts that it asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_tiered_kv.server.page.history import History
from vllm_tiered_kv.server.page.recent_problems import RecentProblems

_DOCUMENT = Path(__file__).with_name("status.html")

Facts = Callable[[], Any]


class StatusPage:
    """What `/` and `/status.json` serve. The daemon creates it; HTTP threads call it."""

    def __init__(
        self, facts: Mapping[str, Facts], history: History, problems: RecentProblems
    ) -> None:
        """`facts` are asked for each time, and may be asked from any thread."""
        self.document = _DOCUMENT.read_bytes()
        self.policy = _content_security_policy(self.document.decode())
        self._facts = dict(facts)
        self._history = history
        self._problems = problems

    def facts(self, after: int) -> str:
        """As JSON, with the samples after the one with this number."""
        return json.dumps(
            {
                "time": time.time(),
                **{name: fact() for name, fact in self._facts.items()},
                "problems": self._problems.facts(),
                "history": self._history.facts(after),
            },
            separators=(",", ":"),
        )


def _content_security_policy(document: str) -> str:
    """Allows the document's own script and style and requests to this daemon. All else is refused,
    such as markup made of strings."""
    parts = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in re.findall(r"<(script|style)>(.*?)</\1>", document, re.DOTALL)
    }
    return (
        f"default-src 'none'; script-src 'sha256-{parts['script']}'; "
        f"style-src 'sha256-{parts['style']}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
