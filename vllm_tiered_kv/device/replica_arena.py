"""One shared arena for the ranks of a host that hold the same KV, as with MLA.

The arena stores each block once. The first rank creates anonymous shared memory and tells the
others how to open it; each rank maps it and pins it for its own GPU. If a rank cannot open it, for
example on another host, every rank gets an arena of its own with an equal part of the memory, and
each of these stores every block.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from vllm_tiered_kv.device.arena import Arena
from vllm_tiered_kv.device.pinning import Pin, Unpin
from vllm_tiered_kv.device.sealed_memory import create_sealed
from vllm_tiered_kv.options import format_size

logger = logging.getLogger(__name__)

Gather = Callable[[object], list[object]]
"""All-gather: sends an object to all ranks and returns the objects of all ranks, in rank order.
It is collective: every rank must call it equally often."""

_TOKEN_BYTES = 16
# The descriptor may belong to an unrelated process and be a FIFO or a terminal.
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True)
class Replicas:
    """This rank's position among the adjacent ranks that hold the same KV."""

    rank: int  # among those of `gather`
    replica: int  # position among the replicas
    count: int  # number of replicas
    gather: Gather


@dataclass(frozen=True)
class _Offer:
    """Shared memory that a process offers, and the token at its beginning that identifies it."""

    pid: int
    fd: int
    token: bytes


def share_memory(nbytes: int, replicas: Replicas) -> int | None:
    """Returns a descriptor of memory that all replicas share, or None if a replica cannot open it.

    The call is collective, and all ranks get the same outcome. The caller closes the descriptor.
    """
    offer = _offer(nbytes) if replicas.replica == 0 else None
    offers = replicas.gather(offer)
    fd = offer.fd if offer is not None else None
    if replicas.replica:
        leader = offers[replicas.rank - replicas.replica]
        fd = _open_offer(leader, nbytes) if isinstance(leader, _Offer) else None
    # All ranks must decide alike, also in other replica groups: slot ids are the same on all ranks.
    if all(replicas.gather(fd is not None)):
        return fd
    if fd is not None:
        os.close(fd)
    return None


def open_replica_arena(
    nbytes: int, count: int, fd: int | None, pin: Pin | None, unpin: Unpin | None
) -> Arena:
    """Opens the arena of `count` replicas after `share_memory`: the shared memory of `fd`, or this
    rank's own arena with its part of the memory."""
    if fd is not None:
        try:
            return Arena(nbytes, pin, unpin, fd=fd)
        finally:
            os.close(fd)
    part = nbytes // count
    logger.warning(
        "the %d ranks that hold the same KV cannot share memory; each rank stores every block in "
        "its own arena of %s",
        count,
        format_size(part),
    )
    return Arena(part, pin, unpin)


def _offer(nbytes: int) -> _Offer | None:
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        fd = create_sealed("tiered-kv-replicas", nbytes)
    except OSError as error:
        logger.warning("could not create memory to share with other ranks: %s", error.strerror)
        return None
    try:
        os.pwrite(fd, token, 0)
    except OSError as error:
        logger.warning("could not write to memory shared with other ranks: %s", error.strerror)
        os.close(fd)
        return None
    return _Offer(os.getpid(), fd, token)


def _open_offer(offer: _Offer, nbytes: int) -> int | None:
    """Opens the offered memory; None if that fails.

    The token is compared because the pid may belong to an unrelated process here: ranks may run on
    several hosts or in several containers.
    """
    try:
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", _OPEN_FLAGS)
    except OSError as error:
        logger.info("could not open memory of process %d: %s", offer.pid, error.strerror)
        return None
    try:
        if os.fstat(fd).st_size == nbytes and os.pread(fd, _TOKEN_BYTES, 0) == offer.token:
            return fd
    except OSError as error:
        logger.info("could not read memory of process %d: %s", offer.pid, error.strerror)
    os.close(fd)
    return None
