"""The tiers a block can be in and the outcomes of asking for it."""

from __future__ import annotations

import enum


class Tier(str, enum.Enum):
    """Where a block lies, fastest first. The value is the metric label."""

    GPU = "gpu"
    CPU = "cpu"
    REMOTE = "remote"  # a daemon as an engine sees it: any of the three below
    MEMORY = "memory"
    SSD = "ssd"
    BACKING = "backing"


class Lookup(enum.Enum):
    """The answer to "do you hold this block?"."""

    HIT = enum.auto()
    PENDING = enum.auto()  # being written: it will be a hit, or go away
    MISS = enum.auto()
