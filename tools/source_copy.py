"""Copies of the sources, for checks that build them otherwise or break them on purpose.

The working tree stays as it is: its compiled modules are in use, and an interrupted check must
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
    *("LICENSE", "Makefile", "pyproject.toml", "setup.py"),
)
CACHES = ("__pycache__", ".hypothesis", ".pytest_cache")


def copy_sources(target: Path, compiled: bool) -> None:
    """A fresh copy in `target`, with the compiled modules or without them."""
    if target.exists():
        shutil.rmtree(target)
    skipped = shutil.ignore_patterns(*CACHES, *(() if compiled else ("*.so",)))
    for folder in (*FOLDERS, PACKAGE):
        shutil.copytree(ROOT / folder, target / folder, ignore=skipped, symlinks=True)
    for file in FILES:
        shutil.copy2(ROOT / file, target / file)
