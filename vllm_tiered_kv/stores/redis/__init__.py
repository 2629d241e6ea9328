"""Blocks in Redis: one server or a cluster, shared by many daemons."""
