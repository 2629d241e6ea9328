"""Who closes the descriptor of memory that ranks share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.engine.delayed_copier import LAYERS
from tests.engine.toy_engine import ToyEngine
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector.identity.shard import holding_of
from vllm_tiered_kv.connector.worker.worker_half import StepFacts, WorkerHalf
from vllm_tiered_kv.errors import ConfigError, UnsupportedError


@pytest.fixture
def toy(tiny_model: Path) -> ToyEngine:
    return ToyEngine(tiny_model)


def open_half(toy: ToyEngine, fd: int | None) -> WorkerHalf:
    config = TieredKVConfig.load({}, {})
    geometry = toy.half.index.geometry
    return WorkerHalf(config, geometry, 1, holding_of(1, 2, 2), StepFacts(), shared_fd=fd)


def shared_memory(toy: ToyEngine) -> int:
    fd = os.memfd_create("shared")
    os.ftruncate(fd, toy.half.index.geometry.capacity_bytes)
    return fd


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def caches(channels: int = 4) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(64, channels, dtype=torch.int64) for name in LAYERS}


def test_descriptor_is_closed_once_mapped_and_copies_are_divided(toy: ToyEngine) -> None:
    fd = shared_memory(toy)
    half = open_half(toy, fd)
    half.register_kv_caches(caches(), toy.kv_cache_config)
    assert not is_open(fd)
    assert half.arena is not None
    assert half.arena.nbytes == toy.half.index.geometry.capacity_bytes
    assert half._striping._replica == 1
    half.shutdown()
    half.shutdown()
    assert half._striping._replica == 0  # whoever opens it again has an arena of its own


def test_descriptor_is_closed_without_a_registration(toy: ToyEngine) -> None:
    fd = shared_memory(toy)
    half = open_half(toy, fd)
    half.shutdown()
    assert not is_open(fd)
    half.shutdown()


def test_descriptor_is_closed_after_a_failed_registration(toy: ToyEngine) -> None:
    fd = shared_memory(toy)
    half = open_half(toy, fd)
    with pytest.raises(UnsupportedError):
        half.register_kv_caches(caches(channels=8), toy.kv_cache_config)
    half.shutdown()
    assert not is_open(fd)


def test_memory_that_cannot_be_mapped_leaves_nothing_shared(
    toy: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = shared_memory(toy)
    half = open_half(toy, fd)
    monkeypatch.setattr("vllm_tiered_kv.device.arena.memory_limit", lambda: 1)
    with pytest.raises(ConfigError, match="cpu_memory"):
        half.register_kv_caches(caches(), toy.kv_cache_config)
    assert not is_open(fd)
    assert half._striping._replica == 0
    half.shutdown()


def test_rank_without_shared_memory_has_its_part_and_copies_all(toy: ToyEngine) -> None:
    half = open_half(toy, None)
    half.register_kv_caches(caches(), toy.kv_cache_config)
    assert half.arena is not None
    assert half.arena.nbytes == toy.half.index.geometry.capacity_bytes // 2
    assert half._striping._replica == 0
    half.shutdown()
