"""Breaks one module in every way that mutmut knows, and lists what its unit tests do not notice.

    python -m tools.mutate vllm_tiered_kv/cache/cost_model.py [tests ...]

Without tests, those of the same name in tests/unit. Works on a copy of the sources in build/mutate;
`mutmut show NAME` there shows a mutant. Many survivors are harmless: judge them one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.source_copy import PACKAGE, ROOT, copy_sources

FOLDER = ROOT / "build" / "mutate"


def settings(module: str, tests: Sequence[str]) -> str:
    """The section of pyproject.toml that mutmut reads; JSON lists are lists of TOML too."""
    return f"""
[tool.mutmut]
source_paths = ["{PACKAGE}"]
only_mutate = {json.dumps([module])}
pytest_add_cli_args = ["-p", "no:cacheprovider", "--hypothesis-profile=landing"]
pytest_add_cli_args_test_selection = {json.dumps(list(tests))}
also_copy = ["benchmarks", "docs", "tools"]
"""


def main(module: str, *given: str) -> int:
    tests = given or (f"tests/unit/test_{Path(module).stem}.py",)
    missing = [path for path in (module, *tests) if not (ROOT / path).exists()]
    if missing:
        raise SystemExit(f"there is no {', '.join(missing)}; name MODULE, and its TESTS")
    copy_sources(FOLDER, compiled=True)
    with (FOLDER / "pyproject.toml").open("a") as file:
        file.write(settings(module, tests))
    mutmut = str(Path(sys.executable).with_name("mutmut"))
    jobs = str(max(1, (os.cpu_count() or 2) // 2))
    status = subprocess.run([mutmut, "run", "--max-children", jobs], cwd=FOLDER).returncode
    print("\nnot noticed by the tests:")
    subprocess.run([mutmut, "results"], cwd=FOLDER)
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("name a module: make mutate MODULE=vllm_tiered_kv/cache/cost_model.py")
    sys.exit(main(*sys.argv[1:]))
