"""Engines of several tensor-parallel sizes use each other's blocks (`portable_shards`).

The halves of the connector are vLLM's to build; here the test builds them for each size, with
tensors as vLLM allocates them, over a real daemon. `test_remote_engines.py` does the same with real
engines of one and two ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.made_configs import engine_config
from tests.models import TINY_MLA, write_config, write_model
from tests.patience import eventually
from tests.remote.daemon_facts import leases_of
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.identity.shard import shards_per_rank
from vllm_tiered_kv.connector.metadata import TieredKVMetadata, TieredKVWorkerMetadata
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookup
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.core.transfer import (
    GroupTransfer,
    LeasedBlocks,
    LoadJob,
    PutJob,
    RemoteTransfer,
    StoreJob,
    int64_array,
)
from vllm_tiered_kv.errors import ConfigError, UnsupportedError
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.store import RemoteStore

pytestmark = pytest.mark.engine

HEADS, SHARDS, BLOCKS, COUNT = 8, 4, 16, 5
FULL = {"block_size": 16, "num_kv_heads": HEADS, "head_size": 32, "dtype": torch.float32}
LAYERS = [["a0", "a1", "a2"], ["w0", "w1", "w2"]]  # full attention, and a window


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, num_attention_heads=HEADS, num_key_value_heads=HEADS)


def sized(config: VllmConfig, size: int) -> VllmConfig:
    config.parallel_config.tensor_parallel_size = size
    config.parallel_config.world_size = size
    return config


def cache_of(config: VllmConfig, size: int, layout: str = "BLHNC") -> KVCacheConfig:
    shape = {**FULL, "num_kv_heads": HEADS // size}
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=32)]
    config.cache_config.kv_cache_layout = layout
    groups = [KVCacheGroupSpec(names, one) for names, one in zip(LAYERS, specs, strict=True)]
    room = len(LAYERS[0]) * specs[0].page_size_bytes * BLOCKS
    cache = get_kv_cache_config_from_groups(config, groups, room)
    cache.kv_cache_layout = layout
    return cache


def chain(group: int) -> list[BlockKey]:
    return [BlockKey(n.to_bytes(16, "little") + bytes([group])) for n in range(1, COUNT + 1)]


def content(group: int, layer: int) -> torch.Tensor:
    """What a layer's blocks hold of all heads."""
    generator = torch.Generator().manual_seed(10 * group + layer)
    return torch.randn((COUNT, HEADS, 16, 64), generator=generator)


class Engine:
    """Both halves of an engine of some size, and the KV caches of its ranks."""

    def __init__(self, model: Path, size: int, remote: str, layout: str) -> None:
        config = sized(engine_config(model), size)
        options = TieredKVConfig.load(
            {
                "cpu_memory": "16MiB",
                "remote": remote,
                "remote_lookup_timeout": 20,
                "portable_shards": SHARDS,
            },
            {},
        )
        cache = cache_of(config, size, layout)
        self.size, self.at = size, remote
        self.half = assembly.make_scheduler_half(options, config, cache)
        self.workers, self.caches = [], []
        for rank in range(size):
            config.parallel_config.rank = rank
            worker = assembly.make_worker_half(options, config, cache)
            tensors = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
            worker.register_kv_caches(tensors, cache)
            self.workers.append(worker)
            self.caches.append(tensors)
        self.step(TieredKVMetadata())
        if remote.startswith("ipc://"):
            regions = [worker._remote.regions for worker in self.workers]
            eventually(lambda: all(one.of(remote) for one in regions))

    def of_rank(self, rank: int, group: int, layer: int) -> torch.Tensor:
        return content(group, layer).chunk(self.size, dim=1)[rank]

    def step(self, metadata: TieredKVMetadata) -> TieredKVWorkerMetadata:
        """Runs the hooks of one step on all ranks, and merges what they report when all ended."""
        metadata.identity = self.half.remote.identity
        merged = TieredKVWorkerMetadata()
        failed = set()
        for worker in self.workers:
            worker.before_forward(metadata)
            worker.start_loads(metadata)
            worker.after_forward()
        left = {n: {job.request_id for job in metadata.loads} for n in range(self.size)}
        end = time.monotonic() + 30
        jobs = [job.job_id for job in metadata.puts]
        while any(left.values()) or any(len(merged.puts.get(n, ())) < self.size for n in jobs):
            assert time.monotonic() < end
            for number, worker in enumerate(self.workers):
                results = worker.results()
                left[number] -= results.finished_recving
                failed |= results.failed_recving
                merged.aggregate(worker.worker_metadata() or TieredKVWorkerMetadata())
                left[number] -= {
                    job.request_id for job in metadata.loads if job.step_load in merged.step_loads
                }
            time.sleep(0.001)
        assert not failed
        return merged

    def store_and_send(self) -> None:
        for group, layers in enumerate(LAYERS):
            blocks, slots = [3, 1, 4, 8, 5], [n + COUNT * group for n in (0, 1, 2, 3, 4)]
            for rank, tensors in enumerate(self.caches):
                for layer, name in enumerate(layers):
                    tensors[name][blocks] = self.of_rank(rank, group, layer)
            transfer = GroupTransfer(group, int64_array(blocks), int64_array(slots))
            self.step(TieredKVMetadata(stores_after=[StoreJob(group, transfer)]))
            keys = chain(group)
            put = PutJob(group, self.at, group, transfer.slots, tuple(keys), (None, *keys[:-1]))
            told = self.step(TieredKVMetadata(puts=[put]))
            assert [report.stored for report in told.puts[group]] == [COUNT] * self.size
            assert not any(report.reason for report in told.puts[group])

    def look_up(self) -> tuple[RemoteLookup, list[LeasedBlocks | None]] | None:
        """A lookup that finds all blocks, leased where the daemon shares its memory. None if the
        daemon grants no lease, as it may, for example while earlier ones are on their way back."""
        lookups, remote = self.half.remote._lookups, self.half.remote
        lookup = lookups.start([chain(0), chain(1)], [0, 0], remote.identity.block_bytes)
        lookup.answer = lookup.future.result(30)
        spans = lookup.answer.spans
        assert [(s[0].start, s[-1].stop) for s in spans] == [(0, COUNT)] * 2
        leased = [lookups.leased(span, list(range(COUNT))) for (span,) in spans]
        if not self.at.startswith("ipc://"):
            assert leased == [None] * len(spans)
        elif None in leased:
            lookup.drop()
            return None
        return lookup, leased

    def load(self, as_step: bool) -> None:
        """Looks all blocks up and loads them, as far as possible as leased by the lookup."""
        lookup, leased = eventually(self.look_up)
        transfers = []
        for group in range(len(LAYERS)):
            blocks = int64_array([9, 10, 2, 12, 7])
            keys = tuple(chain(group))
            transfers.append(RemoteTransfer(group, self.at, blocks, keys, leased[group]))
        for number, transfer in enumerate(transfers):
            # Groups share blocks, so each is checked before the next one is loaded.
            job = LoadJob(f"r{number}", (), (transfer,), 70 + number if as_step else None)
            self.step(TieredKVMetadata(loads=[job]))
            for rank, tensors in enumerate(self.caches):
                for layer, name in enumerate(LAYERS[number]):
                    found = tensors[name][transfer.block_ids.tolist()]
                    assert torch.equal(found, self.of_rank(rank, number, layer)), (rank, name)
        lookup.drop()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.half.shutdown()


@pytest.mark.parametrize(
    ("first", "layout", "transport"),
    [
        (1, "BLHNC", "tcp"),
        (2, "BLHNC", "ipc"),
        (4, "LBNHC", "ipc"),
        (1, "LBHNC", "ipc"),
        (4, "BHLNC", "tcp"),
    ],
)
def test_each_size_finds_the_blocks_of_each_other(
    model: Path, folder: Path, first: int, layout: str, transport: str
) -> None:
    with DaemonProcess(folder, "--memory", "64MiB") as daemon:
        at = daemon.ipc if transport == "ipc" else daemon.endpoint
        engine = Engine(model, first, at, layout)
        engine.store_and_send()
        namespace = engine.half.remote.identity
        engine.close()
        for size in (1, 2, 4):
            engine = Engine(model, size, at, layout)
            assert engine.half.remote.identity == namespace
            engine.load(as_step=False)
            if transport == "ipc":
                engine.load(as_step=True)
                region = engine.workers[0]._remote.regions
                with mock.patch.object(region, "resident", return_value=None):
                    engine.load(as_step=False)  # the worker leases by itself
            assert read_back(engine)
            engine.close()
        anyone = EngineIdentity(bytes(32), (1,), "layout", "test")
        store = RemoteStore(daemon.endpoint, anyone)
        held = store.usage()
        store.close()
        assert held.blocks == 2 * COUNT * SHARDS  # each shard once, whoever sent it
        eventually(lambda: leases_of(daemon) == 0)


def read_back(engine: Engine) -> bool:
    """Whether a verification reads the bytes that the last load of the window group copied."""
    stored = GroupTransfer(1, int64_array([2]), int64_array([0]))
    engine.step(TieredKVMetadata(stores_after=[StoreJob(9, stored)]))
    worker = engine.workers[-1]
    held = bytearray(worker.block_bytes[1])
    is_there = worker._remote.read(engine.at, chain(1)[2], memoryview(held))
    return is_there and held == worker.arena.bytes_at(0, len(held)).tobytes()


def test_block_that_lacks_a_shard_is_a_miss(model: Path, folder: Path) -> None:
    with DaemonProcess(folder, "--memory", "64MiB") as daemon:
        engine = Engine(model, 1, daemon.endpoint, "BLHNC")
        engine.store_and_send()
        worker = engine.workers[0]
        store = worker._remote._cluster.stores[daemon.endpoint]
        assert store.delete([worker._remote._shard.key(chain(0)[3], 2)]) == 1
        lookup = engine.half.remote._lookups.start([chain(0)], [0], [0])
        ((span,),) = lookup.future.result(30).spans
        assert (span.start, span.stop) == (0, 3)
        # A load that was planned before fails as a whole.
        blocks = int64_array([9, 10, 2, 12, 7])
        job = LoadJob("r", (), (RemoteTransfer(0, daemon.endpoint, blocks, tuple(chain(0))),))
        with pytest.raises(AssertionError):
            engine.step(TieredKVMetadata(loads=[job]))
        engine.close()


# ---- which engines share, and which are refused -------------------------------------------------


def namespace_of(config: VllmConfig, cache: KVCacheConfig, shards: int) -> bytes:
    shards_per_rank(shards, config, cache)
    return assembly.fingerprint(config, cache, "", shards).namespace()


def test_number_of_shards_replaces_the_size_in_the_namespace(model: Path) -> None:
    config = engine_config(model)

    def namespaces(shards: int) -> set[bytes]:
        return {
            namespace_of(sized(config, size), cache_of(config, size), shards) for size in (1, 2, 4)
        }

    assert len(namespaces(4)) == len(namespaces(8)) == 1
    assert len(namespaces(0)) == 3
    assert len(namespaces(0) | namespaces(4) | namespaces(8)) == 5


def test_with_mla_every_rank_holds_whole_blocks(tmp_path: Path) -> None:
    config = engine_config(write_config(tmp_path / "model", TINY_MLA))
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32, max_tp_shards=1
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    cache = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(["a"], spec)], 1 << 20)
    namespaces = set()
    for size in (1, 2, 3, 4):
        assert shards_per_rank(2, sized(config, size), cache) == 1
        namespaces.add(namespace_of(config, cache, 2))
    assert len(namespaces) == 1


@pytest.mark.parametrize(
    ("size", "shards", "message"),
    [
        (1, 3, r"portable_shards: must divide the 8 KV heads of this model evenly"),
        (4, 2, r"portable_shards: must be a multiple of the tensor-parallel size, which is 4"),
        (16, 16, r"portable_shards: needs 8 KV heads .* each on one of the 16"),
    ],
)
def test_number_that_does_not_fit_is_refused(
    model: Path, size: int, shards: int, message: str
) -> None:
    config = sized(engine_config(model), size)
    cache = cache_of(config, min(size, HEADS))
    with pytest.raises(ConfigError, match=message):
        shards_per_rank(shards, config, cache)


def test_engines_whose_blocks_cannot_be_divided_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sized(engine_config(model), 1)
    cache = cache_of(config, 1)
    state = MambaSpec(block_size=16, shapes=((3, 8),), dtypes=(torch.float32,))
    cache.kv_cache_groups.append(KVCacheGroupSpec(["s0"], state))
    with pytest.raises(ConfigError, match="portable_shards: is not possible for recurrent layers"):
        shards_per_rank(4, config, cache)
    cache.kv_cache_groups.pop()
    config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="with pipeline or context parallelism; remove it"):
        shards_per_rank(4, config, cache)
    config = sized(config, 2)
    shards_per_rank(4, config, cache_of(config, 2))
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="with pipeline or context parallelism; remove it"):
        shards_per_rank(4, config, cache_of(config, 2))
    config = sized(engine_config(model), 1)
    drafts = mock.Mock(uses_draft_kv_cache=lambda: True)
    with mock.patch.object(config, "speculative_config", drafts):
        with pytest.raises(ConfigError, match="with draft layers"):
            shards_per_rank(4, config, cache)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT"):
        shards_per_rank(4, config, cache)
    assert shards_per_rank(0, config, cache) == 1


def test_tensors_of_another_shape_are_refused(model: Path) -> None:
    config = sized(engine_config(model), 1)
    cache = cache_of(config, 1)
    tensors = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout.BLHNC)
    flat = {name: one.flatten(1, 2) for name, one in tensors.items()}
    with pytest.raises(UnsupportedError, match="whose heads cannot be divided into 4 shards"):
        assembly.WorkerHalf.register_kv_caches(_worker(model), flat, cache)


def _worker(model: Path):
    config = sized(engine_config(model), 1)
    options = TieredKVConfig.load(
        {"cpu_memory": "16MiB", "remote": "tcp://127.0.0.1:1", "portable_shards": SHARDS}, {}
    )
    return assembly.make_worker_half(options, config, cache_of(config, 1))
