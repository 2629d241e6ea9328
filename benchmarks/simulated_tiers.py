"""`load_policy: auto` with many tiers on a simulated clock: the figures of ADR 0012.

    python -m benchmarks.simulated_tiers        a minute of one core

Each tier has another bandwidth and latency and serves requests whose whole prompt it holds, except
for a few tokens. Prints the time of loads and computation as a ratio of the time to compute all.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics

from tests.unit.simulated_engine import BLOCK, Engine

_BYTES_PER_S = 20e6, 20e9
_LATENCY_S = 0.0002, 0.05
_NEW_TOKENS = 1, 40


def ratios(tiers: int, requests: int, prompt_tokens: tuple[int, int]) -> list[tuple[float, float]]:
    """For each tier the ratio without the first request, which is the probe, and with it."""
    found = []
    for seed in range(tiers):
        rng = random.Random(seed)
        speeds = itertools.repeat(_log_uniform(rng, *_BYTES_PER_S), requests)
        engine = Engine([*speeds].__getitem__, _log_uniform(rng, *_LATENCY_S), rng=rng)
        for _ in range(requests):
            held = rng.randint(prompt_tokens[0] // BLOCK, prompt_tokens[1] // BLOCK) * BLOCK
            engine.ask(held + rng.randint(*_NEW_TOKENS), held)
        found.append((engine.ratio(1), engine.ratio()))
    return found


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiers", type=int, default=300)
    parser.add_argument("--requests", type=int, default=300, help="of each tier")
    args = parser.parse_args()
    for prompt_tokens in ((5_000, 15_000), (1_000, 96_000)):
        found = ratios(args.tiers, args.requests, prompt_tokens)
        later, all_requests = zip(*found, strict=True)
        print(
            f"prompts of {prompt_tokens[0]:,} to {prompt_tokens[1]:,} tokens, of computing all: "
            f"at most {max(later):.3f}, on average {statistics.mean(later):.3f} without the first "
            f"request, {statistics.mean(all_requests):.3f} with it"
        )


if __name__ == "__main__":
    main()
