"""Stores that hold blocks by key: memory, SSD, shared directory. All follow one contract."""
