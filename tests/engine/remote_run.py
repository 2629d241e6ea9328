"""Run in a process of its own by test_remote_engines.py: one engine over a daemon.

Answers the first prompts, waits until everything worth keeping has left for the daemon, prints the
answers and its counters as JSON, and then stays up until it is killed.
"""

from __future__ import annotations

import json
import random
import sys
import time

from tests.engine.engine_apart import answers, open_engine, tell

BLOCK = 32
LENGTHS = (300, 170, 420, 96, 510)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 1000) for _ in range(n)] for n in LENGTHS]


def main(model: str, options: dict, stored_blocks: int, count: int, ranks: int) -> None:
    from vllm import SamplingParams

    llm = open_engine(
        model, options, block_size=BLOCK, enforce_eager=True, tensor_parallel_size=ranks
    )
    params = SamplingParams(temperature=0, max_tokens=1)

    def counters() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            is_ours = metric.name.startswith("vllm:tiered_kv_") and "tier" in metric.labels
            if is_ours and hasattr(metric, "value"):  # a histogram has none
                name = f"{metric.name.removeprefix('vllm:tiered_kv_')}[{metric.labels['tier']}]"
                found[name] = found.get(name, 0) + metric.value
        return found

    told = answers(llm, prompts()[:count])
    deadline = time.monotonic() + 60
    while counters().get("stored_blocks[remote]", 0) < stored_blocks:
        assert time.monotonic() < deadline, counters()
        llm.generate([{"prompt_token_ids": [7]}], params, use_tqdm=False)  # brings fresh counters
        time.sleep(0.1)
    tell({"answers": told, "counters": counters()})
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), *map(int, sys.argv[3:]))
