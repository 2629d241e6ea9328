"""Blocks on a local disk: exact capacity, checksums, recovery from an index journal."""
