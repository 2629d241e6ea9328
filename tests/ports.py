"""Ports for servers of tests, which keep them while they are restarted."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below the ports that Linux gives to outgoing connections, one of which may take the port of a
# server between its end and its restart. Each test process has ports of its own.
_FIRST, _COUNT = 16_000, 2_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw7").removeprefix("gw")) % 8
_NUMBERS = itertools.count(random.randrange(_COUNT))


def free_port() -> int:
    """Returns a port of loopback that is free and that no other caller gets soon."""
    for number in itertools.islice(_NUMBERS, _COUNT):
        port = _FIRST + _WORKER * _COUNT + number % _COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("all ports are in use")
