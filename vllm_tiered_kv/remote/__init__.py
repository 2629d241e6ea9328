"""The client of `tiered-kv-server`: calls with deadlines, health, placement, shared memory."""
