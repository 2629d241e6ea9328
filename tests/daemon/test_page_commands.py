"""Commands of README and the pages for users are run as they stand, in a folder of their own.

`tests/unit/test_doc_commands.py` finds the commands and parses every one of them. Here those of
`tiered-kv` and `tiered-kv-server` run, in the order of the page, beside a real daemon that the
page's own command starts (until then, the first one in docs/server.md). Paths, ports and sizes are
replaced by those of a test. What does not run is in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.raw_client import RawClient, blocks
from tests.patience import eventually
from tests.ports import free_port
from tests.unit.test_doc_commands import BLOCKS, ROOT, Block, commands_of
from tools.model_table import NAMED

MODEL = "Qwen3-8B"
MEMORY = "64MiB"

NOT_RUN = {
    "apt-get": "root",
    "cd": "the shell's",
    "cp": "root",
    "curl": "asks a served model; tests/engine",
    "docker": "builds an image",
    "export": "the shell's",
    "git": "asks another host",
    "grep": "after curl",
    "make": "CI and its own targets run it",
    "mkdir": "root",
    "mooncake_client": "tests/stores/mooncake_servers.py runs it",
    "mooncake_master": "tests/stores/mooncake_servers.py runs it",
    "openssl": "before sudo",
    "pip": "tests/packaging installs the package",
    "python": "measures a GPU",
    "sudo": "root",
    "systemctl": "root",
    "tiered-kv bench": "asks a served model; tests/unit/test_bench.py",
    "tiered-kv explain": "asks a served model; tests/engine/test_miss_causes.py",
    "tiered-kv replay": "asks a served model; tests/engine/test_serve.py",
    "tiered-kv up": "serves a model; tests/engine/test_up_engine.py",
    "tiered-kv warm": "asks a served model; tests/engine/test_serve.py",
    "tiered-kv-server --backing": "needs a store; tests/daemon/test_redis_backing.py and others",
    "tr": "before tiered-kv replay",
    "useradd": "root",
    "vllm": "GPU",
}

# What a command or option has printed, where the status alone would say little.
PRINTED = {
    "--model": "ok    model",
    "--remote": "ok    daemon",
    "ls": f"Qwen/{MODEL}",
    "rm": "removed",
    "status": "memory",
    "top": "memory",
    "verify": "3 blocks (",
}


def why_not(words: list[str]) -> str | None:
    """The key of `NOT_RUN` that keeps this command from being run."""
    program, *rest = words
    if program == "tiered-kv-server" and "--backing" in rest:
        return "tiered-kv-server --backing"
    if program == "tiered-kv" and rest[0] == "up" and "--check" in rest:
        return None
    if program == "tiered-kv":
        program = f"{program} {rest[0]}"
    return program if program in NOT_RUN else None


def commands_to_run(block: Block) -> list[list[str]]:
    return [words for words in commands_of(block.text) if why_not(words) is None]


SHELL_BLOCKS = [block for block in BLOCKS if block.language in ("", "shell")]
TO_RUN = {block.page: commands_to_run(block) for block in SHELL_BLOCKS}
PAGES = sorted({block.page for block in SHELL_BLOCKS if commands_to_run(block)})
SERVERS = [block for block in SHELL_BLOCKS if block.page == "docs/server.md"]


class Host:
    """A folder in place of a host's file system, and the daemon that runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon: DaemonProcess | None = None
        self._port, self._http = free_port(), free_port()
        self._places = {
            "~/models": folder / "models",
            "/etc/tiered-kv": folder / "etc",
            "/mnt/nvme/kv": folder / "nvme",
            "/run/kv": folder / "run",
        }
        for place in self._places.values():
            place.mkdir()
        self._work = folder / "work"
        self._work.mkdir()
        self._write_files()

    def _write_files(self) -> None:
        """What the pages say is there: a model, a token, a file for `up`."""
        (config,) = (model.config for model in NAMED if model.name == MODEL)
        (self.folder / "models" / MODEL).mkdir()
        text = json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]})
        (self.folder / "models" / MODEL / "config.json").write_text(text)
        token = self.folder / "etc" / "metrics.token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        (deployment,) = (b.text for b in BLOCKS if b.language == "yaml" and "servers:" in b.text)
        (self._work / "deploy.yml").write_text(self._here(deployment))

    def run(self, words: list[str]) -> None:
        program, *rest = words
        if program == "tiered-kv-server" and rest[0] != "keygen":
            self._serve(rest)
        elif program == "tiered-kv-server":
            self._call("vllm_tiered_kv.server.cli", rest)
        else:
            assert program == "tiered-kv", f"{' '.join(words)}: neither run nor in NOT_RUN"
            if "--remote-key" in rest:
                self._serve_with_keys()
            elif self.daemon is None and any("://" in word for word in rest):
                self.run(next(commands_of(SERVERS[0].text)))
            if rest[0] == "verify":  # of a folder that no daemon uses
                self.stop()
            self._call("vllm_tiered_kv.api.cli", rest)
            if "--remote-key" in rest:
                self.stop()

    def stop(self) -> None:
        if self.daemon is not None:
            assert self.daemon.terminate() == 0, self.daemon.logs
            self.daemon = None

    def _serve(self, options: list[str]) -> None:
        self.stop()
        for name, small in (("--memory", MEMORY), ("--ssd-space", MEMORY)):
            if name in options:
                options[options.index(name) + 1] = small
            elif name == "--memory" or "--ssd" in options:
                options = [*options, name, small]
        if "--listen" not in options:  # nor on the port that all daemons have
            options = [*options, "--listen", "tcp://127.0.0.1:9527"]
        if "--http" not in options:
            options = [*options, "--http", "127.0.0.1:9528"]
        self.daemon = DaemonProcess(self.folder, *self._own(options), listen=())
        self.daemon.start()
        if "--secret-key" not in options:
            with RawClient(self.daemon.endpoint) as client:
                for name in (f"Qwen/{MODEL}", "another"):
                    client.hello(client=name, namespace=hashlib.sha256(name.encode()).digest())
                    client.put(blocks(3))

    def _serve_with_keys(self) -> None:
        """As docs/server.md makes keys, and moves two of them to the engine's host."""
        (block,) = (block for block in SERVERS if "keygen" in block.text)
        for words in commands_of(block.text):
            self.run(words)
        for name in ("clients/engine1.key_secret", "server.key"):
            shutil.copy(self.folder / "etc" / name, self._work)

    def _call(self, module: str, words: list[str]) -> None:
        words = self._own(words)
        log = self._work / "printed"
        with log.open("w") as printed:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=self._work,
                env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
                # The tests may run in the background of a script, where Ctrl-C is ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        expected = [PRINTED[word] for word in words if word in PRINTED]
        try:
            if words[0] == "top":  # until Ctrl-C
                eventually(lambda: PRINTED["top"] in log.read_text())
                process.send_signal(signal.SIGINT)
            status = process.wait(60)
        finally:
            process.kill()
            process.wait()
        shown = log.read_text()
        print(shown)
        # A host that lacks something is no fault of the command.
        fine = (0, 1) if words[0] == "doctor" else (0,)
        assert status in fine, f"{' '.join(words)}: {shown}"
        assert "Traceback" not in shown
        if "--json" in words:
            json.loads(shown)
        assert [line for line in expected if line not in shown] == []

    def _own(self, words: list[str]) -> list[str]:
        words = [self._here(word) for word in words]
        if "--memory" in words:
            words[words.index("--memory") + 1] = MEMORY
        for path in re.findall(r"^(?:[a-z]+://)?(/.*)", "\n".join(words), re.MULTILINE):
            there = Path(path).is_relative_to(self.folder)
            assert there, f"{path}: say in Host where this lies in a test"
        return words

    def _here(self, text: str) -> str:
        for theirs, ours in self._places.items():
            text = text.replace(theirs, str(ours))
        text = text.replace(":9527", f":{self._port}").replace(":9528", f":{self._http}")
        return text.replace("cache1", "127.0.0.1")


@pytest.fixture
def host(folder: Path) -> Iterator[Host]:
    made = Host(folder)
    yield made
    if made.daemon is not None:
        made.daemon.end()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_work(page: str, host: Host) -> None:
    began = time.monotonic()
    for block in SHELL_BLOCKS:
        if block.page == page:
            for words in commands_to_run(block):
                host.run(words)
                print(f"{time.monotonic() - began:5.1f} s {' '.join(words)}")
    host.stop()


def test_every_reason_not_to_run_a_command_has_one() -> None:
    kept = {why_not(words) for block in SHELL_BLOCKS for words in commands_of(block.text)}
    assert kept - {None} == set(NOT_RUN)


def test_pages_have_commands_to_run() -> None:
    found = [words for block in SHELL_BLOCKS for words in commands_to_run(block)]
    assert len(found) >= 20
    assert {"README.md", "docs/operations.md", "docs/server.md", "docs/start.md"} <= set(PAGES)
    run = {words[1] for words in found if words[0] == "tiered-kv"}
    assert {"doctor", "flush", "ls", "rm", "status", "top", "up", "verify"} <= run


@pytest.mark.parametrize("words", [["tiered-kv", "stauts", "tcp://127.0.0.1:9527"], ["sl", "-l"]])
def test_command_that_fails_or_is_unknown_is_noticed(words: list[str], host: Host) -> None:
    with pytest.raises(AssertionError, match=r"stauts|neither run nor"):
        host.run(words)
