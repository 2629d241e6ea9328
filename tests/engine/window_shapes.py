"""Groups with sliding windows that a toy engine may have, and what a hit needs of them."""

from __future__ import annotations

import pytest

from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_groups import Chunks

SHAPES = {
    "window": {"windows": (10,)},
    "hybrid": {"windows": (None, 10)},
    "window_first": {"windows": (6, None)},
    "two_windows": {"windows": (None, 6, 13)},
    "no_full": {"windows": (6, 17)},
    "one_token": {"windows": (None, 1)},
    "small_full_blocks": {"windows": (None, 10), "block_sizes": (4, 8)},
    "small_window_blocks": {"windows": (10, None), "block_sizes": (4, 8)},
    "chunks": {"windows": (None, Chunks(24))},
    "chunks_first": {"windows": (Chunks(8), None)},
    "latent_windows": {
        "windows": (None, 8, 4),
        "block_size": 8,
        "block_sizes": (8, 4, 2),
        "max_tokens_per_step": 16,
    },
    "chunks_beside_windows": {"windows": (None, Chunks(16), 10)},
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def window_blocks(engine: ToyEngine, end: int) -> int:
    """Blocks a hit that ends there needs, by the definition: those with a token in reach."""
    needed = 0
    for group in engine.groups:
        reach = range(group.first_read(end), end)
        needed += len({token // group.block_size for token in reach})
    return needed
