"""The module `_cpu` of a copy of the sources, built after one of them was broken.

`setup.py` would compile all of it each time; here only what changed is, without optimisation.
"""

from __future__ import annotations

import contextlib
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pybind11

from tools.mutants.mutation import PACKAGE

_FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread")


def _is_stale(target: Path, source: Path) -> bool:
    return not target.exists() or target.stat().st_mtime_ns < source.stat().st_mtime_ns


def _compile(tree: Path) -> list[str]:
    folders = [tree / "csrc", Path(pybind11.get_include()), Path(sysconfig.get_path("include"))]
    objects = []
    for source in sorted((tree / "csrc").rglob("*.cpp")):
        if source.name.startswith("cuda_"):
            continue
        target = tree / "build" / source.relative_to(tree).with_suffix(".o")
        if _is_stale(target, source):
            target.parent.mkdir(parents=True, exist_ok=True)
            includes = [f"-I{folder}" for folder in folders]
            subprocess.run(["g++", *_FLAGS, *includes, "-c", source, "-o", target], check=True)
        objects.append(str(target))
    return objects


@contextlib.contextmanager
def build_anew(tree: Path) -> Iterator[None]:
    """The module as its sources are now; what was there before is put back."""
    module = tree / PACKAGE / "native" / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    before = module.read_bytes()
    try:
        objects = _compile(tree)
        # Replaced, not written over: it may be mapped by processes that end a little later.
        module.unlink()
        subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", module], check=True)
        yield
    finally:
        module.unlink(missing_ok=True)
        module.write_bytes(before)
