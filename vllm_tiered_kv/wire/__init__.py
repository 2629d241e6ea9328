"""Protocol between clients and the daemon: `messages` encodes and decodes headers."""
