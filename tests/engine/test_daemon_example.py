"""`examples/daemon.py` shows what it says: a restarted engine finds its prompt in the daemon."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "daemon.py"


def test_example_loads_the_prompt_after_a_restart() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"num_cached_tokens (\d+) of (\d+): ", done.stdout)
    (before, prompt), (after, _) = [(int(cached), int(tokens)) for cached, tokens in found]
    assert before == 0
    assert prompt - 128 <= after < prompt, "all full blocks; vLLM's CPU build has 128 tokens in one"
