"""The command `tiered-kv up`: its options, its help and what `--check` prints."""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
from pathlib import Path

from vllm_tiered_kv.api import arguments
from vllm_tiered_kv.api.deployment import Deployment, Program, schema
from vllm_tiered_kv.api.supervisor import Screen, Supervisor

_UP = """\
Starts what one file describes: a cache daemon, then model servers that use it. Waits for each until
it is ready, shows what all of them print, and stops them on Ctrl-C or SIGTERM: servers first, the
daemon last, so that it keeps what they stored. If one of them ends by itself, all are stopped. Each
further Ctrl-C hurries what it waits for: servers are killed; the daemon stops without writing.
"""

_EXAMPLE = """\
an example:
  daemon:
    memory: 20GiB
    ssd: /mnt/nvme/kv
    ssd_space: 100GiB
    listen: [ipc:///run/kv/kv.sock]
  servers:
    - model: Qwen/Qwen3-8B
      port: 8000
      args: {max_model_len: 32768, gpu_memory_utilization: 0.9}
      cache: {cpu_memory: 4GiB}
"""

_DETAILS = """\
exit status:
  0  all was stopped by a signal
  1  a process could not start, ended by itself or had to be killed; standard error says which
  2  the file cannot be used

examples:
  tiered-kv up deploy.yml
  tiered-kv up deploy.yml --check
      is the file right? Prints the commands it would run, and starts nothing
  tiered-kv up deploy.yml > logs.txt
      logs go to standard output, its own lines to standard error
"""

_WIDTH = 100
_INDENT = 32


def add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = arguments.add_command(
        commands,
        "up",
        _up,
        "start a daemon and servers from one file",
        _UP,
        "\n".join((_keys(), _EXAMPLE, _DETAILS)),
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the YAML file, see below")
    parser.add_argument("--check", action="store_true", help="only check it and print the commands")


def _keys() -> str:
    lines = ["keys of the file:"]
    for name, kind, help in schema():
        text = textwrap.wrap(help.replace("`", ""), _WIDTH - _INDENT)
        head = f"  {name} {kind}"
        if len(head) >= _INDENT:
            lines.append(head)
            head = ""
        lines.append(f"{head:{_INDENT}}{text[0]}")
        lines += [" " * _INDENT + line for line in text[1:]]
    return "\n".join(lines) + "\n"


def _up(given: argparse.Namespace) -> int:
    deployment = Deployment.read(given.file)
    if given.check:
        for program in deployment.programs:
            print(f"# {program.name}, ready when {program.health_url} answers")
            print(as_shell(program))
        return 0
    return Supervisor(deployment, Screen(sys.stdout.fileno(), sys.stderr.fileno())).run()


def as_shell(program: Program) -> str:
    """The command as one can paste it."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in program.env.items()]
    return " ".join([*settings, shlex.join(program.command)])
