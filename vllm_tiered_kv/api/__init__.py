"""Tools for those who run servers with this cache: the `tiered-kv` command."""
