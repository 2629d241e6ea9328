"""Tells people of blocks that are too large for the memory tier, and does not repeat itself."""

from __future__ import annotations

import logging

from vllm_tiered_kv.option_values import format_size

logger = logging.getLogger(__name__)

_MOST_LENGTHS = 64  # a client may think of any number of them


class TooLarge:
    def __init__(self) -> None:
        self._told: set[int] = set()

    def tell(self, nbytes: int, most: int) -> None:
        if nbytes in self._told or len(self._told) >= _MOST_LENGTHS:
            return
        self._told.add(nbytes)
        logger.warning(
            "blocks of %s are not cached: this memory tier takes blocks up to %s; "
            "give it more memory",
            format_size(nbytes),
            format_size(most),
        )
