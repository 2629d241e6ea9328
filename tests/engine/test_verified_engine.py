"""Verified hits in a real engine: rounding passes, wrong content is found, by the real kernels.

In float32 and in bfloat16. A single row takes another path through the CPU's kernels than several
do, so in bfloat16 blocks filled by decoding, or computed one token at a time, round differently
when they are computed as part of a prompt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.oracle import BLOCK, PROMPTS
from tests.engine.real_engine import RealEngine, real_engine
from tests.engine.verified_hits import VerifiedHits
from tests.patience import mostly_slow
from vllm_tiered_kv.core.verdict import Verdict
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

ASKED = sorted(PROMPTS, key=len)[:4]
WHOLE = sum((len(ids) - 1) // BLOCK for ids in ASKED)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], 1))
def test_rounding_passes_and_wrong_content_is_found(tiny_model: Path, dtype: str) -> None:
    options = {"cpu_memory": "256MiB", "verify_fraction": 1}
    is_rounded = dtype == "bfloat16"
    with real_engine(tiny_model, options, dtype=dtype) as engine:
        watched = VerifiedHits(engine, RealEngine.settle)
        first = watched.ask(ASKED)
        assert not watched.verdicts

        # The same kernels, in chunks of other sizes: byte by byte the same.
        for rows in (256, 96):
            assert [a.tokens for a in watched.ask(ASKED, rows=rows)] == [a.tokens for a in first]
            assert watched.count(Verdict.EQUAL) == len(watched.verdicts) == WHOLE
        assert engine.total(names.HIT_TOKENS) == 0

        # Other kernels: a row at a time, and blocks that decoding has filled.
        watched.ask(ASKED[:2], rows=1)
        rounded = [(watched.largest, watched.overall)]
        assert watched.count(Verdict.DIFFERENT) == watched.count(Verdict.NOT_COMPARED) == 0
        assert watched.count(Verdict.CLOSE) > 0 or not is_rounded
        answers = watched.ask(ASKED[2:], 3 * BLOCK)
        turns = [ids + list(a.tokens) + [7] for ids, a in zip(ASKED[2:], answers, strict=True)]
        watched.ask(turns)
        rounded.append((watched.largest, watched.overall))
        assert watched.count(Verdict.DIFFERENT) == watched.count(Verdict.NOT_COMPARED) == 0
        assert watched.count(Verdict.CLOSE) > 0 or not is_rounded
        for what, (largest, overall) in zip(("single rows", "decoded"), rounded, strict=True):
            print(f"{dtype}, {what}: largest {largest:.2g}, overall {overall:.2g}")
            assert largest < (1e-4 if dtype == "float32" else 0.05)
            assert overall < (1e-4 if dtype == "float32" else 0.05)
        assert engine.total(names.DIFFERING_BLOCKS) == 0

        # A block of another prompt, and a changed cache line in another.
        long = max(ASKED, key=len)
        other = next(ids for ids in ASKED if ids[:BLOCK] != long[:BLOCK])
        watched.block(long, 0)[:] = watched.block(other, 0)
        watched.block(long, 1)[64:128] ^= 0x15
        watched.ask([long])
        found = [verdict.verdict for verdict in watched.verdicts]
        assert found[:2] == [Verdict.DIFFERENT] * 2
        assert Verdict.DIFFERENT not in found[2:]
        print(f"{dtype}, another prompt's block: overall {watched.verdicts[0].overall:.2g}")
        assert watched.verdicts[0].overall > 0.5
        assert watched.verdicts[0].layer
        assert engine.total(names.DIFFERING_BLOCKS, "cpu") == 2
        watched.ask([long])  # what was evicted is computed and stored anew
        watched.ask([long])
        assert watched.count(Verdict.DIFFERENT) == 0
        assert len(watched.verdicts) == (len(long) - 1) // BLOCK
