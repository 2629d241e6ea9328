"""The Python interface of vineyard's LLM KV cache (`vineyard.llm`), over `TokenCache`.

A program gives the keys and values of each token and layer as addresses of its own memory. This
module collects them into chunks and spreads chunks over them; `TokenCache` does the rest.
docs/python-api.md is the user documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cache as cached
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.api.token_cache import (
    TokenCache,
    require_name,
    require_whole,
    whole_chunks,
)
from vllm_tiered_kv.api.token_keys import Tokens
from vllm_tiered_kv.core.transfer import Int64Array, int64_array
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import BlockLayout, HostRegion, gather, scatter
from vllm_tiered_kv.stores.block_format import HEADER_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

# Scattered tensors pass through a buffer of this size, but at least of so many chunks, because a
# folder reads and writes chunks in parallel.
_BUFFER_BYTES = 64 << 20
_BUFFER_CHUNKS = 8


class KVTensor:
    """Memory of the caller that holds the keys or the values of one token in one layer.

    It has the address `data`, the `length` in bytes, and the buffer protocol. The caller keeps the
    memory alive, as with any pointer, unless the tensor was made by `of`. `KVTensor(0, 0)` stands
    for memory that `KVCache.query` provides.
    """

    data: int
    length: int

    def __new__(cls, data: int, length: int) -> KVTensor:
        # Before Python 3.12 only types written in C export buffers, and ctypes makes such types.
        return cast("KVTensor", _tensor_type(length).from_address(data))

    def __init__(self, data: int, length: int) -> None:
        """Does nothing: that of ctypes would write its arguments into the memory."""

    @classmethod
    def of(cls, array: Any) -> KVTensor:
        """Returns the memory of a numpy array or a torch tensor on the CPU, and keeps it alive."""
        if getattr(array, "is_cuda", False):
            raise ValueError("the tensor is on a GPU: pass tensor.cpu()")
        contiguous = (
            array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
        )
        if not contiguous:
            raise ValueError("the array is not contiguous: pass a contiguous copy of it")
        address = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
        return _keeping(KVTensor(address, array.nbytes), array)


@cached
def _tensor_type(length: int) -> Any:
    parts = {"length": length, "data": property(ctypes.addressof)}
    return type("KVTensor", (KVTensor, ctypes.c_uint8 * length), parts)


def _keeping(tensor: KVTensor, memory: object) -> KVTensor:
    tensor._memory = memory  # type: ignore[attr-defined]
    return tensor


KVState = MutableSequence[tuple[KVTensor, KVTensor]]
"""Keys and values of one token: a pair for each layer."""


@dataclass(frozen=True, kw_only=True)
class FileCacheConfig:
    """A `KVCache` in a folder that processes and hosts share, without a daemon."""

    root: str | os.PathLike[str]
    namespace: str  # everything that makes states incompatible, such as the model
    chunk_size: int = 16  # tokens per file
    ttl: float | None = 30 * 60  # chunks unused for so many seconds are removed
    gc_interval: float = 30 * 60  # seconds between collections of the whole folder
    durability: str = "memory"  # see TokenCache.update
    strict: bool = False

    def open(self, namespace: str, token_bytes: int, capacity_tokens: int) -> TokenCache:
        return TokenCache.open_folder(
            self.root,
            namespace,
            token_bytes,
            self.chunk_size,
            capacity_bytes=capacity_tokens * token_bytes
            + -(-capacity_tokens // self.chunk_size) * HEADER_BYTES,
            ttl=self.ttl,
            collect_every=self.gc_interval,
            strict=self.strict,
        )


@dataclass(frozen=True, kw_only=True)
class MemoryCacheConfig:
    """A `KVCache` in running daemons. The options are those of `TokenCache.connect`."""

    servers: str | Sequence[str]
    namespace: str
    chunk_size: int = 1  # tokens per block
    durability: str = "memory"
    timeout: float = 2.0
    connect_timeout: float = 2.0
    client_key: str | os.PathLike[str] | None = None
    server_key: str | os.PathLike[str] | None = None
    strict: bool = False

    def open(self, namespace: str, token_bytes: int, capacity_tokens: int) -> TokenCache:
        """`capacity_tokens` is not used: the operator of a daemon limits its memory."""
        return TokenCache.connect(
            self.servers,
            namespace,
            token_bytes,
            self.chunk_size,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            client_key=self.client_key,
            server_key=self.server_key,
            strict=self.strict,
        )


class KVCache:
    """Caches keys and values of token sequences, one pair of tensors per token and layer.

    Programs written for `vineyard.llm.KVCache` create it with a FileCacheConfig or a
    MemoryCacheConfig, and may call it from any thread. Failures are misses, as in `TokenCache`.
    """

    def __init__(
        self,
        cache_config: FileCacheConfig | MemoryCacheConfig,
        tensor_nbytes: int | None = None,
        cache_capacity: int = 0,
        layer: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        tensor_bytes: int | None = None,
    ) -> None:
        """`tensor_nbytes`, or `tensor_bytes`, is the size of the keys of one token in one layer,
        and that of the values. `cache_capacity` limits a folder to so many tokens (0: only by
        `ttl`). Each `rank` of a `world_size` finds its own states only."""
        if not isinstance(cache_config, FileCacheConfig | MemoryCacheConfig):
            raise ConfigError(
                "cache_config",
                "expected a FileCacheConfig (a folder) or MemoryCacheConfig (daemons)",
            )
        self.cache_config = cache_config
        self.chunk_size = cache_config.chunk_size
        self.tensor_nbytes = require_whole(
            "tensor_nbytes", tensor_bytes if tensor_nbytes is None else tensor_nbytes
        )
        self.layer = require_whole("layer", layer)
        self.cache_capacity = require_whole("cache_capacity", cache_capacity, least=0)
        if (rank is None) != (world_size is None):
            raise ConfigError("rank", "set both rank and world_size, or neither")
        ranks = require_whole("world_size", 1 if world_size is None else world_size)
        if not 0 <= require_whole("rank", rank or 0, least=0) < ranks:
            raise ConfigError("rank", f"expected 0 to {ranks - 1}, got {rank}")
        self._token_bytes = self.layer * 2 * self.tensor_nbytes
        require_name("namespace", cache_config.namespace)
        self._cache = cache_config.open(
            # Equally long states of another number of layers or ranks are not the same states.
            f"{self.layer} layers, rank {rank or 0} of {ranks}: {cache_config.namespace}",
            self._token_bytes,
            self.cache_capacity * ranks,
        )
        self._buffers: list[NDArray[np.uint8]] = []
        # Programs written for vineyard do not close their caches.
        self._finalizer = weakref.finalize(self, self._cache.close)

    def update(
        self, prefix: Tokens | None, tokens: Tokens, kv_cache_list: Sequence[KVState]
    ) -> int:
        """Stores keys and values of `tokens`, which follow `prefix`; returns how many leading ones
        are held now. `kv_cache_list[i][j]` has those of token i in layer j.

        Tokens after the last whole chunk are not stored. `prefix` must consist of whole chunks; if
        it is not held, the call stores nothing and returns 0.
        """
        prefix, tokens = _ids(prefix), _ids(tokens)
        addresses = self._addresses(tokens, kv_cache_list)
        if not addresses.all():
            raise ValueError("kv_cache_list: an empty KVTensor has nothing to store")
        if whole_chunks(prefix, self.chunk_size) and self._cache.match(prefix) < len(prefix):
            return 0
        durability = self.cache_config.durability
        if self._are_adjacent(addresses):
            state = _memory_at(addresses, self.tensor_nbytes)
            return self._cache.update(prefix, tokens[: len(addresses)], state, durability)
        count = 0
        with self._buffer(len(addresses)) as buffer:
            for start in range(0, len(addresses), len(buffer)):
                part = addresses[start : start + len(buffer)]
                state = buffer[: len(part)]
                _copy(gather, part, self.tensor_nbytes, state)
                before, these = _joined(prefix, tokens[:start]), tokens[start : start + len(part)]
                count += self._cache.update(before, these, state, durability)
                if count < start + len(part):
                    break
        return count

    def query(
        self,
        prefix: Tokens | None = None,
        tokens: Any = None,
        kv_cache_list: Sequence[KVState] | None = None,
    ) -> int:
        """Reads keys and values of the leading `tokens` that are held; returns how many these are.

        `query(tokens, kv_cache_list)` is possible, too. With a `prefix` of whole chunks, the tokens
        follow it. The tensors in `kv_cache_list` are memory to read into, whose content is
        undefined after the tokens that were read; or all are `KVTensor(0, 0)` and are replaced by
        tensors of new memory.
        """
        if kv_cache_list is None:
            prefix, tokens, kv_cache_list = None, prefix, tokens
        prefix, tokens = _ids(prefix), _ids(tokens)
        addresses = self._addresses(tokens, kv_cache_list)
        tokens = tokens[: len(addresses)]
        if not addresses.any():
            state = np.empty((len(tokens), self.layer, 2, self.tensor_nbytes), np.uint8)
            count = self._cache.query(tokens, state, prefix)
            for of_token, pairs in zip(state[:count], kv_cache_list, strict=False):
                pairs[:] = [(KVTensor.of(keys), KVTensor.of(values)) for keys, values in of_token]
            return count
        if not addresses.all():
            raise ValueError(
                "kv_cache_list: give memory for all tensors, or KVTensor(0, 0) for all"
            )
        if self._are_adjacent(addresses):
            return self._cache.query(tokens, _memory_at(addresses, self.tensor_nbytes), prefix)
        count = 0
        with self._buffer(len(addresses)) as buffer:
            for start in range(0, len(addresses), len(buffer)):
                part = addresses[start : start + len(buffer)]
                state = buffer[: len(part)]
                before, these = _joined(prefix, tokens[:start]), tokens[start : start + len(part)]
                held = self._cache.query(these, state, before)
                _copy(scatter, part[:held], self.tensor_nbytes, state)
                count += held
                if held < len(part):
                    break
        return count

    def batched_update(self, tokens: Tokens, kv_cache_list: Sequence[KVState]) -> int:
        """`update` without a prefix. All calls are batched."""
        return self.update(None, tokens, kv_cache_list)

    def batched_query(self, tokens: Tokens, kv_cache_list: Sequence[KVState]) -> int:
        """`query` without a prefix. All calls are batched."""
        return self.query(None, tokens, kv_cache_list)

    def flush(self) -> bool:
        """See `TokenCache.flush`."""
        return self._cache.flush()

    def close(self) -> None:
        """Waits for running calls of other threads. Stored state is kept. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- internals ------------------------------------------------------------------------------

    def _addresses(self, tokens: Tokens, states: Sequence[KVState]) -> Int64Array:
        """Returns the addresses of all tensors of the whole chunks, one row per token; 0 for a
        tensor without memory."""
        if len(states) != len(tokens):
            raise ValueError(f"kv_cache_list: {len(states)} states, but {len(tokens)} tokens")
        whole = len(tokens) - len(tokens) % self.chunk_size
        found = np.empty((whole, 2 * self.layer), np.int64)
        for row, pairs in zip(found, states, strict=False):
            tensors = [tensor for pair in pairs for tensor in pair]
            if len(pairs) != self.layer or len(tensors) != len(row):
                raise ValueError(
                    f"kv_cache_list: a token has {len(pairs)} pairs of tensors, but the cache was "
                    f"created for {self.layer} layers"
                )
            if not all(isinstance(tensor, KVTensor) for tensor in tensors):
                raise TypeError(
                    "kv_cache_list: expected pairs of KVTensor; make them of arrays or CPU tensors "
                    "with KVTensor.of(array)"
                )
            row[:] = [tensor.data for tensor in tensors]
            lengths = {tensor.length for tensor in tensors}
            if lengths != {self.tensor_nbytes if row[0] else 0}:
                raise ValueError(
                    f"kv_cache_list: tensors of {sorted(lengths)} bytes, but the cache was created "
                    f"for {self.tensor_nbytes}"
                )
        return found

    def _are_adjacent(self, addresses: Int64Array) -> bool:
        """Whether the memory of all tensors together is one state as `TokenCache` wants it."""
        return bool((np.diff(addresses.ravel()) == self.tensor_nbytes).all())

    @contextlib.contextmanager
    def _buffer(self, tokens: int) -> Iterator[NDArray[np.uint8]]:
        """Provides memory for the states of some or all of the tokens, a row each. Keeps it for
        later calls, because the kernel takes as long to provide new pages as to copy into them."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.empty((0, self._token_bytes), np.uint8)
        chunk_bytes = self.chunk_size * self._token_bytes
        max_rows = max(_BUFFER_CHUNKS, _BUFFER_BYTES // chunk_bytes) * self.chunk_size
        if len(buffer) < min(tokens, max_rows):
            buffer = np.empty((min(tokens, max_rows), self._token_bytes), np.uint8)
        try:
            yield buffer
        finally:
            self._buffers.append(buffer)


def _ids(tokens: Tokens | None) -> Any:
    """Returns an array, whose slices cost nothing. `TokenCache` checks its type and values."""
    return np.asarray(() if tokens is None else tokens)


def _joined(prefix: Any, tokens: Any) -> Any:
    if not len(prefix) or not len(tokens):  # an empty array has no type to be joined
        return tokens if len(tokens) else prefix
    return np.concatenate((prefix, tokens))


def _memory_at(addresses: Int64Array, nbytes: int) -> NDArray[np.uint8]:
    if not addresses.size:
        return np.empty(0, np.uint8)
    whole = (ctypes.c_uint8 * (addresses.size * nbytes)).from_address(int(addresses[0, 0]))
    return np.frombuffer(memoryview(whole), np.uint8)


def _copy(how: Any, addresses: Int64Array, nbytes: int, state: NDArray[np.uint8]) -> None:
    """Copies between tensors and the state of their tokens, which is one "block" of many runs."""
    if not addresses.size:
        return
    places = addresses.ravel()
    if np.diff(np.sort(places)).min(initial=nbytes) >= nbytes:
        size = np.full(places.size, nbytes, np.int64)
        offsets = np.arange(places.size, dtype=np.int64) * nbytes
        layout = BlockLayout(places.astype(np.uint64), size, size, offsets, 1)
        region = HostRegion(state.ctypes.data, state.nbytes)
        how(layout, int64_array([0]), region, int64_array([0]))
        return
    # A program may give the same memory several times. Native code refuses that, because its
    # threads would write there at the same time.
    for at, place in zip(range(state.ctypes.data, 1 << 63, nbytes), places.tolist(), strict=False):
        ctypes.memmove(*((at, place) if how is gather else (place, at)), nbytes)
