"""Plain data and definitions: keys, layouts, transfers. No torch, no vLLM, no sockets."""
