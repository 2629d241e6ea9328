"""vineyard's sample program for its cache in files, with other imports and configuration.

    python examples/vineyard_files.py

Everything after the configuration is vineyard's (Apache License 2.0).
"""

# ruff: noqa: B905
# mypy: ignore-errors

import numpy as np

from vllm_tiered_kv.api import FileCacheConfig, KVCache, KVTensor

file_cache_config = FileCacheConfig(
    chunk_size=2,
    root="/tmp/vineyard/llm_cache",
    namespace="sample",
)
cache = KVCache(
    cache_config=file_cache_config,
    tensor_bytes=16,  # should be the same as the nbytes of the tensor
    cache_capacity=10,
    layer=2,
)

tokens = [1, 2, 3, 4]
original_kv_tensors = []
for i in range(0, len(tokens), file_cache_config.chunk_size):
    kv_tensors_to_update = []
    k_tensor = np.random.rand(2, 2).astype(np.float32)
    v_tensor = np.random.rand(2, 2).astype(np.float32)
    for _ in range(file_cache_config.chunk_size):
        original_kv_tensors.append([(k_tensor, v_tensor) for _ in range(cache.layer)])
        kv_tensors_to_update.append(
            [
                (
                    KVTensor(k_tensor.ctypes.data, k_tensor.nbytes),
                    KVTensor(v_tensor.ctypes.data, v_tensor.nbytes),
                )
                for _ in range(cache.layer)
            ]
        )
    updated = cache.update(
        tokens[:i],
        tokens[i : i + file_cache_config.chunk_size],
        kv_tensors_to_update,
    )
    assert updated == file_cache_config.chunk_size

kv_tensors_from_cache = []
kv_tensors = []
for _ in range(len(tokens)):
    k_tensor = np.empty((2, 2), dtype=np.float32)
    v_tensor = np.empty((2, 2), dtype=np.float32)
    kv_tensors_from_cache.append([(k_tensor, v_tensor) for _ in range(cache.layer)])
    kv_tensors.append(
        [
            (
                KVTensor(k_tensor.ctypes.data, k_tensor.nbytes),
                KVTensor(v_tensor.ctypes.data, v_tensor.nbytes),
            )
            for _ in range(cache.layer)
        ]
    )
matched = cache.query(tokens, kv_tensors)
assert matched == len(tokens)

assert len(kv_tensors) == len(kv_tensors_from_cache)
for kv, kv_from_cache in zip(original_kv_tensors, kv_tensors_from_cache):
    assert len(kv) == len(kv_from_cache)
    for (k_tensor, v_tensor), (queried_k_tensor, queried_v_tensor) in zip(kv, kv_from_cache):
        np.array_equal(k_tensor, queried_k_tensor)
        np.array_equal(v_tensor, queried_v_tensor)
