"""Run in a process of its own by test_parallel.py: two data-parallel engines over a daemon.

One answers the prompts; when all that is worth keeping has left for the daemon, the other answers
the same ones. Both report tokens, logprobs and how much they had cached.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from tests.engine.engine_apart import answer_of, connector, tell

BLOCK = 32
LENGTHS = (300, 170, 420)


async def run(model: str, options: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=1024,
            block_size=BLOCK,
            enforce_eager=True,
            seed=0,
            data_parallel_size=2,
            gpu_memory_utilization=0.1,  # each takes that much of the host
            kv_transfer_config=connector(options),
        )
    )
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, detokenize=False
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]
    asked = 0

    async def ask(rank: int, ids: list[int]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        told = llm.generate({"prompt_token_ids": ids}, params, str(asked), data_parallel_rank=rank)
        return answer_of([out async for out in told][-1])

    def sent_blocks() -> float:
        return sum(
            metric.value
            for metric in get_metrics_snapshot()
            if metric.name == "vllm:tiered_kv_stored_blocks" and metric.labels["tier"] == "remote"
        )

    first = [await ask(0, ids) for ids in prompts]
    deadline = time.monotonic() + 60
    while sent_blocks() < sum(length // BLOCK for length in LENGTHS):
        assert time.monotonic() < deadline, "blocks never reached the daemon"
        await ask(0, [7])  # brings fresh counters
        await asyncio.sleep(0.1)
    second = [await ask(1, ids) for ids in prompts]
    tell({"first": first, "second": second})
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], json.loads(sys.argv[2])))
