"""What became of a block that one tier offered to another."""

from __future__ import annotations

import enum


class Handed(enum.Enum):
    TAKEN = enum.auto()
    REFUSED = enum.auto()
    ABSENT = enum.auto()  # it was not there any more
