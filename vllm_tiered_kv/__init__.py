"""A KV cache for vLLM that goes on past the GPU."""

__version__ = "0.2.0"
