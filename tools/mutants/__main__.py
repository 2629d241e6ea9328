"""Breaks the code in one place after another and sees that the tests named for it fail.

    python -m tools.mutants            # all
    python -m tools.mutants salt pin   # those with one of these in their name or path
    python -m tools.mutants --list

Works on copies of the sources under `build/`; the working tree stays as it is. The tests must pass
on the unbroken copy first. A mutation that no test notices has *survived*: a test is missing. One
whose tests cannot even be collected proves nothing and counts as broken. Only tests of `make test`
count: those marked slow are left out, and hypothesis tries as few examples as there.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.mutants.mutation import Mutation, Needs
from tools.mutants.native_build import build_anew
from tools.mutants.table import MUTATIONS
from tools.source_copy import ROOT, copy_sources

FOLDER = ROOT / "build" / "mutants"
LIMIT_S = 300.0  # a mutant that hangs is one that was noticed
TEST_LIMIT_S = 180  # the same, with a better message

PYTEST_PASSED, PYTEST_FAILED = 0, 1
AS_MAKE_TEST = ("-m", "not slow", "--hypothesis-profile=landing")


class Outcome(enum.Enum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    BROKEN = "BROKEN"


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """Status of pytest, None if it took too long; and what it said."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *(*AS_MAKE_TEST, f"--timeout={TEST_LIMIT_S}", "--tb=line", "-W", "ignore", *tests),
    ]
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(tree),  # also for processes that the tests start
        "PYTHONDONTWRITEBYTECODE": "1",  # else a change within a second might go unseen
    }
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # daemons that a failed test left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge(status: int | None) -> Outcome:
    if status == PYTEST_PASSED:
        return Outcome.SURVIVED
    if status is None or status == PYTEST_FAILED or status < 0:
        return Outcome.KILLED
    return Outcome.BROKEN


class Trees:
    """Copies of the sources, one for each worker."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            tree = FOLDER / f"tree-{number}"
            copy_sources(tree, compiled=True)
            self._free.put(tree)

    @contextlib.contextmanager
    def one(self) -> Iterator[Path]:
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


def try_mutation(mutation: Mutation, trees: Trees) -> tuple[Mutation, Outcome, str]:
    began = time.monotonic()
    with trees.one() as tree:
        text = mutation.apply(tree)
        try:
            with build_anew(tree) if mutation.is_native else contextlib.nullcontext():
                status, output = run_tests(tree, mutation.tests)
        finally:
            mutation.restore(tree, text)
    outcome = judge(status)
    seconds = time.monotonic() - began
    print(f"{outcome.value:9} {mutation.name}  ({mutation.path}, {seconds:.0f} s)", flush=True)
    return mutation, outcome, output


def unbroken_tests_pass(mutations: Sequence[Mutation], trees: Trees) -> bool:
    """File by file: vLLM changes much of a process that imports it, and all tests at once take
    longer than those of any mutant may."""
    tests_of: dict[str, set[str]] = {}
    for test in {test for mutation in mutations for test in mutation.tests}:
        tests_of.setdefault(test.partition("::")[0], set()).add(test)
    for file in sorted(tests_of):
        with trees.one() as tree:
            status, output = run_tests(tree, sorted(tests_of[file]))
        if status is None:  # and so might those of a mutant, which would count as noticed
            print(f"{file}: its tests take more than {LIMIT_S:g} s on unbroken code")
            print("nothing can be learnt from mutants here: is the machine busy, or the limit low?")
            return False
        if status != PYTEST_PASSED:
            print(output)
            print("the tests do not pass on unbroken code: nothing can be learnt from mutants")
            return False
    return True


def chosen(words: Sequence[str], with_vllm: bool) -> list[Mutation]:
    return [
        mutation
        for mutation in MUTATIONS
        if (with_vllm or mutation.needs is not Needs.VLLM)
        and (not words or any(word in f"{mutation.name} {mutation.path}" for word in words))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only mutations with one of these in name or path")
    parser.add_argument("--list", action="store_true", help="show them and do nothing")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--without-vllm", action="store_true", help="leave out what needs it")
    parser.add_argument("--trust", action="store_true", help="do not run the tests unbroken first")
    options = parser.parse_args()
    mutations = chosen(options.words, not options.without_vllm)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}\n    {mutation.path}: {mutation.harm}")
        return 0
    if not mutations:
        raise SystemExit("no mutation has such a name")
    if any(m.needs is Needs.VLLM for m in mutations) and not importlib.util.find_spec("vllm"):
        raise SystemExit("vLLM is not installed here: `make mutants` has it")
    trees = Trees(options.jobs)
    if not options.trust and not unbroken_tests_pass(mutations, trees):
        return 1
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda mutation: try_mutation(mutation, trees), mutations))
    bad = [result for result in results if result[1] is not Outcome.KILLED]
    for mutation, outcome, output in bad:
        print(f"\n{outcome.value}: {mutation.name} ({mutation.path})\n  {mutation.harm}")
        if outcome is Outcome.BROKEN:
            print(output)
    killed = len(results) - len(bad)
    print(f"\n{killed} of {len(results)} killed in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
