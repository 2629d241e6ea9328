"""Run in a process of its own by test_speculation.py: n-gram speculation, printed as JSON.

On its own because what compiles vLLM's proposer keeps later engines of the process from starting.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

from tests.engine.engine_apart import tell
from tests.engine.real_engine import Answer, RealEngine, real_engine
from vllm_tiered_kv.metrics import names

COUNT = 120
GAIN = 0.3  # so that answers repeat themselves, as drafts that are to be accepted must


def prompts() -> list[list[int]]:
    """They repeat themselves, too: the first drafts come from the prompt, and are wrong."""
    rng = random.Random(9)
    motifs = [[rng.randrange(3, 1000) for _ in range(40)] for _ in range(3)]
    return [motif * times + motif[: 10 + times] for times, motif in enumerate(motifs, 2)]


def said(answers: list[Answer]) -> list[dict]:
    return [dataclasses.asdict(answer) for answer in answers]


def drafts(engine: RealEngine) -> dict[str, float]:
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
        for metric in engine.llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def main(model: str) -> None:
    with real_engine(Path(model), None, gain=GAIN) as engine:
        plain = said(engine.ask(prompts(), COUNT))
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    options = {"cpu_memory": "64MiB"}
    with real_engine(Path(model), options, gain=GAIN, speculative_config=speculation) as engine:
        report: dict = {"plain": plain, "cold": said(engine.ask(prompts(), COUNT))}
        engine.settle()
        report["stored"] = engine.total(names.STORED_BLOCKS)
        report["cold_drafts"] = drafts(engine)
        report["device"] = said(engine.ask(prompts(), COUNT))
        engine.settle()
        engine.drop_gpu_cache()
        report["tier"] = said(engine.ask(prompts(), COUNT))
        engine.settle()
        engine.drop_gpu_cache()
        # The next turn of a chat: what was generated, drafts accepted among it, is loaded as well.
        turns = [
            [*ids, *answer["tokens"], 5, 6, 7]
            for ids, answer in zip(prompts(), report["cold"], strict=True)
        ]
        computed = dict(engine.kv_bytes)
        engine.kv_bytes.clear()
        report["turn"] = said(engine.ask(turns, 8))
        engine.settle()
        turn_bytes = {
            name: content for name, content in engine.kv_bytes.items() if name in computed
        }
        report["turn_blocks"] = len(turn_bytes)
        report["turn_blocks_equal"] = sum(
            content == computed[name] for name, content in turn_bytes.items()
        )
        report["turn_device"] = said(engine.ask(turns, 8))
        report["loaded"] = engine.total(names.LOADED_BLOCKS)
        report["drafts"] = drafts(engine)
        engine.settle()
        engine.assert_at_rest()
    tell(report)


if __name__ == "__main__":
    main(sys.argv[1])
