"""GPU tests: one engine at a time in this process, so that a failure is a plain traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# What is loaded must not depend on how fast this GPU computes a short prompt.
os.environ.setdefault("TIERED_KV_LOAD_POLICY", "always")


def pytest_configure() -> None:
    """`make gpu-test` asks for a GPU: without one it fails instead of skipping everything."""
    if os.environ.get("REQUIRE_GPU") == "1":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("REQUIRE_GPU=1, but torch finds no CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM's engines leave too much behind on a GPU to follow each other in one process."""
    if os.environ.get("REQUIRE_GPU") == "1":
        return
    apart = pytest.mark.skip(reason="engines on a GPU want processes of their own: `make gpu-test`")
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.path.stem.startswith("test_cuda"):
            item.add_marker(apart)
