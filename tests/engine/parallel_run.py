"""Run in a process of its own by test_parallel.py: one engine over two ranks, printed as JSON."""

from __future__ import annotations

import json
import random
import sys
import time

from tests.engine.engine_apart import answers, open_engine, tell

BLOCK = 32


def corrupt_arena(worker, rank: int) -> int:
    """In a worker: flips bits of every slot, on one rank only."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank != rank:
        return 0
    arena = get_kv_transfer_group().worker_half.arena
    arena.bytes_at(0, arena.nbytes)[:] ^= 0x15
    return arena.nbytes


def attention_of(worker) -> list[str]:
    """In a worker: the names of vLLM's back-ends for its layers."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)
    return sorted({layer.get_attn_backend().get_name() for layer in layers.values()})


def main(model: str, settings: dict) -> None:
    from vllm import SamplingParams

    llm = open_engine(model, {"cpu_memory": "8MiB"}, block_size=BLOCK, **settings)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 1000) for _ in range(n)] for n in (300, 170, 420)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def ask() -> list[dict]:
        return answers(llm, prompts)

    def drop() -> None:
        deadline = time.monotonic() + 30
        while not llm.reset_prefix_cache():
            assert time.monotonic() < deadline, "the prefix cache stayed in use"
            time.sleep(0.1)

    def counters() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            if metric.name.startswith("vllm:tiered_kv_") and hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def settled_counters() -> dict[str, float]:
        """What is counted after the last answer comes with the next ones."""
        told: list[list[float]] = []
        while len(told) < 5 or any(one != told[-1] for one in told[-5:]):
            assert len(told) < 200, "the counters never came to rest"
            time.sleep(0.3)
            llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
            # Speeds never rest.
            told.append([n for name, n in counters().items() if name.endswith("_blocks")])
        return counters()

    report = {"attention": llm.collective_rpc(attention_of)}
    report |= {"cold": ask(), "device": ask()}
    drop()
    report["tier"] = ask()
    drop()
    settled_counters()  # what is still on its way to a daemon must stay as it is
    report["corrupted_bytes"] = llm.collective_rpc(corrupt_arena, args=(1,))
    report["corrupted"] = ask()
    report["counters"] = settled_counters()
    tell(report)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
