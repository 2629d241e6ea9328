"""What an index knows of a slot in use."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class State(enum.Enum):
    RESERVED = enum.auto()
    COMMITTED = enum.auto()
    DETACHED = enum.auto()
    QUARANTINED = enum.auto()  # of a `DurableIndex`: nobody uses the slot, the disk still knows it
    RETIRED = enum.auto()  # of a `DurableIndex`: the slot cannot be written


@dataclass(slots=True)
class Entry:
    key: bytes
    size_class: int
    parent_key: bytes | None
    parent: int | None = None  # slot of the block before, when it is here
    state: State = State.RESERVED
    pins: int = 0
    used: int = 0  # time of last use, to weigh classes against each other
    followers: set[int] = field(default_factory=set)
