"""Runs the tests that need an NVIDIA GPU, several processes at a time.

    python -m tools.gpu_tests [--at-once N] [--only WORDS] [pytest arguments]

vLLM's engines leave too much behind on a GPU to follow each other in one process, so each group of
tests has one of its own. Their engines take a stated share of the device: some fit beside each
other. A failure prints all that its process said.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tools.junit import count_passed

ROOT = Path(__file__).resolve().parent.parent
ALONE = (  # others would blur the one and starve beside the other
    ("pinned memory", "tests/gpu/test_pinned_memory_gpu.py"),
    ("most of the memory", "tests/gpu/test_memory_share_gpu.py"),
)
GROUPS = (  # those that take longest first: each engine starts for a minute
    ("windows", "tests/gpu/test_windows_gpu.py"),
    ("models", "tests/gpu/test_models_gpu.py"),
    ("engine, async scheduling", "tests/gpu/test_engine_gpu.py", "-k", "async_on"),
    ("engine, plain scheduling", "tests/gpu/test_engine_gpu.py", "-k", "async_off"),
    ("verified hits", "tests/gpu/test_verified_gpu.py"),
    ("partial tails", "tests/gpu/test_tails_gpu.py"),
    ("daemon over ipc", "tests/gpu/test_remote_gpu.py", "-k", "ipc"),
    ("daemon over tcp", "tests/gpu/test_remote_gpu.py", "-k", "tcp"),
    ("copies", "tests/gpu/test_cuda_copy.py", "tests/gpu/test_cuda_copier.py"),
    ("graph captures", "tests/gpu/test_cuda_capture.py"),
)


def run(group: tuple[str, ...], arguments: list[str]) -> tuple[bool, str]:
    """Whether all tests of the group passed, and what to say of it."""
    name, *tests = group
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")  # engines go on writing after pytest's last line
        flags = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *tests, *arguments],
            cwd=ROOT,
            env={**os.environ, "REQUIRE_GPU": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        passed = count_passed(report)
    good = done.returncode == 0 and passed > 0
    told = f"{name}, {time.monotonic() - begin:.0f} s: status {done.returncode}, {passed} passed"
    return good, told if good else f"{done.stdout}\n{told}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=3, help="processes (3)")
    parser.add_argument("--only", default="", help="groups whose names hold one of these words")
    options, arguments = parser.parse_known_args()
    good = True
    words = options.only.split(",")
    chosen = {name for name, *_ in (*ALONE, *GROUPS) if any(word in name for word in words)}
    for all_groups, at_once in ((ALONE, 1), (GROUPS, options.at_once)):
        groups = [group for group in all_groups if group[0] in chosen]
        with ThreadPoolExecutor(at_once) as threads:
            for group in as_completed(threads.submit(run, group, arguments) for group in groups):
                passed, told = group.result()
                good = good and passed
                print(told, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
