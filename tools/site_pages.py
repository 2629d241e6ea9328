"""A hook of MkDocs: pages from outside docs/, and links that lead out of it.

Links in the repository are relative to the file they are in, so that they work on GitHub and in a
clone. On the site, one to a page of the site leads there, and any other one to GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

# By their place in the repository: what they are called on the site.
FROM_OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "running-benchmarks.md",
}
_SOURCES = {page: source for source, page in FROM_OUTSIDE.items()}
_LINK = re.compile(r"(?:(?<=\]\()|(?<=<img src=\"))(?![a-z]+:|#)([^)\"\s#]+)(#[^)\"\s]*)?(?=[)\"])")


def site_links(text: str, source: str, repository: str) -> str:
    """Rewrites the relative links of a page that lies at `source` in the repository."""
    page = site_page(source)
    assert page is not None

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        there = site_page(target)
        if there is None:
            kind = "tree" if (ROOT / target).is_dir() else "blob"
            return f"{repository}/{kind}/main/{target}{link[2] or ''}"
        return posixpath.relpath(there, posixpath.dirname(page) or ".") + (link[2] or "")

    return _LINK.sub(rewritten, text)


def site_page(source: str) -> str | None:
    """The place on the site of a file of the repository, if it has one."""
    if source in FROM_OUTSIDE:
        return FROM_OUTSIDE[source]
    return source.removeprefix("docs/") if source.startswith("docs/") else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File  # tests read the links without MkDocs

    for source, page in FROM_OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    source = _SOURCES.get(place, f"docs/{place}")
    page.edit_url = f"{config.repo_url}/edit/main/{source}"
    return site_links(markdown, source, config.repo_url)


_LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(https?:[^\"' >]+)")
_STYLE = re.compile(r"<link\b[^>]*\brel=[\"']?stylesheet[^>]*\bhref=[\"']?(https?:[^\"' >]+)")


def loaded_from_elsewhere(html: str) -> list[str]:
    """Addresses that a browser would ask for to show a page."""
    return [*_LOADED.findall(html), *_STYLE.findall(html)]


def without_repository_facts(html: str) -> str:
    """The theme's script asks api.github.com for stars and releases where it finds this mark."""
    return html.replace(' data-md-component="source"', "")


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return without_repository_facts(output)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := loaded_from_elsewhere(output):
        from mkdocs.exceptions import PluginError

        raise PluginError(f"{page.file.src_uri} would load {found}: put a copy into docs/")
    return without_repository_facts(output)
