"""Verified hits on a GPU, 7B shape: rounding passes, wrong content is found.

Prompts computed in other chunks, and decoded blocks computed as part of a prompt, go through other
kernels of a GPU than those that filled the stored blocks. How far off they are is printed. Weights
are drawn at a plain scale: at the one of the other tests, which makes answers depend on every byte,
layers amplify rounding as no trained model does.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from tests.engine.real_engine import real_engine  # noqa: E402
from tests.engine.verified_hits import VerifiedHits  # noqa: E402
from tests.gpu.engine_on_gpu import memory, settle  # noqa: E402
from tests.models import QWEN2_7B, write_model  # noqa: E402
from vllm_tiered_kv.core.verdict import Verdict  # noqa: E402
from vllm_tiered_kv.metrics import names  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCK = 16
ROWS = 4096


def make_prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(1000, 150_000) for _ in range(length)] for length in (3000, 1700, 900)]


PROMPTS = make_prompts()


def whole_blocks(ids: list[int]) -> int:
    return (len(ids) - 1) // BLOCK


def test_rounding_passes_and_wrong_content_is_found(tmp_path: Path) -> None:
    with real_engine(
        write_model(tmp_path / "qwen2-7b", **QWEN2_7B),
        {"cpu_memory": "8GiB", "verify_fraction": 1},
        gain=1.0,
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=8192,
        max_num_batched_tokens=ROWS,
        num_gpu_blocks_override=None,
        **memory(4),
    ) as engine:
        hits = VerifiedHits(engine, settle)

        def tell(what: str) -> None:
            found = {v.name: hits.count(v) for v in Verdict if hits.count(v)}
            print(f"\n{what}: {found}, largest {hits.largest:.2g}, overall {hits.overall:.2g}")

        def ask_all(what: str, inputs: list[list[int]], count: int, rows: int) -> None:
            """Asks, and sees that every whole block of the inputs was compared and none accused."""
            hits.ask(inputs, count, rows)
            tell(what)
            assert len(hits.verdicts) == sum(map(whole_blocks, inputs))
            assert hits.count(Verdict.DIFFERENT) == hits.count(Verdict.NOT_COMPARED) == 0

        answers = hits.ask(PROMPTS, 6 * BLOCK, ROWS)
        assert not hits.verdicts
        ask_all("the same chunks", PROMPTS, BLOCK, ROWS)
        assert hits.count(Verdict.EQUAL) == len(hits.verdicts)
        assert engine.total(names.HIT_TOKENS) == 0
        ask_all("chunks of 500", PROMPTS, BLOCK, 500)
        ask_all("chunks of 64", PROMPTS[2:], BLOCK, 64)
        turns = [[*ids, *answer.tokens] for ids, answer in zip(PROMPTS, answers, strict=True)]
        ask_all("decoded", turns, BLOCK, ROWS)
        assert engine.total(names.DIFFERING_BLOCKS) == 0

        long, other = PROMPTS[:2]
        hits.block(long, 3)[:] = hits.block(other, 3)
        hits.block(long, 7)[4096 : 4096 + 128] ^= 0x15
        hits.ask([long], BLOCK, ROWS)
        tell("spoiled")
        found = [verdict.verdict for verdict in hits.verdicts]
        assert [n for n, verdict in enumerate(found) if verdict is Verdict.DIFFERENT] == [3, 7]
        print(f"another prompt's block: overall {hits.verdicts[3].overall:.2g}")
        assert engine.total(names.DIFFERING_BLOCKS, "cpu") == 2
        hits.ask([long], BLOCK, ROWS)  # what was evicted is computed and stored anew
        ask_all("after that", [long], BLOCK, ROWS)
        engine.assert_at_rest()
