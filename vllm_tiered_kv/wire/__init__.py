"""Protocol between clients and the daemon: `messages` for headers, `frames` for whole messages."""
