"""The API for programs other than vLLM: `TokenCache`, and the `tiered-kv` command."""

from vllm_tiered_kv.api.token_cache import TokenCache

__all__ = ["TokenCache"]
