"""vineyard's sample program for its cache in shared memory, with other imports and configuration.

    tiered-kv-server --memory 1GiB --listen ipc:///tmp/kv.sock
    python examples/vineyard_memory.py

Everything after the configuration is vineyard's (Apache License 2.0).
"""

# ruff: noqa: B905, PERF401
# mypy: ignore-errors

import time

import numpy as np

from vllm_tiered_kv.api import KVCache, KVTensor, MemoryCacheConfig

vineyard_cache_config = MemoryCacheConfig(
    servers="ipc:///tmp/kv.sock",
    namespace=f"sample of {time.time()}",  # held states are not replaced, and these are random
)
cache = KVCache(
    cache_config=vineyard_cache_config,
    tensor_bytes=16,  # should be the same as the nbytes of the tensor
    cache_capacity=10,
    layer=2,
)

tokens = [1, 2, 3, 4]

kv_tensors_to_update = []
kv_tensors = []
for _ in range(len(tokens)):
    k_tensor = np.random.rand(2, 2).astype(np.float32)
    v_tensor = np.random.rand(2, 2).astype(np.float32)
    kv_tensors.append([(k_tensor, v_tensor) for _ in range(cache.layer)])
    kv_tensors_to_update.append(
        [
            (
                KVTensor(k_tensor.ctypes.data, k_tensor.nbytes),
                KVTensor(v_tensor.ctypes.data, v_tensor.nbytes),
            )
            for _ in range(cache.layer)
        ]
    )

# insert the token list and the related kv cache list
updated = cache.update(None, tokens, kv_tensors_to_update)
assert updated == len(tokens)

kv_tensors_to_query = []
kv_tensors_from_cache = []
for _ in range(len(tokens)):
    kv_tensors_to_query.append(
        [
            (
                KVTensor(0, 0),
                KVTensor(0, 0),
            )
            for _ in range(cache.layer)
        ]
    )

matched = cache.query(tokens, kv_tensors_to_query)
kv_tensors_from_cache = kv_tensors_to_query[:matched]
assert matched == len(tokens)

assert len(kv_tensors) == len(kv_tensors_from_cache)
for kv, kv_from_cache in zip(kv_tensors, kv_tensors_from_cache):
    assert len(kv) == len(kv_from_cache)
    for (k_tensor, v_tensor), (queried_k_tensor, queried_v_tensor) in zip(kv, kv_from_cache):
        queried_k_tensor = np.frombuffer(
            queried_k_tensor,
            dtype=k_tensor.dtype,
        ).reshape(k_tensor.shape)
        queried_v_tensor = np.frombuffer(
            queried_v_tensor,
            dtype=v_tensor.dtype,
        ).reshape(v_tensor.shape)
        assert np.array_equal(k_tensor, queried_k_tensor)
        assert np.array_equal(v_tensor, queried_v_tensor)
