"""`DaemonTier` below vLLM's own tiering manager, over a real daemon."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "vllm.v1.kv_offload.tiering.async_lookup", reason="this vLLM has no such secondary tiers"
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.daemon.daemon_process import DaemonProcess
from vllm_tiered_kv.connector import offloading_tier
from vllm_tiered_kv.errors import ConfigError

BLOCK_BYTES = 8192
CHUNKS = 16
WAIT_S = 60.0
KEYS = [make_offload_key(bytes([n]) * 32, group) for group in range(2) for n in range(4)]
_engines = itertools.count()


class Engine:
    """vLLM's manager of its CPU tier and our tier below it, with the steps of a scheduler."""

    def __init__(self, **tier: Any) -> None:
        tier = {"type": "DaemonTier", "module_path": offloading_tier.__name__, **tier}
        self.config = OffloadingConfig(
            groups=tuple(OffloadingGroupConfig(16, (f"layer {n}",), n) for n in range(2)),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": CHUNKS * BLOCK_BYTES,
                "secondary_tiers": [tier],
            },
            engine_id=f"tier-test-{time.time_ns()}-{next(_engines)}",
            model=OffloadingModelConfig("a/model", "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
        manager = TieringOffloadingSpec(self.config).get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self._numbers = itertools.count()

    @property
    def rows(self) -> Any:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def request(self) -> ReqContext:
        context = ReqContext(f"request {next(self._numbers)}")
        for number, key in enumerate(KEYS):
            context.set_offload_key_position(key, 16 * (number % 4 + 1))
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[OffloadKey], seed: int = 0) -> None:
        """Stores chunks as the GPU would, and waits until no transfer is under way."""
        context = self.request()
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        assert prepared.keys_to_store == list(keys)
        for key, slot in zip(keys, prepared.store_spec.chunk_ids.tolist(), strict=True):
            self.rows[slot] = content(key, seed)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.steps_until(lambda: not self.manager.has_pending_work())

    def load(self, keys: Sequence[OffloadKey], seed: int = 0) -> int:
        """Looks chunks up until vLLM knows, checks the bytes of the hits; returns how many."""
        context = self.request()
        found: list[LookupResult] = []

        def is_known() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found)

        self.steps_until(is_known)
        hits = [key for key, hit in zip(keys, found, strict=True) if hit is LookupResult.HIT]
        if hits:
            slots = self.manager.prepare_load(hits, context).chunk_ids.tolist()  # type: ignore[attr-defined]
            for key, slot in zip(hits, slots, strict=True):
                assert np.array_equal(self.rows[slot], content(key, seed))
            self.manager.complete_load(hits, context)
        self.manager.on_request_finished(context)
        return len(hits)

    def reset(self) -> None:
        self.manager.reset_cache()
        # Since vLLM 0.33 tiers load again once the workers know of the reset.
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def steps_until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < end, "the tier did not end"
            self.step()
            time.sleep(0.002)
        self.step()


def content(key: OffloadKey, seed: int) -> Any:
    return np.random.default_rng([*key, seed]).integers(256, size=BLOCK_BYTES, dtype=np.uint8)


Open = Callable[..., Engine]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--memory", "128MiB") as running:
        yield running


@pytest.fixture
def start(daemon: DaemonProcess) -> Iterator[Open]:
    engines: list[Engine] = []

    def start_one(**tier: Any) -> Engine:
        engines.append(Engine(**{"servers": daemon.ipc, "namespace": "weights 1", **tier}))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.manager.shutdown()


def test_another_engine_loads_what_one_stored(start: Open) -> None:
    start().store(KEYS)
    other = start()
    assert other.load(KEYS) == len(KEYS)
    missing = make_offload_key(b"x" * 32, 0)
    assert other.load([*KEYS, missing]) == len(KEYS)


def test_namespaces_and_groups_keep_chunks_apart(start: Open) -> None:
    start().store(KEYS[:4])
    assert start(namespace="weights 2").load(KEYS) == 0
    assert start().load(KEYS) == 4


def test_several_daemons_share_the_chunks(
    start: Open, daemon: DaemonProcess, tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    with DaemonProcess(tmp_path / "b", "--memory", "128MiB") as second:
        both = [daemon.ipc, second.endpoint]
        start(servers=both).store(KEYS)
        assert start(servers=both).load(KEYS) == len(KEYS)
        held = [start(servers=server).load(KEYS) for server in both]
        assert sum(held) == len(KEYS)
        assert all(held)


def test_reset_engine_does_not_find_what_it_stored_before(start: Open) -> None:
    """vLLM resets its cache when it gets other weights, and leaves its tiers as they are."""
    engine = start()
    engine.store(KEYS)
    engine.reset()
    assert engine.load(KEYS) == 0
    engine.store(KEYS, seed=1)
    assert start().load(KEYS) == len(KEYS), "others keep the old weights"
    engine.manager.primary_tier.reset_cache()
    assert engine.load(KEYS, seed=1) == len(KEYS)


def test_absent_daemon_is_a_miss(start: Open, daemon: DaemonProcess) -> None:
    engine = start(timeout=1.0)
    daemon.kill()
    engine.store(KEYS)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(KEYS) == 0


def test_daemon_that_dies_between_lookup_and_load_is_a_miss(
    start: Open, daemon: DaemonProcess
) -> None:
    start().store(KEYS)
    engine = start(timeout=1.0)
    context = engine.request()
    tier = engine.manager.secondary_tiers[0]
    engine.steps_until(lambda: all(tier.lookup(key, context) is LookupResult.HIT for key in KEYS))
    daemon.kill()
    assert engine.load(KEYS) == 0
    engine.manager.on_request_finished(context)


def test_chunk_lost_between_lookup_and_load_keeps_the_others(start: Open) -> None:
    start().store(KEYS)
    engine = start()
    context = engine.request()
    tier: Any = engine.manager.secondary_tiers[0]
    engine.steps_until(lambda: all(tier.lookup(key, context) is LookupResult.HIT for key in KEYS))
    (server,) = tier._cluster.stores.values()
    assert server.delete(tier._store_keys([KEYS[5]])) == 1
    assert engine.load(KEYS) == len(KEYS) - 1
    engine.manager.on_request_finished(context)


def test_chunks_of_a_sequence_know_their_parents(
    start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    tier: Any = engine.manager.secondary_tiers[0]
    (server,) = tier._cluster.stores.values()
    items: list[Any] = []
    put = server.put
    monkeypatch.setattr(server, "put", lambda given: items.extend(given) or put(given))
    engine.store(KEYS[::-1])
    ours = tier._store_keys(KEYS)
    expected = [None, *ours[:3], None, *ours[4:7]]
    assert {item.key: item.parent for item in items} == dict(zip(ours, expected, strict=True))
    assert [item.key for item in items] == ours, "heads first"


def test_shutdown_lets_vllm_unmap_its_memory(start: Open, caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    engine.store(KEYS)
    engine.manager.primary_tier.reset_cache()
    assert engine.load(KEYS) == len(KEYS)
    region = engine.manager.primary_tier._mmap_region
    mapped = region.mmap_obj
    engine.manager.shutdown()
    assert mapped.closed, caplog.text
    engine.manager.shutdown = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"namespace": ""}, "namespace"),
        ({"servers": "http://host"}, "remote"),
        ({"client_key": "a.key_secret"}, "client_key"),
    ],
)
def test_wrong_options_stop_the_engine(start: Open, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        start(**options)
    assert raised.value.key == key
