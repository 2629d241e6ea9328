"""The half of the connector that lives with vLLM's scheduler: it decides."""
