"""A real engine on a GPU over a real daemon: its memory mapped and pinned, or over TCP.

A hit in the daemon is compared with vLLM's own hit on the device: tokens, logprobs and KV bytes.
Run `-k ipc` and `-k tcp` apart, as `make gpu-test` does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.daemon.daemon_process import DaemonProcess  # noqa: E402
from tests.engine.real_engine import RealEngine, real_engine  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.gpu.test_engine_gpu import COUNT, PROMPTS  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.core.tiers import Tier  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        with DaemonProcess(Path(folder), "--memory", "8GiB") as process:
            yield process


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def engine(
    request: pytest.FixtureRequest, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    model = write_model(tmp_path_factory.mktemp("models") / "qwen2-7b", **QWEN2_7B)
    remote = daemon.ipc if request.param == "ipc" else daemon.endpoint
    with real_engine(
        model,
        {"cpu_memory": "6GiB", "remote": remote, "remote_lookup_timeout": 5},
        dtype="bfloat16",
        block_size=16,
        max_model_len=16_384,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=None,
        **memory(8),
        enforce_eager=False,
    ) as running:
        running.ask([[7, 8, 9]], 1)
        if request.param == "ipc":
            regions = running.worker_half._remote.regions
            deadline = time.monotonic() + 120
            while not regions.of(remote):
                assert time.monotonic() < deadline, "the daemon's memory was never pinned"
                time.sleep(0.05)
        yield running


def test_hit_in_the_daemon_is_a_device_hit(engine: RealEngine) -> None:
    loaded = 0
    for ids in PROMPTS:
        engine.ask([ids], COUNT)
        (device,) = engine.ask([ids], COUNT)
        settle(engine)
        computed = {n: c for n, c in engine.kv_bytes.items() if len(n) <= len(ids)}
        engine.kv_bytes.clear()
        engine.drop_gpu_cache()
        engine.half.index.clear()  # nothing is left in the CPU tier
        before = engine.total(names.LOADED_BLOCKS, Tier.REMOTE.value)
        (remote,) = engine.ask([ids], COUNT)
        assert remote.cached == device.cached == (len(ids) - 1) // 16 * 16
        blocks = engine.total(names.LOADED_BLOCKS, Tier.REMOTE.value) - before
        assert blocks == remote.cached // 16
        assert (remote.tokens, remote.logprobs) == (device.tokens, device.logprobs)
        prefix = {n: c for n, c in engine.kv_bytes.items() if len(n) <= remote.cached}
        assert len(prefix) == remote.cached // 16
        assert all(content == computed[name] for name, content in prefix.items())
        loaded += len(prefix)
        settle(engine)
        engine.drop_gpu_cache()
    engine.assert_at_rest()
    assert engine.total(names.LOAD_FAILURES) == 0
    print(f"\n{len(PROMPTS)} prompts: {loaded} blocks from the daemon equal to the device's")
