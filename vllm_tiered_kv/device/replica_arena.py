"""One arena for the ranks of a host that hold the same KV, as with MLA: a block lies there once.

The first of them takes memory without a name and tells the others where it is; each maps it, and
pins it for its own GPU. Where one of them cannot get at it, as on another host, all have arenas of
their own, each with its part of the memory, and hold every block each.
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
from vllm_tiered_kv.option_values import format_size

logger = logging.getLogger(__name__)

Gather = Callable[[object], list[object]]
"""Says something to all ranks and hears what each of them says, in the order of ranks. Every rank
has to call it as often as the others."""

_TOKEN_BYTES = 16
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # it may be anything


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same: this one is the `replica`-th of so many neighbours."""

    rank: int  # among all that `gather`
    replica: int
    count: int
    gather: Gather


@dataclass(frozen=True)
class _Offer:
    """Where a process has memory for others, and what it wrote at its beginning."""

    pid: int
    fd: int
    token: bytes


def share_memory(nbytes: int, replicas: Replicas) -> int | None:
    """A descriptor of memory that all replicas have, the caller's to close; None if one of them
    cannot have it. All ranks call this at once, and it is one or the other for all of them.
    """
    offer = _offer(nbytes) if replicas.replica == 0 else None
    offers = replicas.gather(offer)
    fd = offer.fd if offer is not None else None
    if replicas.replica:
        leader = offers[replicas.rank - replicas.replica]
        fd = _take(leader, nbytes) if isinstance(leader, _Offer) else None
    # Also those that hold something else must do as these do: slots mean the same everywhere.
    if all(replicas.gather(fd is not None)):
        return fd
    if fd is not None:
        os.close(fd)
    return None


def open_replica_arena(
    nbytes: int, count: int, fd: int | None, pin: Pin | None, unpin: Unpin | None
) -> Arena:
    """The arena of so many replicas, of what `share_memory` said: one for all, or this rank's own
    with its part of the memory."""
    if fd is not None:
        try:
            return Arena(nbytes, pin, unpin, fd=fd)
        finally:
            os.close(fd)
    part = nbytes // count
    logger.warning(
        "the %d ranks that hold the same KV cannot share their memory: each holds all blocks, in "
        "%s of its own",
        count,
        format_size(part),
    )
    return Arena(part, pin, unpin)


def _offer(nbytes: int) -> _Offer | None:
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        fd = create_sealed("tiered-kv-replicas", nbytes)
    except OSError as error:
        logger.warning("no memory to share with other ranks: %s", error.strerror)
        return None
    try:
        os.pwrite(fd, token, 0)
    except OSError as error:
        logger.warning("memory to share with other ranks cannot be used: %s", error.strerror)
        os.close(fd)
        return None
    return _Offer(os.getpid(), fd, token)


def _take(offer: _Offer, nbytes: int) -> int | None:
    """A descriptor of the memory offered, or None. The process of this number may be another one
    here: ranks need not run on one host, or in one container."""
    try:
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", _OPEN_FLAGS)
    except OSError as error:
        logger.info("memory of process %d cannot be opened: %s", offer.pid, error.strerror)
        return None
    try:
        if os.fstat(fd).st_size == nbytes and os.pread(fd, _TOKEN_BYTES, 0) == offer.token:
            return fd
    except OSError as error:
        logger.info("memory of process %d cannot be read: %s", offer.pid, error.strerror)
    os.close(fd)
    return None
