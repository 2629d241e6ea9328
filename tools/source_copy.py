"""Copies the sources, for checks that build them differently or plant faults.

The working tree is not changed: its compiled modules may be in use, and an interrupted check must
leave nothing behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".github", "benchmarks", "csrc", "docs", "examples", "requirements", "tests", "tools")
PACKAGE = "vllm_tiered_kv"
FILES = (
    *("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"),
    *("LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml", "setup.py"),
)
CACHES = ("__pycache__", ".hypothesis", ".pytest_cache")


def copy_sources(target: Path, compiled: bool) -> None:
    """Replaces `target` by a copy of the sources, with or without the compiled modules."""
    if target.exists():
        shutil.rmtree(target)
    skipped = shutil.ignore_patterns(*CACHES, *(() if compiled else ("*.so",)))
    for folder in (*FOLDERS, PACKAGE):
        shutil.copytree(ROOT / folder, target / folder, ignore=skipped, symlinks=True)
    for file in FILES:
        shutil.copy2(ROOT / file, target / file)
