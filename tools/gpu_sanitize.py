"""Runs the tests of the CUDA copies under NVIDIA's compute-sanitizer.

    python -m tools.gpu_sanitize [--sanitizer PATH] [pytest arguments]

`memcheck` finds accesses outside an allocation, `initcheck` reads of memory that nobody wrote.
`racecheck` and `synccheck` look at shared memory and barriers, and the kernels use neither. Only
the package's own kernels are instrumented: to `initcheck`, what a kernel of torch wrote was written
by nobody, so tests bring their bytes from the host.

A sanitizer that checks nothing looks like one that finds nothing: some versions end with status 0
when their target never ran. So each tool first has to report a fault that is planted here, and the
tests count only with a report of pytest that says how many passed.

The sanitizer is looked for in `--sanitizer`, CUDA_HOME, PATH and beside this Python (where the
package `nvidia-cuda-sanitizer-api` puts it).
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
LEFT_OUT = (
    # They ask how far a stream has come while it sleeps. Instrumented launches may wait for it, and
    # so does every allocation of a torch that keeps no pool, see `surroundings`.
    "a_stream_waits_for_an_event",
    "a_store_reads_after_earlier_compute",
    "a_load_waits_for_the_fence",
    "the_forward_waits_for_what_is_loaded",
    "a_step_waits_for_what_began",
    "all_that_was_under_way",
    "a_store_may_read_what_is_written",
    "who_waits_for_an_earlier_store",
    "a_load_behind_a_fence",
    "the_oldest_of_too_large_a_backlog",
    "a_channel_reads_shared_memory",
    # It provokes CUDA errors, which are not memory errors but end a sanitized context.
    "torch_goes_on_after_our_errors",
)
"""Parts of the names of tests, whose copies others do as well."""
READ_WHAT_A_BATCH_BROUGHT = ("staged", "auto", "dma", "what_was_measured_is_remembered")
"""The same, for an `initcheck` to which batches of copies write nothing behind their first one."""
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
        "no compute-sanitizer: it is part of the CUDA toolkit and of the package "
        "nvidia-cuda-sanitizer-api, from 13.4 on; or name one by --sanitizer"
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


def surroundings() -> dict[str, str]:
    return {
        **os.environ,
        "REQUIRE_GPU": "1",
        # One allocation per tensor: an overrun within a pool of torch would not be seen.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def plant(what: str) -> None:
    """A copy that the tool must report; or one that it must not, which reads what a batch of copies
    has brought. Runs in a process of its own, under the sanitizer."""
    block, blocks = 4096, 4
    # Claims one block more than there is; for initcheck the memory is long enough, but never set.
    claimed = blocks + 1 if what == "memcheck" else blocks
    slots = cuda.DeviceBuffer(0, block)  # first: what follows the source must be nobody's
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
        brought = np.zeros(blocks * block, dtype=np.uint8)
        order = np.arange(blocks, dtype=np.int64) * block
        cuda.copy_to_device(
            brought.ctypes.data, order[::-1].copy(), source.address, order, block, stream.handle
        )
    ids = np.array([claimed - 1], dtype=np.int64)
    offsets = np.array([0], dtype=np.int64)
    cuda.gather(layout, ids, slots.address, slots.nbytes, offsets, stream.handle)
    stream.synchronize()


def planted(sanitizer: Path, tool: str, what: str) -> tuple[bool, str]:
    """Whether the tool reports it, and what was said."""
    done = subprocess.run(
        [*command(sanitizer, tool), "-m", "tools.gpu_sanitize", "--plant", what],
        cwd=ROOT,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    told = f"status {done.returncode}:\n{done.stdout}"
    return done.returncode == FOUND_ERRORS and "copy_kernel" in done.stdout, told


def reports_the_planted_fault(sanitizer: Path, tool: str) -> bool:
    reported, told = planted(sanitizer, tool, tool)
    if not reported:
        print(f"{tool} did not report a planted fault, {told}")
    return reported


def left_out(sanitizer: Path, tool: str) -> tuple[str, ...]:
    """Parts of the names of tests this tool cannot run."""
    if tool == "initcheck" and planted(sanitizer, tool, BATCH)[0]:
        print(
            "this initcheck takes what a batch of copies brings for memory that nobody wrote: "
            f"without tests named {', '.join(READ_WHAT_A_BATCH_BROUGHT)}, which memcheck runs",
            flush=True,
        )
        return (*LEFT_OUT, *READ_WHAT_A_BATCH_BROUGHT)
    return LEFT_OUT


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
            env=surroundings(),
        ).returncode
        passed = count_passed(report)
    print(f"{tool}: status {code}, {passed} tests passed", flush=True)
    return code == 0 and passed > 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--plant", choices=(*TOOLS, BATCH), help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.plant:
        plant(options.plant)
        return 0
    if reason := cuda.why_unavailable():
        raise SystemExit(f"a GPU is needed: {reason}")
    sanitizer = find_sanitizer(options.sanitizer)
    print(f"with {sanitizer}", flush=True)
    # Flags alone: without tests, pytest would take all there are.
    own = not any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    for tool in options.tool or TOOLS:
        if not reports_the_planted_fault(sanitizer, tool):
            return 1
        chosen = [*TESTS, "-k", f"not ({' or '.join(left_out(sanitizer, tool))})"] if own else []
        if not passes(sanitizer, tool, [*chosen, *arguments]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
