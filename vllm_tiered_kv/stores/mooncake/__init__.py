"""Blocks in a Mooncake Store: memory of many machines behind one master, shared by many daemons."""
