"""Checks csrc with clang-tidy and cppcheck.

    python -m tools.check_native [--fast]

Both tools and the CUDA headers come from PyPI, so neither root nor a CUDA toolkit is needed.
clang-tidy checks all files except the kernels, for which it needs a complete toolkit; cppcheck is
less thorough and checks the kernels too. With `--fast` clang-tidy's analyzer follows fewer paths
through each function, which takes about half the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# Large ones first: what starts last must not keep one core busy alone.
SOURCES = sorted(ROOT.glob("csrc/**/*.cpp"), key=lambda path: (-path.stat().st_size, path))
KERNELS = sorted(ROOT.glob("csrc/*.cu"))

# cppcheck preprocesses without system headers, so the macros that csrc needs are defined here.
CPPCHECK = (
    *("--enable=warning,performance,portability,style", "--inline-suppr", "--quiet"),
    *("--language=c++", "--std=c++17", "--error-exitcode=1"),
    # Readable loops need not become algorithms.
    "--suppress=useStlAlgorithm",
    *("-D__x86_64__", "-D__BYTE_ORDER__=1234", "-D__ORDER_LITTLE_ENDIAN__=1234"),
    *("-DUINT32_MAX=0xffffffffu", "-DINT64_MAX=0x7fffffffffffffffll", "-DINT_MIN=(-2147483648)"),
    *("-DCUDART_VERSION=13000", "-D__global__=", "-D__device__=", "-D__grid_constant__="),
    *("-D__restrict__=", "-D__launch_bounds__(threads)="),
    "-DPYBIND11_MODULE(name,module)=void init_##name(py::module_ module)",
)


# A third of clang's default.
FEWER_PATHS = ("-Xclang", "-analyzer-config", "-Xclang", "max-nodes=75000")


def include_flags() -> list[str]:
    """Returns the include folders as system headers, so that third-party code is not checked."""
    packages = Path(sysconfig.get_paths()["purelib"])
    cuda = [path.parent for path in packages.glob("nvidia/*/include/cuda_runtime_api.h")]
    if not cuda:
        raise SystemExit("CUDA headers not found: install requirements/lint.txt")
    folders = [pybind11.get_include(), sysconfig.get_paths()["include"], str(cuda[0])]
    return [flag for folder in folders for flag in ("-isystem", folder)]


def run(command: Iterable[str]) -> tuple[int, str]:
    done = subprocess.run(
        list(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def clang_tidy(source: Path, flags: list[str]) -> tuple[int, str]:
    compiler = ["-std=c++17", "-Wall", "-Wextra", "-Icsrc", *flags]
    code, output = run([str(BIN / "clang-tidy"), "--quiet", str(source), "--", *compiler])
    # "1234 warnings generated" counts those of headers, which are not shown.
    lines = [line for line in output.splitlines() if not line.endswith(" generated.")]
    return code, "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks csrc with clang-tidy and cppcheck.")
    parser.add_argument("--fast", action="store_true", help="the analyzer follows fewer paths")
    fast = FEWER_PATHS if parser.parse_args().fast else ()
    flags = [*include_flags(), *fast]
    files = [str(path.relative_to(ROOT)) for path in (*SOURCES, *KERNELS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cppcheck = pool.submit(run, [str(BIN / "cppcheck"), *CPPCHECK, *files])
        results = [*pool.map(lambda source: clang_tidy(source, flags), SOURCES)]
        results.append(cppcheck.result())
    for _, output in results:
        if output.strip():
            print(output)
    bad = sum(code != 0 for code, _ in results)
    print(f"clang-tidy: {len(SOURCES)} files, cppcheck: {len(files)} files, with findings: {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
