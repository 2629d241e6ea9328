"""What a mutation is: one critical place of the code, broken on purpose.

Random mutations (as mutmut or cosmic-ray make them by the thousand) mostly ask whether messages
and constants are tested. Here every entry is a guard whose absence would cost a wrong token, a lost
block or a hang, and names the tests that have to notice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm_tiered_kv"


class Needs(enum.Enum):
    """What the tests of a mutation have to import."""

    NOTHING = enum.auto()
    VLLM = enum.auto()


@dataclass(frozen=True)
class Mutation:
    name: str
    path: str
    """Below the package, or below `csrc/`, which is then built anew."""
    old: str
    """Occurs exactly once in that file."""
    new: str
    harm: str
    """What would happen to a user."""
    tests: tuple[str, ...]
    """As pytest takes them: files, or single tests."""
    needs: Needs = Needs.NOTHING

    @property
    def is_native(self) -> bool:
        return self.path.startswith("csrc/")

    def file(self, tree: Path) -> Path:
        return tree / self.path if self.is_native else tree / PACKAGE / self.path

    def occurrences(self, tree: Path) -> int:
        return self.file(tree).read_text().count(self.old)

    def apply(self, tree: Path) -> str:
        """Breaks the code in `tree`; the text to restore it with."""
        before = self.file(tree).read_text()
        if before.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} does not have its text exactly once")
        self.file(tree).write_text(before.replace(self.old, self.new))
        return before

    def restore(self, tree: Path, text: str) -> None:
        self.file(tree).write_text(text)
