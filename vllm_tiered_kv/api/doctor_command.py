"""The command `tiered-kv doctor`: its options and its report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from pathlib import Path

from vllm_tiered_kv import __version__
from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.api.doctor import Finding, Level, Questions, examine

_DOCTOR = """\
Looks at everything that an engine with the cache, or a daemon, needs on this host, and says what to
change. Starts no engine and changes nothing. Needs neither torch nor vLLM.
"""

_DETAILS = """\
checks:
  always       package and native modules, vLLM, variables TIERED_KV_*, GPUs and driver, pinning of
               memory, memory and its limits in control groups, locked memory, huge pages, NUMA
               nodes, kernel, file descriptors
  --model      is this model cached, and how many tokens fit into --memory?
  --ssd        the speed of this folder's disk: a file of up to 1 GiB for a few seconds
  --remote     does this daemon answer, with these keys?

exit status:
  0  nothing is wrong     1  something does not work     2  the options cannot be used

examples:
  tiered-kv doctor
  tiered-kv doctor --model ~/models/Qwen3-8B --memory 20GiB --remote ipc:///run/kv/kv.sock
  tiered-kv doctor --ssd /mnt/nvme/kv
  tiered-kv doctor --json | jq '.findings[] | select(.level == "error")'
"""

_MARKS = {Level.OK: "ok", Level.NOTE: "--", Level.WARNING: "warn", Level.ERROR: "FAIL"}
_COLORS = {Level.OK: "32", Level.NOTE: "2", Level.WARNING: "33", Level.ERROR: "31"}
_WIDTH = 100
_INDENT = 22


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands, "doctor", _doctor, "check this host, and say what to change", _DOCTOR, _DETAILS
    )
    parser.add_argument(
        "--model", metavar="PATH", type=Path, help="folder of a model, or its config.json"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", type=arguments.size, help="of the cache, such as 20GiB"
    )
    parser.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=arguments.positive,
        default=1,
        help="ranks that share the model (%(default)s)",
    )
    parser.add_argument("--ssd", metavar="DIR", type=Path, help="folder for a daemon's SSD tier")
    parser.add_argument(
        "--remote",
        metavar="ADDRESS",
        type=arguments.daemon_address,
        action="append",
        default=[],
        help="a daemon, such as tcp://cache1:9527; may be repeated",
    )
    arguments.add_keys(parser)
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=arguments.seconds,
        default=5.0,
        help="for a daemon (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _doctor(given: argparse.Namespace) -> int:
    questions = Questions(
        given.model,
        given.memory,
        given.tensor_parallel,
        given.ssd,
        given.remote,
        given.remote_key or "",
        given.remote_server_key or "",
        given.timeout,
    )
    findings = []
    for finding in examine(questions):
        findings.append(finding)
        if not given.json:
            print("\n".join(lines_of(finding, sys.stdout.isatty())), flush=True)
    failed = any(finding.level is Level.ERROR for finding in findings)
    if given.json:
        print(json.dumps(as_json(findings, failed), indent=1))
    else:
        print("\n" + _summary(findings))
    return 1 if failed else 0


def as_json(findings: list[Finding], failed: bool) -> dict[str, object]:
    return {
        "version": __version__,
        "ok": not failed,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def lines_of(finding: Finding, is_terminal: bool = False) -> list[str]:
    mark = f"{_MARKS[finding.level]:5}"
    if is_terminal:
        mark = f"\033[{_COLORS[finding.level]}m{mark}\033[0m"
    lines = textwrap.wrap(
        finding.text, _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False
    )
    advice = textwrap.wrap(
        f"-> {finding.advice}" if finding.advice else "",
        _WIDTH - _INDENT,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    head = f"{mark} {finding.check:{_INDENT - 7}} "
    return [head + lines[0], *(" " * _INDENT + line for line in (*lines[1:], *advice))]


def _summary(findings: list[Finding]) -> str:
    errors = sum(finding.level is Level.ERROR for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if not errors and not warnings:
        return "nothing to change"
    return f"{errors} to repair, {warnings} to improve"
