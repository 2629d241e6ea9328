"""Runs the tests of the native code with a build of `_cpu` that has gcc's sanitizers.

    python -m tools.sanitize asan      # memory errors and undefined behaviour
    python -m tools.sanitize tsan      # data races
    python -m tools.sanitize tsan --prove

The module is built from a copy of the sources under `build/`; that of the working tree is not
touched. Python itself is not instrumented, so the library of the sanitizer is preloaded. Every
process that the tests start writes its reports to files, and any report is a failure, regardless of
the results of the tests. `--prove` plants faults in the copy and checks that they are reported.
Leak detection is off: the interpreter never frees some of its memory, and it is on the stack of
every leak, so its leaks cannot be distinguished from ours.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.source_copy import PACKAGE, ROOT, copy_sources

# Tests that call the module directly or through copiers, arenas and stores; below, with zmq.
THREADED_TESTS = (
    "tests/unit/test_native_copy.py",
    "tests/unit/test_native_files.py",
    "tests/unit/test_native_fills.py",
    "tests/unit/test_native_get_headers.py",
    "tests/unit/test_native_hashing.py",
    "tests/unit/test_native_lists.py",
    "tests/unit/test_native_memory.py",
    "tests/unit/test_native_threads.py",
    "tests/unit/test_device.py",
    "tests/unit/test_prefault.py",
    "tests/unit/test_key.py",
    "tests/unit/test_index.py",
    "tests/unit/test_durable_index.py",
    "tests/unit/test_eviction.py",
    "tests/unit/test_ghosts.py",
    "tests/unit/test_size_classes.py",
    "tests/unit/test_planner.py",
    "tests/stores/test_contract.py",
    "tests/stores/test_memory_store.py",
)
ZMQ_TESTS = (
    "tests/unit/test_native_zmq_receive.py",
    "tests/unit/test_native_zmq_sender.py",
    "tests/unit/test_remote_worker.py",
    "tests/unit/test_remote_loader.py",
    "tests/remote/test_zero_copy_send.py",
    "tests/remote/test_attachment.py",
    "tests/remote/test_shared_memory.py",
    "tests/daemon/test_shared_memory.py",
)


@dataclass(frozen=True)
class Plant:
    """A fault that does not change test results, and the words with which it must be reported."""

    source: str
    old: str
    new: str
    test: str
    words: str


@dataclass(frozen=True)
class Sanitizer:
    """How to build and run with one sanitizer."""

    flags: str
    libraries: tuple[str, ...]
    options: Mapping[str, str]
    """Environment variables of the run; `{reports}` is the path of the reports."""
    tests: tuple[str, ...]
    plants: tuple[Plant, ...]
    # The shadow memory of TSan does not work with address randomisation.
    fixed_addresses: bool = False


SANITIZERS = {
    "asan": Sanitizer(
        flags="address,undefined",
        libraries=("libasan.so", "libubsan.so"),
        options={
            "ASAN_OPTIONS": "log_path={reports}:detect_leaks=0:detect_stack_use_after_return=1"
            ":allocator_may_return_null=1",
            # Together with ASan, UBSan has no log file: it must end the process to be noticed, even
            # if a test discards the output of the process.
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            # Python's own allocator would hide overruns of bytes objects from ASan.
            "PYTHONMALLOC": "malloc",
        },
        tests=(*THREADED_TESTS, *ZMQ_TESTS),
        plants=(
            Plant(
                "csrc/sha256.cpp",
                "  uint8_t tail[2 * kChunk];\n",
                "  uint8_t tail[2 * kChunk];\n"
                "  if (whole > 0 && *(volatile const uint8_t*)(data + size + 8) == 1) return;\n",
                "tests/unit/test_native_hashing.py::test_sha256_long_messages_match_hashlib",
                "AddressSanitizer: heap-buffer-overflow",
            ),
            Plant(
                "csrc/xxh3.cpp",
                "uint64_t xxh3_64(const uint8_t* data, size_t size) {\n",
                "uint64_t xxh3_64(const uint8_t* data, size_t size) {\n"
                "  static volatile int most;\n"
                "  most = 2147483647;\n"
                "  most = most + 1;\n",
                "tests/unit/test_native_hashing.py::test_xxh3_short_inputs_match_xxhash",
                "runtime error: signed integer overflow",
            ),
        ),
    ),
    "tsan": Sanitizer(
        flags="thread",
        libraries=("libtsan.so",),
        # A test forks on purpose and starts threads in the child.
        options={"TSAN_OPTIONS": "log_path={reports}:history_size=4:die_after_fork=0"},
        # No tests with zmq, as in a daemon: TSan cannot see how its threads, which are not
        # instrumented, synchronise, and would report each message as a race.
        tests=THREADED_TESTS,
        plants=(
            Plant(
                "csrc/block_copy_cpu.cpp",
                "    begin += bytes;\n",
                "    begin += bytes;\n    static int64_t copied = 0;\n    copied += bytes;\n",
                "tests/unit/test_native_threads.py::test_threads_with_all_kinds_of_calls",
                "ThreadSanitizer: data race",
            ),
            Plant(
                "csrc/thread_pool.cpp",
                "const std::shared_ptr<Job> job = std::move(jobs_.front());\n"
                "      jobs_.pop_front();\n      lock.unlock();\n",
                "const std::shared_ptr<Job> job = std::move(jobs_.front());\n"
                "      jobs_.pop_front();\n      lock.unlock();\n"
                "      static int taken = 0;\n"
                "      taken += 1;\n",
                "tests/unit/test_native_threads.py::test_threads_reading_shared_memory",
                "ThreadSanitizer: data race",
            ),
        ),
        fixed_addresses=True,
    ),
}


def library(name: str) -> str:
    """Returns the path of a library that comes with the compiler."""
    compiler = os.environ.get("CXX", "g++").split()
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(
            f"{compiler[0]} comes without {name}; install the sanitizer libraries of gcc"
        )
    return str(Path(found).resolve())


def build(tree: Path, sanitizer: Sanitizer, plants: Sequence[Plant] = ()) -> None:
    copy_sources(tree, compiled=False)
    for plant in plants:
        source = tree / plant.source
        text = source.read_text()
        if text.count(plant.old) != 1:
            raise SystemExit(f"{plant.source} lacks the code that a planted fault replaces")
        source.write_text(text.replace(plant.old, plant.new))
    log = tree.parent / "build.log"
    with log.open("w") as output:
        built = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=tree,
            env={**os.environ, "TIERED_KV_CUDA": "0", "TIERED_KV_SANITIZE": sanitizer.flags},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if built.returncode != 0:
        raise SystemExit(f"the module could not be built\n{log.read_text()}")


def test(tree: Path, sanitizer: Sanitizer, reports: Path, arguments: list[str]) -> int:
    """Runs pytest with the module in `tree`; returns its exit status."""
    preload = " ".join(library(name) for name in sanitizer.libraries)
    options = {key: text.format(reports=reports) for key, text in sanitizer.options.items()}
    prefix = []
    if sanitizer.fixed_addresses:
        prefix = ["setarch", platform.machine(), "--addr-no-randomize"]
    # Captures only the streams of Python, so that reports of native code reach stderr.
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys"]
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": preload,
        # Takes precedence over an installed package, also in processes that the tests start.
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = Path(f"{reports}-stderr")
    with log.open("w") as stderr:
        command = [*prefix, *pytest, *arguments]
        code = subprocess.run(command, cwd=tree, env=environment, stderr=stderr).returncode
    if "runtime error:" not in log.read_text(errors="replace"):
        log.unlink()
    return code


def prove(name: str, sanitizer: Sanitizer) -> int:
    folder = ROOT / "build" / f"{name}-prove"
    reports = folder / "reports"
    print(f"building with {len(sanitizer.plants)} planted faults in {folder}", flush=True)
    build(folder / "tree", sanitizer, sanitizer.plants)
    missed = 0
    for plant in sanitizer.plants:
        shutil.rmtree(reports, ignore_errors=True)
        reports.mkdir()
        test(folder / "tree", sanitizer, reports / "report", ["-q", "--tb=no", plant.test])
        texts = [report.read_text(errors="replace") for report in reports.iterdir()]
        where = plant.source.removeprefix("csrc/")
        found = any(plant.words in text and where in text for text in texts)
        missed += not found
        print(f"{'reported' if found else 'MISSED'}: {plant.words} in {plant.source}", flush=True)
    return 1 if missed else 0


def with_tests(arguments: list[str], sanitizer: Sanitizer) -> list[str]:
    """Adds the tests of this sanitizer to the arguments of pytest, unless tests are named."""
    named = any(word.startswith("tests/") for word in arguments)
    return [*arguments, *(() if named else sanitizer.tests)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument(
        "--prove", action="store_true", help="check that planted faults are reported"
    )
    parser.add_argument("arguments", nargs="*", help="other tests, or options of pytest after --")
    options = parser.parse_args()
    sanitizer = SANITIZERS[options.sanitizer]
    if options.prove:
        return prove(options.sanitizer, sanitizer)
    folder = ROOT / "build" / options.sanitizer
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    tree = folder / "tree"
    print(f"building {PACKAGE} with -fsanitize={sanitizer.flags} in {folder}", flush=True)
    build(tree, sanitizer)
    arguments = with_tests(options.arguments, sanitizer)
    code = test(tree, sanitizer, reports / "report", arguments)
    written = sorted(reports.iterdir())
    for report in written:
        print(f"\n{report.name}:\n{report.read_text(errors='replace')}")
    print(f"{options.sanitizer}: tests ended with status {code}, {len(written)} reports")
    return 1 if code != 0 or written else 0


if __name__ == "__main__":
    sys.exit(main())
