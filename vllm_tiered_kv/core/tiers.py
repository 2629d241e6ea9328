"""The tiers that can hold a block, and the results of a lookup."""

from __future__ import annotations

import enum


class Tier(str, enum.Enum):
    """The tiers, fastest first. The value is the metric label."""

    GPU = "gpu"
    CPU = "cpu"
    REMOTE = "remote"  # a daemon as seen by an engine: any of the three below
    MEMORY = "memory"
    SSD = "ssd"
    BACKING = "backing"


class Lookup(enum.Enum):
    """Result of a lookup of one block."""

    HIT = enum.auto()
    PENDING = enum.auto()  # being written: becomes a hit, or a miss if the write fails
    MISS = enum.auto()
