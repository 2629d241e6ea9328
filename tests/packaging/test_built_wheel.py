"""What `make wheel` makes: its tag is true, and it runs an engine where nothing can be compiled."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.models import write_model
from tests.packaging.test_wheel import PACKAGE, _cannot, call, export, names_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|nvcc|ptxas)(-[\d.]+)?")
HAS_NVCC = shutil.which("nvcc") is not None


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("built")
    tree = export(base / "tree")
    try:
        call(
            *("make", "wheel", f"PYTHON={sys.executable}"),
            cwd=tree,
            TIERED_KV_CUDA="1" if HAS_NVCC else "0",
            TIERED_KV_CUDA_ARCHS="90",  # one is enough here, and saves a minute
        )
    except AssertionError as failed:
        if re.search(r"No matching distribution found|Could not fetch URL", str(failed)):
            _cannot(f"the tools of the build cannot be downloaded: {str(failed)[-300:]}")
        raise
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_one_command_makes_an_archive_and_a_wheel_with_both_modules(
    dist: Path, wheel: Path
) -> None:
    assert len(list(dist.glob("*.tar.gz"))) == 1
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = {f"{PACKAGE}/native/_cpu{suffix}"}
    if HAS_NVCC:
        modules.add(f"{PACKAGE}/native/_cuda{suffix}")
    assert {name for name in names_of(wheel) if ".so" in name} == modules


def test_tag_promises_no_older_c_library_than_the_modules_need(wheel: Path) -> None:
    """The tag is auditwheel's; what the modules need is read from their symbol versions here."""
    tag = re.search(r"-manylinux_(\d+)_(\d+)_x86_64\.whl$", wheel.name)
    assert tag is not None, wheel.name
    promised = (int(tag[1]), int(tag[2]))
    with zipfile.ZipFile(wheel) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist() if ".so" in name)
    needed = {
        (int(major), int(minor))
        for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", content)
    }
    assert needed
    assert max(needed) <= promised


def without_compilers(folder: Path) -> str:
    """A PATH with all programs of this machine but those that compile."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not COMPILERS.fullmatch(program.name) and not os.path.lexists(link):
                link.symlink_to(program)
    return str(folder)


def test_engine_runs_from_the_wheel_where_nothing_can_be_compiled(
    wheel: Path, tmp_path: Path
) -> None:
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test`")
    path = without_compilers(tmp_path / "path")
    model = write_model(tmp_path / "model")
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True, symlinks=True)
    python = fresh / "bin" / "python"
    (site,) = fresh.glob("lib/python*/site-packages")
    call(
        *(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel),
        cwd=tmp_path,
        PATH=path,
    )
    # vLLM and what it brings, but no `.pth` of that environment: this package is not editable here.
    (site / "vllm.pth").write_text(f"{Path(vllm.__file__).parents[1]}\n")
    printed = call(
        *(python, "-I", "-c", ENGINE, str(model)),
        cwd=tmp_path,
        PATH=f"{fresh / 'bin'}{os.pathsep}{path}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
    )
    place, cuda, cached = printed.strip().splitlines()[-3:]
    assert Path(place).is_relative_to(site)
    assert cuda.startswith("runtime " if HAS_NVCC else "the CUDA module was not built")
    assert int(cached) == 64


ENGINE = """
import shutil, sys
import vllm_tiered_kv
from vllm import LLM, SamplingParams
from vllm_tiered_kv.errors import NoDeviceError
from vllm_tiered_kv.native import cuda

assert not [name for name in ("gcc", "cc", "g++", "c++", "nvcc") if shutil.which(name)]
llm = LLM(
    sys.argv[1], load_format="dummy", dtype="float32", seed=0, block_size=32, max_model_len=256,
    num_gpu_blocks_override=64, enforce_eager=True, skip_tokenizer_init=True,
    kv_transfer_config={
        "kv_connector": "TieredKVConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_memory": "16MiB", "load_policy": "always"},
    },
)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ask = lambda: llm.generate({"prompt_token_ids": list(range(3, 83))}, params, use_tqdm=False)[0]
first = ask()
while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
    llm.llm_engine.engine_core.engine_core.step()
assert llm.reset_prefix_cache()
second = ask()
assert first.outputs[0].token_ids == second.outputs[0].token_ids
print(vllm_tiered_kv.__file__)
try:
    print("runtime", cuda.RUNTIME_VERSION)
except NoDeviceError as reason:
    print(reason)
print(second.num_cached_tokens, flush=True)
"""
