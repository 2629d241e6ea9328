"""The API for programs other than vLLM: `TokenCache`, vineyard's `KVCache` over it, and the
`tiered-kv` command."""

from vllm_tiered_kv.api.kv_cache import FileCacheConfig, KVCache, KVTensor, MemoryCacheConfig
from vllm_tiered_kv.api.token_cache import TokenCache

__all__ = ["FileCacheConfig", "KVCache", "KVTensor", "MemoryCacheConfig", "TokenCache"]
