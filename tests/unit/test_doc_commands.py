"""Commands in README and the pages for users work: each is run, parsed by the program that it
calls, or marked as one that needs a GPU. `tests/daemon/test_page_commands.py` runs those that need
no GPU, no root and no served model.

A fenced block without a language, or with `shell`, holds commands and nothing else. One that needs
a running engine follows `<!-- needs a GPU -->`; of it, everything but the engine is checked.
`console` shows commands after `$ ` with their output, `text` is not looked at.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_docs import wrong_commands
from tools.model_table import NAMED
from vllm_tiered_kv.api import cli as client
from vllm_tiered_kv.api.deployment import Deployment
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.scheduler.request_control import parse_control
from vllm_tiered_kv.server import cli as server
from vllm_tiered_kv.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
FOR_MAINTAINERS = {  # they show diagrams, formats and messages
    *("architecture.md", "benchmarks-details.md", "development.md", "model-tests.md"),
    *("protocol.md", "ssd-format.md", "testing.md"),
}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in FOR_MAINTAINERS),
]

GPU_MARK = "<!-- needs a GPU -->"
_FENCE = re.compile(
    rf"^(?P<gpu>{GPU_MARK}\n\n?)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"`(tiered-kv(?:-server)? [^`\n]+|python -m [^`\n]+)`")
_SERVED = "http://127.0.0.1:8000"  # by an engine

# What is not ours, and only there to use what is: of these, files of the repository must be there.
OTHERS = {"apt-get", "cd", "export", "git", "mooncake_client", "mooncake_master", "openssl", "sudo"}
OTHERS |= {"cp", "docker", "grep", "kubectl", "mkdir", "systemctl", "tr", "useradd"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    needs_gpu: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")),
            found["language"],
            found["gpu"] is not None,
            found["text"],
        )
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [
    block
    for page in PAGES
    for block in blocks_of(page.read_text(), page.relative_to(ROOT).as_posix())
]


class WrongCommand(AssertionError):
    """A command of a page that would not do what the page says."""


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block; those of a pipe one after the other."""
    unfinished = ""
    for line in text.replace("\\\n", " ").splitlines():
        unfinished += line
        try:
            words = shlex.split(unfinished, comments=True)
        except ValueError:  # a quotation goes on in the next line
            unfinished += "\n"
            continue
        unfinished = ""
        yield from _parts_of_pipe(words)
    if unfinished:
        raise WrongCommand(f"a quotation does not end: {unfinished}")


def _parts_of_pipe(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in [*words, "|"]:
        if word != "|":
            part.append(word)
            continue
        while part and re.fullmatch(r"[A-Z][A-Z_]*=\S*", part[0]):
            part.pop(0)
        for end in (">", "<", "&"):
            if end in part:
                del part[part.index(end) :]
        if part:
            yield part
        part = []


def check_command(words: list[str], needs_gpu: bool) -> None:
    program = words[0]
    if program in CHECKS:
        CHECKS[program](words[1:], needs_gpu)
        return
    if program not in OTHERS:
        raise WrongCommand(f"{program}: no command that is known here; output is `text`")
    for word in words:
        is_ours = re.match("(?:benchmarks|deploy|docs|examples|tools)/", word)
        if is_ours and not any(ROOT.glob(word)):
            raise WrongCommand(f"{' '.join(words)}: there is no {word}")


# ---- programs ------------------------------------------------------------------------------------


class _Parsed(Exception):
    """Carries what the real parser made of the words, in place of running them."""


def parsed(run: Callable[[list[str]], int], words: list[str]) -> Any:
    """The options that a program of ours reads from these words, without running it."""
    original = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        raise _Parsed(original(parser, *args, **kwargs))

    def serve(options: ServerOptions) -> int:
        raise _Parsed(options)

    complaints = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(complaints):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(server, "serve", serve)
        try:
            run(words)
        except _Parsed as done:
            return done.args[0]
        except SystemExit:
            pass
    raise WrongCommand(f"{' '.join(words)}: {complaints.getvalue().strip()}")


def _client(words: list[str], needs_gpu: bool) -> None:
    parsed(client.main, words)
    _require_mark(words[0] in ("bench", "explain", "replay", "warm"), needs_gpu)


def _server(words: list[str], needs_gpu: bool) -> None:
    parsed(server.main, words)


def _vllm(words: list[str], needs_gpu: bool) -> None:
    _require_mark(True, needs_gpu)
    check_transfer(json.loads(words[words.index("--kv-transfer-config") + 1]))


def _curl(words: list[str], needs_gpu: bool) -> None:
    (address,) = (word for word in words if word.startswith("http"))
    _require_mark(address.startswith(_SERVED), needs_gpu)
    path = address.removeprefix(_SERVED)
    if path not in ("/metrics", "/v1/completions", "/v1/tiered_kv/warm"):
        raise WrongCommand(f"{address}: nothing that an engine serves")
    if "-d" in words:
        body = json.loads(words[words.index("-d") + 1])
        if path == "/v1/tiered_kv/warm":
            assert body.pop("prompts")
            body = {"kv_transfer_params": {"tiered_kv": body}}
        _, wrong = parse_control(body["kv_transfer_params"])
        if wrong:
            raise WrongCommand(f"{address}: {wrong}")


def _make(words: list[str], needs_gpu: bool) -> None:
    if wrong_commands(f"make {words[0]}", (ROOT / "Makefile").read_text()):
        raise WrongCommand(f"make {words[0]}: no such target")


def _pip(words: list[str], needs_gpu: bool) -> None:
    extra = re.fullmatch(r"vllm-tiered-kv\[(\w+)\]", words[-1])
    pyproject = (ROOT / "pyproject.toml").read_text()
    if extra is not None and not re.search(rf"^{extra[1]} = \[", pyproject, re.MULTILINE):
        raise WrongCommand(f"there is no extra {extra[1]}")
    if words[0] != "install" or (extra is None and words[1:] != ["."]):
        raise WrongCommand(f"pip {' '.join(words)}")


def _python(words: list[str], needs_gpu: bool) -> None:
    if words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
        return  # a test of `tiered-kv up` runs it
    module = ROOT.joinpath(*words[1].split("."))
    if words[0] != "-m" or not (module.with_suffix(".py").is_file() or module.is_dir()):
        raise WrongCommand(f"python {' '.join(words)}: no such module")


def _require_mark(needed: bool, needs_gpu: bool) -> None:
    if needed and not needs_gpu:
        raise WrongCommand(f"put {GPU_MARK} and an empty line before the block")


CHECKS: dict[str, Callable[[list[str], bool], None]] = {
    "curl": _curl,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "tiered-kv": _client,
    "tiered-kv-server": _server,
    "vllm": _vllm,
}


# ---- other languages -----------------------------------------------------------------------------


def check_transfer(config: dict[str, Any]) -> None:
    """vLLM's --kv-transfer-config, or the part of it that a page shows."""
    connector = config.get("kv_connector", "TieredKVConnector")
    extra = config.get("kv_connector_extra_config", {})
    if connector == "MultiConnector":
        for inner in extra["connectors"]:
            check_transfer(inner)
    elif connector == "OffloadingConnector":
        for tier in extra["secondary_tiers"]:
            _check_offloading_tier(dict(tier))
    elif connector == "TieredKVConnector":
        TieredKVConfig.load(extra, environ={})
        if config.get("kv_role", "kv_both") != "kv_both":
            raise WrongCommand(f"kv_role {config['kv_role']}")
    else:
        raise WrongCommand(f"no connector {connector}")


def _check_offloading_tier(tier: dict[str, Any]) -> None:
    """Read from the source: the module cannot be imported without vLLM."""
    module = ROOT.joinpath(*tier.pop("module_path").split(".")).with_suffix(".py")
    (cls,) = (
        node
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == tier["type"]
    )
    (init,) = (
        node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    known = {argument.arg for argument in (*init.args.args, *init.args.kwonlyargs)}
    if unknown := set(tier) - known - {"type"}:
        raise WrongCommand(f"{tier['type']} does not take {unknown}")


def _check_shell(block: Block) -> None:
    for words in commands_of(block.text):
        check_command(words, block.needs_gpu)


def _check_console(block: Block) -> None:
    for line in block.text.splitlines():
        if line.startswith("$ "):
            check_command(shlex.split(line[2:]), block.needs_gpu)


def _check_json(block: Block) -> None:
    text = block.text.replace(", …", "").strip()  # that there may be more
    check_transfer(json.loads(text if text.startswith("{") else f"{{{text}}}"))


def _check_yaml(block: Block) -> None:
    read = yaml.safe_load(block.text)
    if "servers" in read:
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            file.write(block.text)
            file.flush()
            Deployment.read(Path(file.name))
    elif "scrape_configs" not in read:  # Prometheus's
        ServerOptions.load(read)


def _check_unit(block: Block) -> None:
    read = configparser.ConfigParser()
    read.read_string(block.text)
    words = shlex.split(read["Service"]["ExecStart"])
    at = words.index("--config")
    parsed(server.main, [*words[1:at], *words[at + 2 :]])  # the file is not there


def _check_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


LANGUAGES: dict[str, Callable[[Block], None]] = {
    "": _check_shell,
    "console": _check_console,
    "diff": lambda block: None,
    "ini": _check_unit,
    "json": _check_json,
    "python": _check_python,
    "shell": _check_shell,
    "text": lambda block: None,
    "yaml": _check_yaml,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_of_a_page_works_as_it_stands(block: Block) -> None:
    assert block.language in LANGUAGES
    if sys.version_info < (3, 11) and "s3://" in block.text:
        pytest.skip("there is no obstore for this Python")
    LANGUAGES[block.language](block)


def test_there_are_blocks_to_check() -> None:
    programs = {
        words[0]
        for block in BLOCKS
        if block.language in ("", "shell")
        for words in commands_of(block.text)
    }
    assert set(CHECKS) <= programs
    assert programs - set(CHECKS) <= OTHERS
    assert len(BLOCKS) > 25
    assert {block.language for block in BLOCKS} == set(LANGUAGES)


def test_every_fence_of_a_page_is_seen() -> None:
    """A mark or a word behind the fence that nobody reads would hide a block."""
    for page in PAGES:
        fences = len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE))
        assert fences == 2 * len(blocks_of(page.read_text(), page.name)), page


# ---- what pages say about commands in a sentence -------------------------------------------------


def _spans() -> list[str]:
    return [
        span
        for page in PAGES
        if page.name != "benchmarks.md"  # commands as they were at the commit of a result
        for span in _SPAN.findall(page.read_text())
    ]


def _help(run: Callable[[list[str]], int], words: list[str]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        run([*words, "--help"])
    assert ended.value.code == 0
    return shown.getvalue()


def check_span(span: str) -> None:
    program, *words = span.split()
    if program == "python":
        _python(words, needs_gpu=False)
        return
    run = client.main if program == "tiered-kv" else server.main
    named = [words[0]] if words and re.fullmatch(r"[a-z]+", words[0]) else []
    options = _help(run, named)
    unknown = [word for word in words if word.startswith("--") and word not in options]
    if unknown:
        raise WrongCommand(f"{span}: no option {unknown}")


@pytest.mark.parametrize("span", sorted(set(_spans())))
def test_every_command_in_a_sentence_exists(span: str) -> None:
    check_span(span)


# ---- run for real --------------------------------------------------------------------------------


def test_model_command_prints_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = (block for block in BLOCKS if block.language == "console")
    command, _, shown = block.text.partition("\n")
    words = shlex.split(command)[2:]
    (config,) = (model.config for model in NAMED if model.name == "gpt-oss-120b")
    published = {key: value for key, value in config.items() if key != "dtype"}
    folder = tmp_path / Path(words[1]).relative_to("~")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**published, "architectures": ["GptOssForCausalLM"]})
    )
    words = [str(tmp_path / word[2:]) if word.startswith("~/") else word for word in words]
    assert client.main(words) == 0
    assert capsys.readouterr().out == shown


def test_keygen_commands_make_the_keys_that_the_daemon_is_given(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if "tiered-kv-server keygen /etc" in block.text)
    place = block.text.replace("/etc/tiered-kv", str(tmp_path / "keys"))
    *keygen, daemon = (words[1:] for words in commands_of(place))
    for words in keygen:
        assert words[0] == "keygen"
        assert server.main(words) == 0
    options = parsed(server.main, daemon)
    assert Path(options.secret_key).is_file()
    assert {path.name for path in Path(options.clients).glob("*.key")} == {
        "engine1.key",
        "dashboard.key",
    }


@pytest.mark.parametrize(
    "command", [["tiered-kv", "--help"], ["tiered-kv-server", "--help"], ["make", "help"]]
)
def test_help_of_every_program_names_its_commands(command: list[str]) -> None:
    if command[0] == "make":
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        assert "make docs " in text
    else:
        text = _help(client.main if command[0] == "tiered-kv" else server.main, [])
        assert f"{command[0]} " in text


# ---- the checks notice ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "tiered-kv modle config.json",
        "tiered-kv model",
        "tiered-kv model config.json --memroy 1GiB",
        "tiered-kv replay prompts.jsonl",  # without the mark
        "tiered-kv-server --memory much",
        "tiered-kv-server --ssd-space 1GiB",  # of no SSD
        "tiered-kv-server keygen only-a-folder",
        "make tset",
        "pip install 'vllm-tiered-kv[radis]'",
        "python -m benchmarks.no_such_program",
        "curl http://127.0.0.1:8000/metrics",  # without the mark
        "vllm serve MODEL --kv-transfer-config '{}'",  # without the mark
        "vllm: a line of a log",
        "docker compose -f deploy/docker/no_such.yml up",
        "cp deploy/systemd/*.unit /etc/systemd/system/",
        "echo 'not closed",
    ],
)
def test_command_that_would_not_work_is_noticed(text: str) -> None:
    block = Block("page", 1, "", needs_gpu=False, text=f"{text}\n")
    with pytest.raises((WrongCommand, ValueError, SystemExit)):
        _check_shell(block)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_connector": "TieredConnector"},
        {"kv_role": "kv_consumer"},
        {"kv_connector_extra_config": {"cpu_memroy": "1GiB"}},
        {"kv_connector_extra_config": {"cpu_memory": "much"}},
    ],
)
def test_transfer_config_that_would_not_work_is_noticed(config: dict[str, Any]) -> None:
    with pytest.raises((WrongCommand, ValueError)):
        check_transfer(config)


def test_wrong_option_in_a_sentence_is_noticed() -> None:
    check_span("tiered-kv model PATH --memory SIZE")
    with pytest.raises(WrongCommand, match="no option"):
        check_span("tiered-kv model PATH --memroy SIZE")
