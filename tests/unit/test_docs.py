"""Documentation names only what exists: files, functions, make targets, links, sections."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = (ROOT, ROOT / "vllm_tiered_kv")  # what a path in the text may be relative to
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
LINKED = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")  # "/metrics" or "a b" are not paths of this repository
_SUFFIXES = (".py", ".pyi", ".cpp", ".cu", ".h", ".md", ".txt", ".toml")
_MODULE = re.compile(r"vllm_tiered_kv(\.\w+)+")
_LINK = re.compile(r"(?:\[[^\]\n]*\]\(|<img src=\")([^)\"\s]+)[)\"]")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_MAKE = re.compile(r"(?:^|`)make +([a-z][a-z-]*)", re.MULTILINE)
_TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)


def wrong_names(text: str) -> list[str]:
    """Names in backticks that look like ours and are not there."""
    wrong = []
    for span in _SPAN.findall(_FENCE.sub("", text)):
        path, _, name = span.partition("::")
        if _PATH.fullmatch(path) and ("/" in path or path.endswith(_SUFFIXES)):
            found = next((base / path for base in BASES if (base / path).exists()), None)
            if found is None or (name and name not in defined_in(found)):
                wrong.append(span)
        elif name or (_MODULE.fullmatch(span) and not module_exists(span)):
            wrong.append(span)
    return wrong


def defined_in(path: Path) -> set[str]:
    """Functions, classes, methods as `Class.method`, and attributes of classes and instances."""
    if path.is_dir():
        return set()
    if path.suffix != ".py":  # C++: the word as the start of a definition, declaration or call
        return set(re.findall(r"\b(\w+)\s*[({]", path.read_text()))
    return set(_definitions(ast.parse(path.read_text())))


def _definitions(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        yield from _names_bound(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                yield from (f"{node.name}.{name}" for name in _names_bound(member))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield f"{node.name}.{inner.attr}"


def _names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def module_exists(dotted: str) -> bool:
    """Whether `package.module`, or `package.module.name`, is there."""
    parts = dotted.split(".")
    whole, outer = ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1]).with_suffix(".py")
    if whole.is_dir() or whole.with_suffix(".py").is_file():
        return True
    return outer.is_file() and parts[-1] in defined_in(outer)


def wrong_links(text: str, folder: Path) -> list[str]:
    """Relative links without a target, or whose heading the target does not have."""
    wrong = []
    for link in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        there = target.exists() if path else True
        if not there or (anchor and anchor not in anchors(target.read_text() if path else text)):
            wrong.append(link)
    return wrong


def anchors(text: str) -> set[str]:
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def wrong_commands(text: str, makefile: str) -> list[str]:
    targets = set(_TARGET.findall(makefile))
    return [command for command in _MAKE.findall(text) if command not in targets]


@pytest.mark.parametrize("page", [ARCHITECTURE, *DECISIONS], ids=lambda p: p.name)
def test_every_name_exists(page: Path) -> None:
    assert wrong_names(page.read_text()) == []


@pytest.mark.parametrize("page", LINKED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_and_command_resolves(page: Path) -> None:
    text = page.read_text()
    assert wrong_links(text, page.parent) == []
    assert wrong_commands(text, (ROOT / "Makefile").read_text()) == []


def test_there_is_something_to_check() -> None:
    text = ARCHITECTURE.read_text()
    assert len(re.findall(r"`\S+::\S+`", text)) > 30
    assert _MAKE.findall((ROOT / "README.md").read_text())[:2] == ["demo", "test"]
    assert len(DECISIONS) >= 7


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.name)
def test_decision_is_complete_and_listed(page: Path) -> None:
    assert f"(adr/{page.name})" in ARCHITECTURE.read_text()
    title, *sections = _HEADING.findall(page.read_text())
    assert title.startswith(f"{page.name[:4]}: ")
    assert sections == ["Context", "Decision", "Consequences", "Rejected"]


@pytest.mark.parametrize(
    "name",
    [
        "core/no_such_file.py",
        "no_such_page.md",
        "docs/nowhere/",
        "core/key.py::no_such_function",
        "core/key.py::Fingerprint.no_such_method",
        "core/key.py::namespace",  # a method is named with its class
        "core/::Fingerprint",
        "csrc/block_copy_cuda.cu::no_such_kernel",
        "Fingerprint::namespace",
        "vllm_tiered_kv.core.no_such_module",
        "vllm_tiered_kv.core.key.no_such_name",
    ],
)
def test_wrong_name_is_noticed(name: str) -> None:
    assert wrong_names(f"see `core/key.py` and `{name}`, `/metrics`") == [name]


@pytest.mark.parametrize(
    "name",
    [
        "core/key.py",
        "core/",
        "vllm_tiered_kv/core/key.py",
        "core/key.py::BlockKey",
        "core/key.py::Fingerprint.namespace",
        "core/key.py::Fingerprint.layout",
        "connector/worker/worker_half.py::WorkerHalf.wait_for_sources",
        "csrc/block_copy_cuda.cu::copy_kernel",
        "vllm_tiered_kv.core",
        "vllm_tiered_kv.core.key.tail_key",
        "/metrics",
        "reserve",
        "torch.no_such_thing",
    ],
)
def test_right_name_passes(name: str) -> None:
    assert wrong_names(f"see `{name}`\n\n```\ncode with a `no/such/file.py`\n```\n") == []


def test_wrong_link_is_noticed() -> None:
    text = (
        "# One title\n[a](README.md) [b](https://example.org/x) [c](#one-title) "
        "[d](docs/configuration.md#inside-a-multiconnector)\n"
        "[e](no.md) [f](#two) [g](README.md#no-such-heading)\n"
        '<img src="docs/images/tiers.svg" width="9"><img src="no.svg">'
    )
    assert wrong_links(text, ROOT) == ["no.md", "#two", "README.md#no-such-heading", "no.svg"]


def test_wrong_command_is_noticed() -> None:
    makefile = "SETUP := x\ndemo: ## try\nunit: demo\n"
    text = "```\nmake demo    # shown\nmake tset\n```\n`make unit`, `make clean`; they make sense"
    assert wrong_commands(text, makefile) == ["tset", "clean"]
