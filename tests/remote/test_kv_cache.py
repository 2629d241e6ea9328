"""KVCache, vineyard's interface, over a real daemon and over a real folder."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.daemon.daemon_process import DaemonProcess
from tests.remote.token_states import states
from vllm_tiered_kv.api import FileCacheConfig, KVCache, KVTensor, MemoryCacheConfig, kv_cache
from vllm_tiered_kv.errors import ConfigError, TokenCacheError
from vllm_tiered_kv.stores.block_format import HEADER_BYTES

LAYERS, TENSOR_BYTES = 3, 16
TOKEN_BYTES = LAYERS * 2 * TENSOR_BYTES
TOKENS = [7, 0, 2**32 - 1, 5, 5, 5, 11, 90_000]
_names = map("cache {}".format, itertools.count())

Open = Callable[..., KVCache]
Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("d"), "--memory", "128MiB") as running:
        yield running


@pytest.fixture(params=["folder", "daemon"])
def open_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens caches, of one namespace within a test, and closes them after it."""
    opened: list[KVCache] = []
    namespace = next(_names)

    def open_one(chunk_size: int = 2, **more: Any) -> KVCache:
        names = {"namespace": more.pop("namespace", namespace), "chunk_size": chunk_size}
        config: FileCacheConfig | MemoryCacheConfig
        if request.param == "folder":
            config = FileCacheConfig(root=tmp_path / "a" / "folder", **names)
        else:
            address = request.getfixturevalue("daemon").ipc
            config = MemoryCacheConfig(servers=address, timeout=20, connect_timeout=10, **names)
        opened.append(KVCache(config, **{"tensor_nbytes": TENSOR_BYTES, "layer": LAYERS, **more}))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache: Open) -> KVCache:
    return open_cache()


@pytest.fixture
def folder_cache(tmp_path: Path) -> Iterator[KVCache]:
    config = FileCacheConfig(root=tmp_path / "kv", namespace="one", chunk_size=2, strict=True)
    with KVCache(config, TENSOR_BYTES, layer=LAYERS) as cache:
        yield cache


def scattered(tokens: int) -> list[list[tuple[Bytes, Bytes]]]:
    """Memory for so many tokens that is in no order."""
    rows = np.zeros((tokens * LAYERS * 2, 2, TENSOR_BYTES), np.uint8)[:, 0]
    order = np.random.default_rng(0).permutation(len(rows)).reshape(tokens, LAYERS, 2)
    return [[(rows[k], rows[v]) for k, v in layers] for layers in order.tolist()]


def adjacent(tokens: int) -> list[list[tuple[Bytes, Bytes]]]:
    rows = np.zeros((tokens, LAYERS, 2, TENSOR_BYTES), np.uint8)
    return [[(k, v) for k, v in layers] for layers in rows]


def pointers(memory: Sequence[Sequence[tuple[Bytes, Bytes]]]) -> list[Any]:
    return [[(KVTensor.of(k), KVTensor.of(v)) for k, v in layers] for layers in memory]


def fill(memory: Sequence[Sequence[tuple[Any, Any]]], prefix: list[int], tokens: list[int]) -> None:
    of_tokens = states(prefix, tokens, TOKEN_BYTES).reshape(-1, LAYERS, 2, TENSOR_BYTES)
    for layers, given in zip(memory, of_tokens, strict=True):
        for (k, v), (keys, values) in zip(layers, given, strict=True):
            k[:], v[:] = keys, values


def content(memory: Sequence[Sequence[tuple[Any, Any]]]) -> Bytes:
    tensors = [
        np.frombuffer(tensor, np.uint8) for layers in memory for pair in layers for tensor in pair
    ]
    return np.concatenate(tensors).reshape(len(memory), TOKEN_BYTES)


def store(cache: KVCache, tokens: list[int], prefix: list[int] | None = None) -> int:
    memory = scattered(len(tokens))
    fill(memory, prefix or [], tokens)
    return cache.update(prefix, tokens, pointers(memory))


def read(cache: KVCache, tokens: list[int], prefix: list[int] | None = None) -> int:
    """Like `query`, but fails if the states are not those of these tokens."""
    memory = scattered(len(tokens))
    count = cache.query(prefix, tokens, pointers(memory))
    assert np.array_equal(
        content(memory[:count]) if count else np.empty((0, TOKEN_BYTES), np.uint8),
        states(prefix or [], tokens[:count], TOKEN_BYTES),
    )
    return count


# ---- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [scattered, adjacent])
@pytest.mark.parametrize("target", [scattered, adjacent])
def test_query_returns_updated_states(cache: KVCache, source: Any, target: Any) -> None:
    memory, into = source(len(TOKENS)), target(len(TOKENS))
    fill(memory, [], TOKENS)
    assert cache.query(TOKENS, pointers(into)) == 0
    assert cache.update(None, TOKENS, pointers(memory)) == len(TOKENS)
    assert cache.update(None, TOKENS, pointers(memory)) == len(TOKENS), "held before"
    assert cache.query(TOKENS, pointers(into)) == len(TOKENS)
    assert np.array_equal(content(into), states([], TOKENS, TOKEN_BYTES))


def test_empty_tensors_are_replaced_as_far_as_tokens_are_held(cache: KVCache) -> None:
    store(cache, TOKENS[:4])
    wanted = [[(KVTensor(0, 0), KVTensor(0, 0))] * LAYERS for _ in TOKENS]
    assert cache.query(TOKENS, wanted) == 4
    gc.collect()
    assert np.array_equal(content(wanted[:4]), states([], TOKENS[:4], TOKEN_BYTES))
    assert {tensor.length for pair in wanted[4] for tensor in pair} == {0}


def test_batched_calls_do_the_same(cache: KVCache) -> None:
    memory, into = scattered(len(TOKENS)), scattered(len(TOKENS))
    fill(memory, [], TOKENS)
    assert cache.batched_update(TOKENS, pointers(memory)) == len(TOKENS)
    assert cache.batched_query(TOKENS, pointers(into)) == len(TOKENS)
    assert np.array_equal(content(into), content(memory))


@pytest.mark.parametrize("buffer_tokens", [2, 6])
def test_states_larger_than_the_buffer_pass_in_parts(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch, buffer_tokens: int
) -> None:
    monkeypatch.setattr(kv_cache, "_BUFFER_BYTES", 0)
    monkeypatch.setattr(kv_cache, "_BUFFER_CHUNKS", buffer_tokens // 2)
    assert store(cache, TOKENS[:2]) == 2
    assert store(cache, TOKENS[2:], prefix=TOKENS[:2]) == 6
    assert read(cache, TOKENS) == 8
    assert read(cache, TOKENS[2:], prefix=TOKENS[:2]) == 6
    assert read(cache, [*TOKENS, 1, 2, 3, 4]) == 8


def test_memory_given_several_times_is_read_and_written(cache: KVCache) -> None:
    keys, values = np.arange(16, dtype=np.uint8), np.arange(16, 32, dtype=np.uint8)
    given = [[(KVTensor.of(keys), KVTensor.of(values))] * LAYERS for _ in TOKENS]
    assert cache.update(None, TOKENS, given) == len(TOKENS)
    into = [np.zeros_like(keys), np.zeros_like(values)]
    wanted = [[(KVTensor.of(into[0]), KVTensor.of(into[1]))] * LAYERS for _ in TOKENS]
    assert cache.query(TOKENS, wanted) == len(TOKENS)
    assert np.array_equal(into, [keys, values])


def test_tokens_after_the_last_whole_chunk_are_ignored(open_cache: Open) -> None:
    cache = open_cache(chunk_size=3)
    assert store(cache, TOKENS) == 6
    assert read(cache, TOKENS) == 6
    assert read(cache, TOKENS[:5]) == 3
    assert store(cache, TOKENS[:2]) == read(cache, TOKENS[:2]) == 0


def test_update_behind_a_missing_prefix_stores_nothing(cache: KVCache) -> None:
    assert store(cache, TOKENS[2:4], prefix=TOKENS[:2]) == 0
    assert read(cache, TOKENS[2:4], prefix=TOKENS[:2]) == 0
    assert store(cache, TOKENS[:2]) == 2
    assert read(cache, TOKENS) == 2
    assert store(cache, TOKENS[2:4], prefix=TOKENS[:2]) == 2
    assert read(cache, TOKENS) == 4


@pytest.mark.parametrize("call", [store, read])
def test_prefix_of_partial_chunks_is_refused(cache: KVCache, call: Any) -> None:
    with pytest.raises(ValueError, match="prefix: 3 tokens are not whole chunks of 2"):
        call(cache, TOKENS[3:], prefix=TOKENS[:3])


def test_ranks_and_layers_do_not_find_states_of_others(open_cache: Open) -> None:
    first = open_cache(rank=0, world_size=2)
    assert store(first, TOKENS) == len(TOKENS)
    for other in (
        open_cache(),
        open_cache(rank=1, world_size=2),
        open_cache(rank=0, world_size=4),
        open_cache(namespace=next(_names)),
    ):
        assert read(other, TOKENS) == 0
    as_long = open_cache(layer=1, tensor_nbytes=TENSOR_BYTES * LAYERS, rank=0, world_size=2)
    assert as_long.query(TOKENS, [[(KVTensor(0, 0), KVTensor(0, 0))] for _ in TOKENS]) == 0
    assert read(open_cache(rank=0, world_size=2), TOKENS) == len(TOKENS)


def test_threads_use_one_cache(open_cache: Open) -> None:
    cache = open_cache()
    found: list[int] = []

    def use(first: int) -> None:
        for n in range(10):
            tokens = [first, n, *TOKENS]
            found.append(store(cache, tokens) + read(cache, tokens))

    threads = [threading.Thread(target=use, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [20] * 40


# ---- folders ------------------------------------------------------------------------------------


def test_unused_chunks_of_a_folder_expire(tmp_path: Path) -> None:
    config = FileCacheConfig(root=tmp_path, namespace="n", chunk_size=2, ttl=1, gc_interval=0.2)
    with KVCache(config, TENSOR_BYTES, layer=LAYERS) as cache:
        assert store(cache, TOKENS) == read(cache, TOKENS) == len(TOKENS)
        end = time.monotonic() + 60
        while list(tmp_path.rglob("*.blk")) and time.monotonic() < end:
            time.sleep(0.1)
        assert read(cache, TOKENS) == 0


def test_capacity_of_a_folder_counts_tokens_of_all_ranks(tmp_path: Path) -> None:
    config = FileCacheConfig(root=tmp_path, namespace="n", chunk_size=10, ttl=None)
    with KVCache(config, TENSOR_BYTES, 1000, LAYERS, rank=1, world_size=2) as cache:
        chains: Any = cache._cache._chains
        assert chains._store.usage().capacity_bytes == 2000 * TOKEN_BYTES + 200 * HEADER_BYTES
    with pytest.raises(ConfigError, match="the folder would fill its file system"):
        KVCache(config, TENSOR_BYTES, layer=LAYERS)


def test_folder_that_cannot_be_written_is_a_miss_or_an_error(folder_cache: KVCache) -> None:
    root = Path(folder_cache.cache_config.root)  # type: ignore[union-attr]
    assert store(folder_cache, TOKENS) == len(TOKENS)
    shutil.rmtree(root)
    root.write_text("no folder")
    assert read(folder_cache, TOKENS) == 0
    with pytest.raises(TokenCacheError, match=re.escape(str(root))):
        store(folder_cache, TOKENS)


def test_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("not ours")
    with pytest.raises(ConfigError, match=r"^root: .*thesis.tex.*choose an empty or new directory"):
        KVCache(FileCacheConfig(root=tmp_path, namespace="n"), TENSOR_BYTES)
    with pytest.raises(ConfigError, match=r"^root: .*cannot be used: Not a directory"):
        KVCache(FileCacheConfig(root=tmp_path / "thesis.tex" / "a", namespace="n"), TENSOR_BYTES)


# ---- tensors and arguments ----------------------------------------------------------------------


def test_tensor_is_the_memory_at_its_address() -> None:
    array = np.arange(32, dtype=np.uint16)
    tensor = KVTensor(array.ctypes.data, array.nbytes)
    assert (tensor.data, tensor.length) == (array.ctypes.data, 64)
    assert np.array_equal(array, np.arange(32)), "making a tensor must not write"
    np.frombuffer(tensor, np.uint16)[3] = 999
    assert array[3] == 999
    assert isinstance(KVTensor(0, 0), KVTensor)
    assert bytes(KVTensor(0, 0)) == b""


def test_tensor_of_an_array_keeps_it_alive() -> None:
    tensor = KVTensor.of(np.full(1 << 20, 7, np.uint8))
    gc.collect()
    assert np.frombuffer(tensor, np.uint8).sum() == 7 << 20
    with pytest.raises(ValueError, match="not contiguous"):
        KVTensor.of(np.zeros((4, 4))[:, 1])


def test_tensor_of_a_torch_tensor_shares_its_memory() -> None:
    torch = pytest.importorskip("torch")
    given = torch.zeros(8, dtype=torch.bfloat16)
    ctypes.memset(KVTensor.of(given).data, 0xFF, 16)
    assert given.view(torch.int16).tolist() == [-1] * 8
    with pytest.raises(ValueError, match="not contiguous"):
        KVTensor.of(torch.zeros(4, 4)[:, 1])


@pytest.mark.parametrize(
    ("states_of", "error", "text"),
    [
        (list, ValueError, "0 states, but 2 tokens"),
        (lambda: [*pointers(scattered(1)), []], ValueError, "0 pairs .* for 3 layers"),
        (lambda: [[(KVTensor(0, 0),)] * 3] * 2, ValueError, "3 pairs .* for 3 layers"),
        (lambda: scattered(2), TypeError, r"KVTensor.of\(array\)"),
        (lambda: [[(KVTensor(4096, 8),) * 2] * 3] * 2, ValueError, r"tensors of \[8\] bytes"),
        (
            lambda: [*pointers(scattered(1)), [(KVTensor(0, 0),) * 2] * 3],
            ValueError,
            "memory for all tensors|nothing to store",
        ),
    ],
)
def test_wrong_states_are_refused(
    folder_cache: KVCache, states_of: Any, error: type[Exception], text: str
) -> None:
    for call in (folder_cache.query, lambda *rest: folder_cache.update(None, *rest)):
        with pytest.raises(error, match=f"^kv_cache_list: .*({text})"):
            call([1, 2], states_of())


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [-1, 2], [2**32, 1], ["a", "b"], [True, False]])
def test_wrong_tokens_are_refused(folder_cache: KVCache, tokens: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        folder_cache.query(tokens, pointers(scattered(2)))
    with pytest.raises((ValueError, TypeError)):
        folder_cache.update(None, tokens, pointers(scattered(2)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "tensor_nbytes: expected a whole number of at least 1, got None"),
        ({"tensor_bytes": 0}, "tensor_nbytes: .* at least 1, got 0"),
        ({"tensor_bytes": 8, "layer": 0}, "layer: "),
        ({"tensor_bytes": 8, "cache_capacity": -1}, "cache_capacity: .* at least 0"),
        ({"tensor_bytes": 8, "rank": 1}, "rank: set both rank and world_size"),
        ({"tensor_bytes": 8, "rank": 2, "world_size": 2}, "rank: expected 0 to 1, got 2"),
        ({"tensor_bytes": 8, "cache_config": None}, "cache_config: expected a FileCacheConfig"),
        (
            {"tensor_bytes": 8, "cache_config": FileCacheConfig(root="/x", namespace="")},
            "namespace: expected a name",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    config = FileCacheConfig(root=tmp_path / "none", namespace="n")
    with pytest.raises(ConfigError, match=f"^{text}"):
        KVCache(**{"cache_config": config, **options})
    assert not (tmp_path / "none").exists()


def test_closed_cache_refuses_calls_and_keeps_states(open_cache: Open) -> None:
    with open_cache() as cache:
        store(cache, TOKENS)
        assert cache.flush() in (True, False)
    cache.close()
    with pytest.raises(ValueError, match="this cache is closed"):
        read(cache, TOKENS)
    assert read(open_cache(), TOKENS) == len(TOKENS)


def test_forgotten_cache_ends_its_threads(tmp_path: Path) -> None:
    def gc_threads() -> int:
        return sum(thread.name == "tiered-kv-gc" for thread in threading.enumerate())

    before = gc_threads()
    cache = KVCache(FileCacheConfig(root=tmp_path, namespace="n"), TENSOR_BYTES)
    assert gc_threads() == before + 1
    del cache
    gc.collect()
    assert gc_threads() == before
