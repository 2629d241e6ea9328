"""Blocks in a directory that many hosts use at once, without a central index."""
