"""A release is what its tag says: one version, named alike where people look for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tools.build_wheel import BuildError, check_release
from vllm_tiered_kv import __version__

ROOT = Path(__file__).parents[2]


def test_version_is_written_once_and_named_alike_elsewhere() -> None:
    assert re.findall(r"^version\b.*", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) == [
        'version = { attr = "vllm_tiered_kv.__version__" }'
    ]
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (__version__, "Unreleased")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_extras_that_pages_name_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {
        extra
        for page in pages
        for extra in re.findall(r"vllm-tiered-kv\[(\w+)\]", page.read_text())
    }
    assert named <= extras
    assert {"server", "mooncake", "redis", "otel"} <= extras


@pytest.mark.parametrize(
    ("tag", "heading", "wrong"),
    [
        ("v1.2.3", "## [1.2.3] - 2026-01-31", ""),
        ("1.2.3", "## [1.2.3] - 2026-01-31", "the tag is 1.2.3 and the version 1.2.3"),
        ("v1.2.4", "## [1.2.3] - 2026-01-31", "the tag is v1.2.4 and the version 1.2.3"),
        ("v1.2.3", "## [1.2.3] - unreleased", "no heading of 1.2.3 with the day"),
        ("v1.2.3", "## [1x2x3] - 2026-01-31", "no heading of 1.2.3 with the day"),
    ],
)
def test_tag_must_be_that_of_the_version_and_the_changelog_dated(
    tag: str, heading: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / "vllm_tiered_kv").mkdir()
    (tmp_path / "vllm_tiered_kv" / "__init__.py").write_text('"""x"""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    if not wrong:
        check_release(tmp_path, tag)
        return
    with pytest.raises(BuildError, match=wrong):
        check_release(tmp_path, tag)
