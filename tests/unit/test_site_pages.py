"""Links of a page lead to the same place on the site and on PyPI as in the repository."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tools.site_pages import (
    FROM_OUTSIDE,
    ROOT,
    loaded_from_elsewhere,
    site_links,
    without_repository_facts,
)

REPOSITORY = "https://github.com/vllm-tiered-kv/vllm_tiered_kv"


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/start.md", "start.md"),
        ("README.md", "docs/benchmarks.md#the-ssd", "benchmarks.md#the-ssd"),
        ("README.md", "docs/images/tiers.svg", "images/tiers.svg"),
        ("README.md", "SECURITY.md", "security.md"),
        ("README.md", "LICENSE", f"{REPOSITORY}/blob/main/LICENSE"),
        ("docs/faq.md", "models.md", "models.md"),
        ("docs/faq.md", "../SECURITY.md#report", "security.md#report"),
        ("docs/faq.md", "../benchmarks/README.md", "running-benchmarks.md"),
        ("docs/faq.md", "../deploy", f"{REPOSITORY}/tree/main/deploy"),
        ("docs/adr/0003-keys.md", "../models.md", "../models.md"),
        ("docs/adr/0003-keys.md", "../../README.md", "../index.md"),
        ("benchmarks/README.md", "../docs/benchmarks.md", "benchmarks.md"),
        ("docs/faq.md", "#a-heading", "#a-heading"),
        ("docs/faq.md", "https://example.org/x.md", "https://example.org/x.md"),
    ],
)
def test_link_of_the_site_leads_to_the_same_file(source: str, link: str, expected: str) -> None:
    assert site_links(f"see [this]({link}).", source, REPOSITORY) == f"see [this]({expected})."
    image = '<img src="{}" width="9">'
    assert site_links(image.format(link), source, REPOSITORY) == image.format(expected)


def test_pages_from_outside_are_there() -> None:
    assert all((ROOT / source).is_file() for source in FROM_OUTSIDE)


def test_page_for_pypi_has_no_relative_link() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--long-description"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text()
    pattern = r'(!?)\[[^]]*\]\(([^)]+)\)|(<img src=")([^"]+)"'
    links, original = (re.findall(pattern, text) for text in (done.stdout, readme))
    assert len(links) == len(original) > 20
    assert sum(bool(found[2]) for found in links) == readme.count("<img") > 0
    for found, (_, linked, _, shown) in zip(links, original, strict=True):
        link, before = found[1] or found[3], linked or shown
        kind = "raw" if found[0] or found[2] else "blob"
        if before.startswith("https://"):
            assert link == before
        else:
            assert link == f"{REPOSITORY}/{kind}/main/{before}"
            assert (ROOT / before.partition("#")[0]).is_file()


def test_repository_is_the_same_everywhere() -> None:
    for name in ("setup.py", "pyproject.toml", "mkdocs.yml"):
        found = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text())
        assert set(found) == {REPOSITORY}, name


def test_link_to_the_repository_does_not_make_the_page_ask_github() -> None:
    html = '<a href="https://github.com/x/y" class="md-source" data-md-component="source">'
    assert without_repository_facts(html) == '<a href="https://github.com/x/y" class="md-source">'


def test_page_that_loads_from_elsewhere_is_refused() -> None:
    html = (
        '<link rel="stylesheet" href="assets/a.css"><a href="https://example.org/page">link</a>'
        '<img alt="" src="images/tiers.svg"><script src="https://example.org/b.js"></script>'
        '<img src="https://example.org/c.svg"><link rel="stylesheet" href="https://example.org/d">'
    )
    expected = [f"https://example.org/{name}" for name in ("b.js", "c.svg", "d")]
    assert loaded_from_elsewhere(html) == expected
