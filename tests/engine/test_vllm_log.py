"""What the connector logs is seen in vLLM's log, unless someone has other plans for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOGS = """
import logging, sys
import vllm.logger
vllm.logger._configure_vllm_root_logger()
from vllm_tiered_kv.connector.vllm_log import join_vllm_log
{before}
join_vllm_log()
join_vllm_log()
logging.getLogger("vllm_tiered_kv.connector").info("a line of ours")
logging.getLogger("vllm_tiered_kv.connector").debug("a line for nobody")
"""


def lines_of(before: str = "", **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOGS.format(before=before)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=300,
    )
    return [line for line in done.stdout.splitlines() if "a line" in line]


@pytest.mark.slow
def test_lines_look_as_those_of_vllm() -> None:
    (line,) = lines_of()
    assert "INFO" in line
    assert "pid=" in line


@pytest.mark.parametrize(
    "before",
    [
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout)",
        "logging.basicConfig(level='INFO', format='%(message)s', stream=sys.stdout);"
        "logging.getLogger('vllm_tiered_kv').setLevel('INFO')",
    ],
)
@pytest.mark.slow
def test_log_configured_by_the_user_is_unchanged(before: str) -> None:
    assert lines_of(before) == ["a line of ours"]


@pytest.mark.slow
def test_missing_vllm_log_changes_nothing() -> None:
    assert lines_of(VLLM_CONFIGURE_LOGGING="0") == []
    assert lines_of("logging.getLogger('vllm_tiered_kv').setLevel('ERROR')") == []
