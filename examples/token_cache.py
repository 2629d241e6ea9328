"""A conversation whose KV state is cached in a daemon: each turn computes only its new tokens.

    tiered-kv-server --memory 1GiB --listen ipc:///tmp/kv.sock
    python examples/token_cache.py ipc:///tmp/kv.sock

Run it twice: the second run finds all of the state.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from vllm_tiered_kv.api import TokenCache
from vllm_tiered_kv.errors import TieredKVError

SHAPE = (4, 2, 8, 64)  # layers, key and value, heads, numbers
TURNS = ("Who was the first?", " It was the ferryman.", " And the second?", " His daughter.")


def compute(prefix: list[int], tokens: list[int]) -> NDArray[np.float16]:
    """Simulates a model: the state depends on each token and all tokens before it."""
    print(f"  computing {len(tokens)} tokens")
    sums = np.cumsum([*prefix, *tokens])[len(prefix) :]
    return np.broadcast_to((sums % 251).reshape(-1, 1, 1, 1, 1), (len(tokens), *SHAPE)).astype("f2")


def main(*servers: str) -> None:
    token_bytes = int(np.prod(SHAPE)) * 2
    with TokenCache.connect(servers, "example float16", token_bytes) as cache:
        tokens: list[int] = []
        for turn in TURNS:
            tokens += turn.encode()
            state = np.empty((len(tokens), *SHAPE), np.float16)
            held = cache.query(tokens, state)
            print(f"{len(tokens)} tokens, {held} of them held")
            if held < len(tokens):
                state[held:] = compute(tokens[:held], tokens[held:])
                cache.update(tokens[:held], tokens[held:], state[held:])
            assert np.array_equal(state[:, 0, 0, 0, 0], np.cumsum(tokens) % 251)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except TieredKVError as error:  # no address, a wrong one, or no daemon there
        sys.exit(f"{error}\n\n{__doc__}")
