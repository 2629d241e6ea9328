"""Eviction policies: which unpinned leaf leaves next."""
