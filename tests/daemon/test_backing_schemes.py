"""Schemes of `--backing` and the libraries that they need, which are optional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = {"mooncake": "mooncake", "redis": "redis", "s3": "obstore"}


def refused_daemon(url: str, modules: Path | None = None) -> str:
    """Returns what a daemon says that may not start; it imports from the folder first."""
    path = os.pathsep.join([str(modules or ""), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-m", "vllm_tiered_kv.server.cli", "--backing", url],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert said.returncode == 2
    return said.stderr


@pytest.mark.parametrize("scheme", LIBRARIES)
def test_daemon_without_the_library_says_what_to_install(tmp_path: Path, scheme: str) -> None:
    library = LIBRARIES[scheme]
    (tmp_path / f"{library}.py").write_text(
        f"raise ModuleNotFoundError('gone', name='{library}')\n"
    )
    said = refused_daemon(f"{scheme}://localhost", tmp_path)
    assert f"{scheme}:// needs a library that is not installed ({library})" in said
    assert f"pip install 'vllm-tiered-kv[{scheme}]'" in said


def test_unknown_scheme_names_the_known_ones_and_their_extras() -> None:
    assert (
        "must start with one of file://, "
        "mooncake:// (needs pip install 'vllm-tiered-kv[mooncake]'), "
        "redis:// (needs pip install 'vllm-tiered-kv[redis]'), "
        "rediss:// (needs pip install 'vllm-tiered-kv[redis]'), "
        "s3:// (needs pip install 'vllm-tiered-kv[s3]')"
    ) in refused_daemon("moon://localhost")


def test_libraries_are_loaded_for_their_schemes_only() -> None:
    program = (
        "import sys\n"
        "from vllm_tiered_kv.server.options import ServerOptions\n"
        "ServerOptions.load({'backing': 'file:///mnt/kv', 'backing_ttl': '1d'})\n"
        f"libraries = {list(LIBRARIES.values())}\n"
        "assert not [one for one in sys.modules if any(name in one for name in libraries)]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
