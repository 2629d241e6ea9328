"""Runs the tests that need an NVIDIA GPU, several processes at a time.

    python -m tools.gpu_tests [--at-once N] [--only WORDS] [pytest arguments]

An engine of vLLM does not release all GPU memory, so each group of tests runs in its own process.
The engines use a fixed share of the device, so several of them run in parallel. A failure prints
the whole output of its process.
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
ALONE = (  # two of them depend on time, one takes most of the memory
    ("pinned memory", "tests/gpu/test_pinned_memory_gpu.py"),
    ("copies", "tests/gpu/test_cuda_copy.py", "tests/gpu/test_cuda_copier.py"),
    ("most of the memory", "tests/gpu/test_memory_share_gpu.py"),
)
GROUPS = (  # longest first; each engine takes a minute to start
    ("windows", "tests/gpu/test_windows_gpu.py"),
    ("windows over latent KV", "tests/gpu/test_latent_windows_gpu.py"),
    ("models", "tests/gpu/test_models_gpu.py", "-k", "not drafts"),
    ("drafts", "tests/gpu/test_models_gpu.py", "-k", "drafts"),
    *(
        (f"recurrent layers of {name}", "tests/gpu/test_recurrent_gpu.py", "-k", name)
        for name in ("qwen3_next", "granite", "nemotron_h", "jamba")
    ),
    *(
        (f"recurrent drafts, {name}", "tests/gpu/test_recurrent_drafts_gpu.py", "-k", name)
        for name in ("mtp_runner_2", "mtp_runner_1", "mamba_2_ngram")
    ),
    *(
        (f"{kind} context parallelism", "tests/gpu/test_context_parallel_gpu.py", "-k", kind)
        for kind in ("decode", "prefill")
    ),
    ("engine, async scheduling", "tests/gpu/test_engine_gpu.py", "-k", "async_on"),
    ("engine, plain scheduling", "tests/gpu/test_engine_gpu.py", "-k", "async_off"),
    ("verified hits", "tests/gpu/test_verified_gpu.py"),
    ("partial tails", "tests/gpu/test_tails_gpu.py"),
    ("compute once", "tests/gpu/test_compute_once_gpu.py"),
    ("daemon over ipc", "tests/gpu/test_remote_gpu.py", "-k", "ipc"),
    ("daemon over tcp", "tests/gpu/test_remote_gpu.py", "-k", "tcp"),
    ("tier of OffloadingConnector", "tests/gpu/test_offloading_tier_gpu.py"),
    ("graph captures", "tests/gpu/test_cuda_capture.py"),
)


def run(group: tuple[str, ...], arguments: list[str]) -> tuple[bool, str]:
    """Runs a group; returns whether all its tests passed, and what to print."""
    name, *tests = group
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")  # engines write to stdout after the last line of pytest
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
    summary = f"{name}, {time.monotonic() - begin:.0f} s: status {done.returncode}, {passed} passed"
    return good, summary if good else f"{done.stdout}\n{summary}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=3, help="number of parallel processes (3)")
    parser.add_argument(
        "--only",
        default="",
        help="only groups whose name contains one of these words, separated by commas",
    )
    options, arguments = parser.parse_known_args()
    good = True
    words = options.only.split(",")
    chosen = {name for name, *_ in (*ALONE, *GROUPS) if any(word in name for word in words)}
    for all_groups, at_once in ((ALONE, 1), (GROUPS, options.at_once)):
        groups = [group for group in all_groups if group[0] in chosen]
        with ThreadPoolExecutor(at_once) as threads:
            for group in as_completed(threads.submit(run, group, arguments) for group in groups):
                passed, output = group.result()
                good = good and passed
                print(output, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
