"""Builds the two compiled modules and the page for PyPI; everything else is in pyproject.toml.

`_cpu` needs a C++17 compiler and is always built. `_cuda` is built where nvcc is found and needs no
torch, so that one wheel serves every torch and pip's build isolation is no obstacle. Settings:

TIERED_KV_CUDA        0 leaves `_cuda` out, 1 makes a missing CUDA toolkit an error
TIERED_KV_CUDA_ARCHS  compute capabilities to compile for, for instance "90" or "80,90"
TIERED_KV_SANITIZE    sanitizers to compile `_cpu` with, as gcc names them; for the checks only
TIERED_KV_BUILD_JOBS  files to compile at once; by default as many as there are cores
TIERED_KV_KEEP_BUILT  1 leaves a module alone that was built in place of the same sources in the
                      same way: environments of one checkout need not compile it each
CUDA_HOME, CUDA_PATH  where to look for nvcc before PATH
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pybind11
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

REPOSITORY = "https://github.com/vllm-tiered-kv/vllm_tiered_kv"
DEFAULT_ARCHS = (80, 90, 100, 120)
CXX_FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
SANITIZERS = os.environ.get("TIERED_KV_SANITIZE", "")
if SANITIZERS:
    # Frames and line numbers for the reports; -O1 is as fast as keeps them true. Python's own flags
    # have -fwrapv, with which an overflow is nothing to report.
    CXX_FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-wrapv", f"-fsanitize={SANITIZERS}"]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))


class NoToolkit(Exception):
    """Why the CUDA module cannot be built."""


class Toolkit(NamedTuple):
    nvcc: str
    include: Path
    library: Path


def find_nvcc() -> str:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and os.access(Path(home, "bin", "nvcc"), os.X_OK):
            return str(Path(home, "bin", "nvcc"))
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise NoToolkit("no nvcc in CUDA_HOME, CUDA_PATH or PATH")
    return on_path


def toolkit_roots(nvcc: str) -> list[Path]:
    """Where nvcc says it lives comes first: what is on PATH may be a wrapper script."""
    roots = []
    dry_run = subprocess.run(
        [nvcc, "-dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
    )
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr + dry_run.stdout, re.MULTILINE)
    if top:
        roots.append(Path(top.group(1).strip()))
    roots.append(Path(nvcc).resolve().parent.parent)
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    # Cross and package layouts keep headers and libraries one floor down.
    return [place for root in roots for place in (root, *sorted(root.glob("targets/*-linux")))]


def find_toolkit() -> Toolkit:
    nvcc = find_nvcc()
    roots = toolkit_roots(nvcc)
    includes = [root / "include" for root in roots]
    libraries = [root / name for root in roots for name in ("lib64", "lib")]
    include = next((path for path in includes if (path / "cuda_runtime.h").is_file()), None)
    library = next((path for path in libraries if (path / "libcudart_static.a").is_file()), None)
    if include is None:
        raise NoToolkit(f"{nvcc} comes without cuda_runtime.h")
    if library is None:
        raise NoToolkit(f"{nvcc} comes without libcudart_static.a")
    return Toolkit(nvcc, include.resolve(), library.resolve())


def wanted_toolkit() -> Toolkit:
    choice = os.environ.get("TIERED_KV_CUDA", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"TIERED_KV_CUDA is {choice!r}: expected 0 or 1")
    if choice == "0":
        raise NoToolkit("TIERED_KV_CUDA=0")
    try:
        return find_toolkit()
    except NoToolkit as problem:
        if choice == "1":
            raise SystemExit(f"TIERED_KV_CUDA=1, but: {problem}") from problem
        raise


def arch_flags(nvcc: str) -> list[str]:
    override = re.findall(r"\d+", os.environ.get("TIERED_KV_CUDA_ARCHS", ""))
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    supported = {int(arch) for arch in re.findall(r"compute_(\d+)\b", listing.stdout)}
    archs = [int(arch) for arch in override] or [a for a in DEFAULT_ARCHS if a in supported]
    if not archs:
        raise SystemExit(f"{nvcc} supports none of {DEFAULT_ARCHS}; set TIERED_KV_CUDA_ARCHS")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = max(archs)
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


class BuiltInPlace:
    """A compiled module among the sources, and by what it was made."""

    def __init__(self, file: str, extension: Extension, toolkit: Toolkit | None) -> None:
        self._module = Path(file)
        self._inputs = [*extension.sources, *HEADERS, __file__]
        self._note = Path("build", f"{self._module.name}.made-by")
        self._recipe = "\n".join(
            [
                *(sys.version, *CXX_FLAGS, *extension.sources),
                *(os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS")),
                *([] if toolkit is None else [toolkit.nvcc, *arch_flags(toolkit.nvcc)]),
            ]
        )

    def is_current(self) -> bool:
        if not (self._module.is_file() and self._note.is_file()):
            return False
        newest = max(Path(path).stat().st_mtime for path in self._inputs)
        return self._module.stat().st_mtime > newest and self._note.read_text() == self._recipe

    def forget(self) -> None:
        self._note.unlink(missing_ok=True)

    def note(self) -> None:
        self._note.parent.mkdir(exist_ok=True)
        self._note.write_text(self._recipe)


class BuildNative(build_ext):
    """Compiles .cu files with nvcc, and leaves the CUDA module out where that is impossible."""

    def build_extensions(self) -> None:
        made = []
        for extension in list(self.extensions):
            toolkit = None
            if extension.name.endswith("._cuda"):
                try:
                    toolkit = wanted_toolkit()
                except NoToolkit as reason:
                    print(f"vllm_tiered_kv: the CUDA module is skipped: {reason}", flush=True)
                    self.extensions.remove(extension)
                    continue
            built = BuiltInPlace(self.get_ext_filename(extension.name), extension, toolkit)
            if os.environ.get("TIERED_KV_KEEP_BUILT") == "1" and built.is_current():
                self.extensions.remove(extension)
                continue
            built.forget()
            if self.inplace or self.editable_mode:
                made.append(built)
            if toolkit is not None:
                self.prepare_cuda(extension, toolkit)
        super().build_extensions()
        for built in made:
            built.note()

    def prepare_cuda(self, extension: Extension, toolkit: Toolkit) -> None:
        extension.include_dirs.append(str(toolkit.include))
        extension.extra_link_args += [
            str(toolkit.library / "libcudart_static.a"),
            *("-ldl", "-lrt", "-lpthread"),
            # nvcc's temporary files have the number of its process in their names, and are symbols.
            "-Wl,--strip-all",
        ]
        kernels = [source for source in extension.sources if source.endswith(".cu")]
        extension.sources = [source for source in extension.sources if source not in kernels]
        extension.extra_objects += [self.compile_kernel(toolkit, source) for source in kernels]

    def compile_kernel(self, toolkit: Toolkit, source: str) -> str:
        target = Path(self.build_temp, Path(source).with_suffix(".cu.o"))
        inputs = [source, *HEADERS, __file__]
        newest = max(Path(path).stat().st_mtime for path in inputs)
        command = [
            *(toolkit.nvcc, "-c", source, "-o", str(target)),
            *("-std=c++17", "-O3", "--threads", "2"),
            *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"),
            *arch_flags(toolkit.nvcc),
        ]
        recipe = target.with_suffix(".cmd")
        same_recipe = recipe.is_file() and recipe.read_text() == "\n".join(command)
        if self.force or not (same_recipe and target.is_file() and target.stat().st_mtime > newest):
            target.parent.mkdir(parents=True, exist_ok=True)
            self.announce(" ".join(command), level=2)
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as failure:
                raise SystemExit(
                    f"nvcc failed on {source}; TIERED_KV_CUDA=0 installs without CUDA"
                ) from failure
            recipe.write_text("\n".join(command))
        return str(target)


def extension(name: str, *sources: str) -> Extension:
    return Extension(
        f"vllm_tiered_kv.native.{name}",
        sources=[f"csrc/{source}" for source in sources],
        depends=HEADERS,
        include_dirs=["csrc", pybind11.get_include()],
        extra_compile_args=CXX_FLAGS,
        extra_link_args=["-pthread", *([f"-fsanitize={SANITIZERS}"] if SANITIZERS else [])],
        language="c++",
    )


def page_for_pypi() -> str:
    """README.md, whose links are relative to the repository, with links that work elsewhere."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r'(!\[[^]]*\]\(|<img src=")(?![a-z]+:|#)', rf"\1{REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?![a-z]+:|#)", rf"\1{REPOSITORY}/blob/main/", text)


ParallelCompile("TIERED_KV_BUILD_JOBS").install()

setup(
    long_description=page_for_pypi(),
    long_description_content_type="text/markdown",
    ext_modules=[
        extension(
            "_cpu",
            # The two that take longest come first, or one core compiles the last one alone.
            "cpu_module.cpp",
            "index/module.cpp",
            "block_layout.cpp",
            "thread_pool.cpp",
            "block_copy_cpu.cpp",
            "file_blocks.cpp",
            "fills.cpp",
            "sha256.cpp",
            "block_keys.cpp",
            "token_reader.cpp",
            "xxh3.cpp",
            "zmq_receiver.cpp",
            "zmq_sender.cpp",
            "get_headers.cpp",
            "index/keys.cpp",
            "index/slot_pool.cpp",
            "index/ghosts.cpp",
            "index/eviction.cpp",
            "index/eviction_lru.cpp",
            "index/eviction_s3fifo.cpp",
            "index/block_index.cpp",
            "index/block_chains.cpp",
            "index/block_leaving.cpp",
            "index/block_check.cpp",
            "index/durable_index.cpp",
        ),
        extension(
            "_cuda",
            "cuda_module.cpp",
            "block_layout.cpp",
            "cuda_handles.cpp",
            "block_copy_cuda.cu",
        ),
    ],
    cmdclass={"build_ext": BuildNative},
)
