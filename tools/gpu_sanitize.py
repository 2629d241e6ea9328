"""Runs the tests of the CUDA copies under compute-sanitizer of NVIDIA.

    python -m tools.gpu_sanitize [--sanitizer PATH] [pytest arguments]

`memcheck` finds accesses outside of allocations, `initcheck` reads of uninitialised memory.
`racecheck` and `synccheck` check shared memory and barriers, which the kernels do not use. Only the
kernels of this package are instrumented. Memory written by a kernel of torch is therefore
uninitialised to `initcheck`, so tests copy their bytes from the host.

A sanitizer that checks nothing looks like one that finds nothing: some versions exit with status 0
if their target never ran. Therefore each tool must first report a planted fault, and the tests
count only if the report of pytest says how many passed.

The sanitizer is searched in `--sanitizer`, CUDA_HOME, PATH and the packages of this Python (where
`nvidia-cuda-sanitizer-api` installs it).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from tools.junit import count_passed
from vllm_tiered_kv.native import cuda

ROOT = Path(__file__).resolve().parent.parent
FOUND_ERRORS = 99
TOOLS = ("memcheck", "initcheck")
TESTS = ("tests/gpu/test_cuda_copy.py", "tests/gpu/test_cuda_copier.py")
EXCLUDED = (
    # They query a stream while it sleeps. Instrumented launches may wait for the stream, and so do
    # allocations of torch without its memory pool, see `environment`.
    "stream_waits_for_an_event",
    "store_reads_after_earlier_compute",
    "load_waits_for_the_fence",
    "forward_waits_for_its_early_load",
    "step_waits_for_loads_that_began",
    "settle_waits_for_all_running_copies",
    "store_may_read_what_writers_that_do_not_wait",
    "wait_for_an_earlier_store_does",
    "load_after_a_fence_follows",
    "oldest_of_too_large_a_backlog",
    "channel_reads_shared_memory",
    # It provokes CUDA errors, which end a sanitized context although they are no memory errors.
    "torch_goes_on_after_our_errors",
)
"""Excluded tests, by parts of their names. Other tests cover the same copies."""
READ_AFTER_BATCH = ("staged", "auto", "dma")
"""Also excluded if `initcheck` ignores all but the first copy of a batch."""
BATCH = "batch"


def candidates(named: str | None) -> list[Path]:
    if named is not None:
        return [Path(named)]
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    found = [Path(home, "bin", "compute-sanitizer") for home in homes]
    if on_path := shutil.which("compute-sanitizer"):
        found.append(Path(on_path))
    packages = Path(sysconfig.get_paths()["purelib"])
    return [*found, *packages.glob("nvidia/*/bin/compute-sanitizer")]


def find_sanitizer(named: str | None) -> Path:
    for path in candidates(named):
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise SystemExit(
        "compute-sanitizer not found: install the CUDA toolkit or the package "
        "nvidia-cuda-sanitizer-api (13.4 or newer), or pass its path with --sanitizer"
    )


def command(sanitizer: Path, tool: str) -> list[str]:
    return [
        str(sanitizer),
        *("--tool", tool, "--error-exitcode", str(FOUND_ERRORS)),
        *("--kernel-name", "kernel_substring=copy_kernel"),
        *(("--report-api-errors", "no") if tool == "memcheck" else ()),
        *("--print-limit", "20", "--launch-timeout", "120"),
        sys.executable,
    ]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "REQUIRE_GPU": "1",
        # One allocation per tensor: overruns within a pool of torch would not be detected.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def plant(what: str) -> None:
    """Makes a faulty copy that the tool must report; or with BATCH a correct one, which reads what
    a batch of copies wrote. Runs in its own process, under the sanitizer."""
    block, blocks = 4096, 4
    # For memcheck, claims one block too many; for initcheck the memory is uninitialised.
    claimed = blocks + 1 if what == "memcheck" else blocks
    slots = cuda.DeviceBuffer(
        0, block
    )  # allocated first: the memory after the source must not be allocated
    source = cuda.DeviceBuffer(0, blocks * block)
    stream = cuda.Stream(0)
    layout = cuda.CudaBlockLayout(
        0,
        np.array([source.address], dtype=np.uint64),
        np.array([block], dtype=np.int64),
        np.array([block], dtype=np.int64),
        np.array([0], dtype=np.int64),
        claimed,
    )
    if what == BATCH:
        host = np.zeros(blocks * block, dtype=np.uint8)
        order = np.arange(blocks, dtype=np.int64) * block
        cuda.copy_to_device(
            host.ctypes.data, order[::-1].copy(), source.address, order, block, stream.handle
        )
    ids = np.array([claimed - 1], dtype=np.int64)
    offsets = np.array([0], dtype=np.int64)
    cuda.gather(layout, ids, slots.address, slots.nbytes, offsets, stream.handle)
    stream.synchronize()


def planted(sanitizer: Path, tool: str, what: str) -> tuple[bool, str]:
    """Runs `plant`; returns whether the tool reports it, and the output."""
    done = subprocess.run(
        [*command(sanitizer, tool), "-m", "tools.gpu_sanitize", "--plant", what],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = f"status {done.returncode}:\n{done.stdout}"
    return done.returncode == FOUND_ERRORS and "copy_kernel" in done.stdout, output


def reports_the_planted_fault(sanitizer: Path, tool: str) -> bool:
    reported, output = planted(sanitizer, tool, tool)
    if not reported:
        print(f"{tool} did not report a planted fault, {output}")
    return reported


def excluded(sanitizer: Path, tool: str) -> tuple[str, ...]:
    """Returns parts of the names of tests that this tool cannot run."""
    if tool == "initcheck" and planted(sanitizer, tool, BATCH)[0]:
        print(
            "this initcheck takes memory written by a batch of copies for uninitialised: skipping "
            f"tests named {', '.join(READ_AFTER_BATCH)}, which memcheck runs",
            flush=True,
        )
        return (*EXCLUDED, *READ_AFTER_BATCH)
    return EXCLUDED


def passes(sanitizer: Path, tool: str, arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run(
            [
                *command(sanitizer, tool),
                *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
                *arguments,
            ],
            cwd=ROOT,
            env=environment(),
        ).returncode
        passed = count_passed(report)
    print(f"{tool}: status {code}, {passed} tests passed", flush=True)
    return code == 0 and passed > 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="run only this tool")
    parser.add_argument("--plant", choices=(*TOOLS, BATCH), help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.plant:
        plant(options.plant)
        return 0
    if reason := cuda.why_unavailable():
        raise SystemExit(f"a GPU is needed: {reason}")
    sanitizer = find_sanitizer(options.sanitizer)
    print(f"with {sanitizer}", flush=True)
    # With options alone, pytest would run all tests.
    own = not any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    for tool in options.tool or TOOLS:
        if not reports_the_planted_fault(sanitizer, tool):
            return 1
        chosen = [*TESTS, "-k", f"not ({' or '.join(excluded(sanitizer, tool))})"] if own else []
        if not passes(sanitizer, tool, [*chosen, *arguments]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
