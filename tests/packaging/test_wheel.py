"""What people install: a source archive that builds, and a wheel with the package and no more."""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import numpy
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_tiered_kv"
NATIVE = f"{PACKAGE}/native/_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a command and shows all it printed if it fails."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    tree: Path  # the exported sources
    sdist: Path
    wheel: Path  # built from the archive

    def metadata(self) -> Message:
        return email.message_from_string(self.read(".dist-info/METADATA"))

    def read(self, ending: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(ending))
            return archive.read(name).decode()


def _cannot(reason: str) -> None:
    """A laptop without network may skip this; where CI runs it has to work (`.ci/run` says so)."""
    if os.environ.get("REQUIRE_WHEEL"):
        pytest.fail(reason)
    pytest.skip(reason)


def export(folder: Path) -> Path:
    """The sources as a clone would have them: what is tracked or could be, as it is now."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if listing.returncode != 0:
        _cannot(f"{ROOT} is no git checkout: {listing.stderr.decode().strip()}")
    for name in filter(None, listing.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build_requirements(tree: Path) -> list[str]:
    found = re.search(r"^requires = (\[.*\])$", (tree / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return json.loads(found.group(1))


def pip_wheel(source: Path, target: Path, wheels: Path) -> Path:
    """Build isolation stays on; what it installs was downloaded before."""
    target.mkdir()
    call(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"),
        *("--find-links", wheels, "--wheel-dir", target, source),
        cwd=target,
        TIERED_KV_CUDA="0",
    )
    (wheel,) = target.iterdir()
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.mktemp("packaging")
    tree = export(base / "tree")
    requirements = build_requirements(tree)
    wheels = base / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--dest", str(wheels), *requirements]
    got = subprocess.run(download, cwd=base, capture_output=True, text=True)
    if got.returncode != 0:
        last = got.stderr.strip().splitlines()[-1:]
        _cannot(f"pip cannot download {' '.join(requirements)} here: {' '.join(last)}")

    call(
        *(sys.executable, "-m", "pip", "install", "--no-index", "--find-links", wheels),
        *("--target", base / "backend", *requirements),
        cwd=base,
    )
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    call(
        *(sys.executable, "-c", program, base / "sdist"),
        cwd=tree,
        PYTHONPATH=str(base / "backend"),
        TIERED_KV_CUDA="0",
    )
    (sdist,) = (base / "sdist").iterdir()
    return Built(tree, sdist, pip_wheel(sdist, base / "wheel", wheels))


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sources(tree: Path) -> set[str]:
    """What of the package belongs into a wheel."""
    files = (tree / PACKAGE).rglob("*")
    wanted = (".py", ".pyi", ".html", ".typed")
    return {file.relative_to(tree).as_posix() for file in files if file.suffix in wanted} | {
        f"{PACKAGE}/py.typed"
    }


def test_wheel_holds_the_package_and_no_more(built: Built) -> None:
    names = names_of(built.wheel)
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == sources(built.tree) | {NATIVE}
    assert {f"{PACKAGE}/native/_cpu.pyi", f"{PACKAGE}/native/_cuda.pyi"} <= names
    assert {name.split("/")[0] for name in info} == {
        f"{PACKAGE}-{built.metadata()['Version']}.dist-info"
    }
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"} <= {
        name.rsplit("/", 1)[1] for name in info
    }
    assert "Root-Is-Purelib: false" in built.read(".dist-info/WHEEL")


def test_wheel_names_neither_vllm_nor_torch(built: Built) -> None:
    metadata = built.metadata()
    needed = {
        re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()
        for requirement in metadata.get_all("Requires-Dist") or []
    }
    assert "numpy" in needed
    needed.discard("vllm-tiered-kv")  # an extra that names another one
    assert not {name for name in needed if name.startswith(("vllm", "torch", "nvidia"))}
    assert metadata["Name"] == "vllm-tiered-kv"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_page_in_the_wheel_has_no_relative_link(built: Built) -> None:
    metadata = built.metadata()
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_wheel_brings_plugin_and_command(built: Built) -> None:
    parsed = configparser.ConfigParser()
    parsed.read_string(built.read(".dist-info/entry_points.txt"))
    assert {section: dict(parsed[section]) for section in parsed.sections()} == {
        "vllm.general_plugins": {"tiered_kv": f"{PACKAGE}.connector.plugin:register"},
        "vllm.endpoint_plugins": {"tiered_kv": f"{PACKAGE}.connector.warm_route:WarmRoute"},
        "console_scripts": {
            "tiered-kv": f"{PACKAGE}.api.cli:main",
            "tiered-kv-server": f"{PACKAGE}.server.cli:main",
        },
    }


def test_source_archive_is_enough_to_build(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {
            name.partition("/")[2] for name in (m.name for m in archive.getmembers() if m.isfile())
        }
    native = {
        path.relative_to(built.tree).as_posix()
        for path in (built.tree / "csrc").rglob("*")
        if path.is_file()
    }
    assert len(native) > 10
    assert native | sources(built.tree) <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "PKG-INFO"} <= names
    assert not {name for name in names if name.endswith((".so", ".o", ".pyc"))}


def test_wheel_works_where_there_is_only_numpy(built: Built, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True, symlinks=True)
    python = fresh / "bin" / "python"
    (site,) = fresh.glob("lib/python*/site-packages")
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    here = Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (here / name).is_dir():
            (borrowed / name).symlink_to(here / name)
    (site / "numpy.pth").write_text(f"{borrowed}\n")
    call(
        *(python, "-m", "pip", "install", "--no-deps", "--no-index", built.wheel),
        cwd=tmp_path,
    )
    printed = call(python, "-I", "-c", GATHER, cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(site)


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_daemon_and_commands_run_where_pip_installed_it(built: Built, kind: str) -> None:
    """With the dependencies that it names and nothing else; the archive is compiled by pip."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:  # short: it is the path of a socket
        folder = Path(name)
        venv.create(folder / "fresh", with_pip=True, symlinks=True)
        programs = folder / "fresh" / "bin"
        source = built.sdist if kind == "sdist" else built.wheel
        install = [programs / "python", "-m", "pip", "install", f"{source}[server]"]
        call(*install, cwd=folder, TIERED_KV_CUDA="0")
        version = built.metadata()["Version"]
        for program in ("tiered-kv", "tiered-kv-server"):
            printed = call(programs / program, "--version", cwd=folder)
            assert printed == f"{program} {version}\n"
        address = f"ipc://{folder}/kv.sock"
        options = ["--memory", "4MiB", "--listen", address, "--http", "off"]
        with subprocess.Popen([programs / "tiered-kv-server", *options], cwd=folder) as daemon:
            try:
                while not (folder / "kv.sock").exists():
                    assert daemon.poll() is None
                    time.sleep(0.05)
                printed = call(programs / "tiered-kv", "status", address, cwd=folder)
                assert f"tiered-kv-server {version}" in printed
            finally:
                daemon.terminate()
        assert daemon.returncode == 0


GATHER = """
import importlib.util
import numpy as np
import vllm_tiered_kv
from vllm_tiered_kv.native.cpu import BlockLayout, HostRegion, gather

assert not [name for name in ("torch", "vllm") if importlib.util.find_spec(name)]
cache = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
slots = np.zeros(2 * 64, dtype=np.uint8)
ints = lambda *values: np.array(values, dtype=np.int64)
layout = BlockLayout(
    np.array([cache.ctypes.data], dtype=np.uint64), ints(64), ints(64), ints(0), len(cache)
)
gather(layout, ints(3, 1), HostRegion(slots.ctypes.data, slots.nbytes), ints(0, 64))
assert slots.tobytes() == cache[3].tobytes() + cache[1].tobytes()
print(vllm_tiered_kv.__file__)
"""
