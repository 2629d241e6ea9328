"""Prompts of random tokens: all different, or with a prefix in common."""

from __future__ import annotations

import random

_FIRST_TOKEN = 500  # clear of the special ones


class Prompts:
    """The same sequence of prompts for the same seed."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._tokens = range(_FIRST_TOKEN, vocabulary)
        self._rng = random.Random(seed)

    def distinct(self, count: int, length: int) -> list[list[int]]:
        return [self._rng.choices(self._tokens, k=length) for _ in range(count)]

    def sharing(self, count: int, length: int, percent: int) -> list[list[int]]:
        """Prompts whose first `percent` of tokens are the same in all of them."""
        shared = length * percent // 100
        prefix = self._rng.choices(self._tokens, k=shared)
        return [prefix + rest for rest in self.distinct(count, length - shared)]
