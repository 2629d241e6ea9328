"""A release is what its tag says: one version, named alike where people look for it."""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path

import pytest
import yaml

from tools.build_wheel import BuildError, check_release, normalize, set_time_of_archives
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


def test_source_archives_of_one_commit_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever, by whomever and in whichever order the files were written."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    set_time_of_archives(tmp_path)
    assert "SOURCE_DATE_EPOCH" not in os.environ, "a folder without a history has no time"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = []
    for number, names in enumerate((["a.py", "b.py"], ["b.py", "a.py"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        archive = folder / "x-1.tar.gz"
        with tarfile.open(archive, "w:gz") as content:
            for name in names:
                file = folder / name
                file.write_text(name)
                os.utime(file, (number, number + 0.5))
                content.add(file, f"x-1/{name}")
        normalize(archive)
        made.append(archive.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "0" / "x-1.tar.gz") as content:
        assert content.getnames() == ["x-1/a.py", "x-1/b.py"]
        (first, _) = content.getmembers()
        assert (first.mtime, first.uid, first.mode) == (1_700_000_000, 0, 0o644)
        packed = content.extractfile(first)
        assert packed is not None
        assert packed.read() == b"a.py"
