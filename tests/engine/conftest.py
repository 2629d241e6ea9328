"""Engine tests need vLLM; without it they skip with that reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One thread for each engine or rank, wherever there is room. With as many as there are cores, and
# engines of several test processes at once, threads spin for others that have no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# What is loaded must not depend on how fast this machine computes a tiny model. The environment
# wins over other settings, and reaches engines in processes of their own.
os.environ.setdefault("TIERED_KV_LOAD_POLICY", "always")

# They check every answer: what they found should be shown as in a test.
pytest.register_assert_rewrite("tests.engine.toy_asking", "tests.engine.toy_at_daemon")

# Not imported: the process that only hands tests to others would take seconds for it.
if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: run `make test`", allow_module_level=True)


@pytest.fixture(scope="session", autouse=True)
def models_looked_up_in_this_process() -> Iterator[None]:
    """The first time on a machine, vLLM imports a model's class in a fresh process, so as not to
    initialise CUDA. Where there is none, that is ten seconds for each architecture."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():
            patch.setattr(registry, "_run_in_subprocess", lambda look_up: look_up())
        yield


@pytest.fixture(autouse=True)
def own_choice_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes its choice for DeepSeek-V4 one of the whole process: it would reach the engines of
    later tests, which then compile nothing."""
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request: pytest.FixtureRequest) -> bool:
    """vLLM's Scheduler, and its AsyncScheduler with two steps in flight."""
    return bool(request.param)


@pytest.fixture(params=["auto", "never"], ids=["step_loads", "beside_loads"])
def step_loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways a load takes through vLLM: within the request's step, and asynchronously."""
    monkeypatch.setenv("TIERED_KV_STEP_LOADS", request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def truth(tiny_model: Path):
    """What vLLM alone answers, every prompt cold, and the bytes of its KV cache."""
    from tests.engine.oracle import COUNT, PROMPTS
    from tests.engine.real_engine import real_engine

    with real_engine(tiny_model, None) as engine:
        answers = []
        for ids in PROMPTS:
            answers += engine.ask([ids], COUNT)
            engine.drop_gpu_cache()
        return answers, engine.kv_bytes


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights on disk, for engines in several processes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.engine.made_models import draw_weights
    from tests.models import TINY_QWEN2

    folder = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY_QWEN2))
    draw_weights(model)
    model.save_pretrained(folder)
    return folder
