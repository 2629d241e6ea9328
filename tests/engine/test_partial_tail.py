"""`reuse_partial_tail`: a repeated prompt computes only its last token.

Blocks of the toy engine hold 4 tokens, and it checks every value that it reads.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import ask, assert_tier_is_right, prompt, seeded_prompt, total
from tests.engine.toy_asking import workload as play_workload
from tests.engine.toy_at_daemon import REMOTE, TRANSPORTS, address, engine_at, wait_attached
from tests.engine.toy_engine import ToyEngine, play
from tests.patience import mostly_slow
from tests.remote.faulty_daemon import FaultyDaemon
from vllm_tiered_kv.connector.scheduler.partial_tail import tail_of
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.wire.messages import Match

TAILS = {"reuse_partial_tail": True}
LENGTHS = [2, 3, 4, 5, 38, 39, 40, 41]


def tailed(model: Path, async_scheduling: bool = False, **settings: Any) -> ToyEngine:
    extra = {**TAILS, **settings.pop("extra", {})}
    return ToyEngine(model, async_scheduling, extra_config=extra, **settings)


def hits(engine: ToyEngine, ids: list[int], count: int = 6, salt: str = "") -> int:
    """Tokens of a request that were loaded from a tier."""
    before = total(engine, names.HIT_TOKENS)
    ask(engine, ids, count, salt)
    return int(total(engine, names.HIT_TOKENS) - before)


@pytest.mark.parametrize("length", LENGTHS)
def test_repeated_prompt_computes_only_its_last_token(
    tiny_model: Path, async_scheduling: bool, step_loads: str, length: int
) -> None:
    engine = tailed(tiny_model, async_scheduling)
    ids = seeded_prompt(1, length)
    assert hits(engine, ids) == 0
    engine.drop_gpu_cache()
    assert hits(engine, ids) == length - 1
    assert total(engine, names.MISS_TOKENS) == length - 1  # from the first request
    assert total(engine, names.RECOMPUTED_TOKENS) == 0
    engine.assert_at_rest()
    assert_tier_is_right(engine)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_with_full_blocks_on_gpu_computes_only_its_last_token(
    tiny_model: Path, async_scheduling: bool, step_loads: str, length: int
) -> None:
    engine = tailed(tiny_model, async_scheduling)
    ids = seeded_prompt(1, length)
    ask(engine, ids)
    assert hits(engine, ids) == (length - 1) % 4
    stored = total(engine, names.STORED_BLOCKS)
    ask(engine, ids)
    assert total(engine, names.STORED_BLOCKS) == stored, "the tier holds all blocks already"
    engine.assert_at_rest()


def test_tails_are_not_reused_by_default(tiny_model: Path, async_scheduling: bool) -> None:
    engine = ToyEngine(tiny_model, async_scheduling)
    ids = seeded_prompt(1, 39)
    ask(engine, ids, 1)
    assert total(engine, names.STORED_BLOCKS) == 9
    engine.drop_gpu_cache()
    assert hits(engine, ids, 1) == 36


def test_tail_matches_only_a_prompt_with_the_same_end(
    tiny_model: Path, async_scheduling: bool
) -> None:
    engine = tailed(tiny_model, async_scheduling, cpu_blocks=64)
    stem = seeded_prompt(3, 36)
    ask(engine, [*stem, 5, 6], 1)
    for end in ([5], [5, 7], [6, 5], [5, 6, 7], [6], [5, 6, 7, 8]):
        engine.drop_gpu_cache()
        assert hits(engine, [*stem, *end], 1) == 36, end
    engine.drop_gpu_cache()
    other = seeded_prompt(4, 36)
    assert hits(engine, [*other, 5, 6], 1) == 0, "the same tail of another prompt"
    engine.drop_gpu_cache()
    assert hits(engine, [*stem, 5, 6], 1, salt="another") == 0
    engine.drop_gpu_cache()
    assert hits(engine, [*stem, 5, 6], 1) == 37


def test_full_block_at_the_position_of_a_tail_is_stored_too(
    tiny_model: Path, async_scheduling: bool
) -> None:
    """Both have the same position in the request."""
    engine = tailed(tiny_model, async_scheduling)
    ids = seeded_prompt(5, 38)
    ask(engine, ids, 12)
    engine.drop_gpu_cache()
    assert hits(engine, ids, 12) == 37
    engine.drop_gpu_cache()
    turn = ids + play(ids, 12)[0]
    assert hits(engine, turn, 1) == 48
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_tail_in_a_reallocated_block_is_stored(tiny_model: Path, async_scheduling: bool) -> None:
    """A tail's block has no hash, so vLLM gives it to the next request."""
    engine = tailed(tiny_model, async_scheduling, max_tokens_per_step=64, store_delay=30)
    first, second = seeded_prompt(7, 30), seeded_prompt(8, 30)
    for ids in (first, second):
        engine.add(ids, 1)
        engine.step()
    engine.run()
    engine.drop_gpu_cache()
    assert hits(engine, first, 1) == 29
    assert hits(engine, second, 1) == 29
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_tail_is_evicted_before_its_prefix(tiny_model: Path, async_scheduling: bool) -> None:
    engine = tailed(tiny_model, async_scheduling, cpu_blocks=16, gpu_blocks=64)
    ids = seeded_prompt(9, 39)
    ask(engine, ids, 1)
    ask(engine, seeded_prompt(10, 28), 1)
    engine.drop_gpu_cache()
    assert hits(engine, ids, 1) == 36


@pytest.mark.parametrize("seed", mostly_slow(range(4), 1))
def test_random_workload_with_tails_reads_only_right_kv(
    tiny_model: Path, async_scheduling: bool, step_loads: str, seed: int
) -> None:
    """Prompts that end within shared blocks, with aborts, resets and too little memory."""
    engine = tailed(tiny_model, async_scheduling, seed=seed, gpu_blocks=40, store_delay=seed + 1)
    engine.copier.fail_ahead = 0.0 if async_scheduling else 0.1 * (seed % 2)
    play_workload(engine, seed, 60)
    engine.assert_at_rest()
    assert_tier_is_right(engine)


@pytest.mark.parametrize("seed", mostly_slow(range(2), 1))
def test_repeated_prompts_with_tails_read_only_right_kv(
    tiny_model: Path, async_scheduling: bool, step_loads: str, seed: int
) -> None:
    rng = random.Random(seed)
    engine = tailed(tiny_model, async_scheduling, gpu_blocks=40, cpu_blocks=40, seed=seed)
    asked = [prompt(rng, rng.randrange(2, 40)) for _ in range(6)]
    served = {}
    for _ in range(60):
        ids, count = rng.choice(asked), rng.randrange(1, 9)
        served[engine.add(ids, count)] = play(ids, count)[0]
        for _ in range(rng.randrange(8)):
            engine.step()
        if rng.random() < 0.3:
            engine.scheduler.reset_prefix_cache()
    engine.run()
    assert {name: engine.finished[name].tokens for name in served} == served
    assert total(engine, names.HIT_TOKENS) > 0
    engine.assert_at_rest()


def test_reset_drops_tails_of_running_requests(tiny_model: Path, async_scheduling: bool) -> None:
    """The tail of a running request is computed before the reset and would be stored after it."""
    engine = tailed(tiny_model, async_scheduling, store_delay=8)
    engine.copier.max_delay = 8
    ids = seeded_prompt(11, 30)
    running = engine.add(ids, 20)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_connector_cache()
    engine.run()
    assert engine.finished[running].tokens == play(ids, 20)[0]
    engine.drop_gpu_cache()
    assert hits(engine, ids) == 0
    engine.assert_at_rest()


def test_stale_tail_on_the_gpu_is_not_stored(tiny_model: Path, async_scheduling: bool) -> None:
    engine = tailed(tiny_model, async_scheduling)
    ids = seeded_prompt(12, 30)
    running = engine.add(ids, 30)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_connector_cache()  # the GPU keeps the request's blocks
    other = engine.add(ids, 2)
    engine.run()
    assert engine.finished[other].tokens == play(ids, 2)[0]
    assert engine.finished[running].tokens == play(ids, 30)[0]
    assert hits(engine, ids) == 0, "not even behind the full blocks that the GPU still has"
    engine.drop_gpu_cache()
    assert hits(engine, ids) == 0, "computed before the reset, or from that"


def test_failed_step_stores_no_tail(tiny_model: Path) -> None:
    engine = tailed(tiny_model, max_tokens_per_step=64)
    ids = seeded_prompt(2, 31)
    ask(engine, ids)
    engine.drop_gpu_cache()
    engine.copier.fail_ahead = 1.0
    failing = engine.add(ids, 3)
    engine.step()
    engine.copier.fail_ahead = 0.0
    engine.run()
    assert total(engine, names.LOAD_FAILURES) == 1
    assert engine.finished[failing].tokens == play(ids, 3)[0]
    engine.drop_gpu_cache()
    assert hits(engine, ids) == 30, "what was computed instead is there again"
    engine.assert_at_rest()
    assert_tier_is_right(engine)


def test_verification_skips_tails(tiny_model: Path, async_scheduling: bool) -> None:
    extra = {"verify_fraction": 1}
    engine = tailed(tiny_model, async_scheduling, extra=extra, cpu_blocks=128)
    ids = seeded_prompt(13, 39)
    for _ in range(3):
        ask(engine, ids)
        engine.drop_gpu_cache()
    assert total(engine, names.VERIFIED_BLOCKS) > 0
    assert total(engine, names.DIFFERING_BLOCKS) == 0, "generated tokens have joined the tail"
    engine.assert_at_rest()
    engine.close()  # ends the threads that compare


# ---- daemons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [38, 39, 40])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_second_engine_computes_only_the_last_token(
    tiny_model: Path, tmp_path: Path, async_scheduling: bool, transport: str, length: int
) -> None:
    ids = seeded_prompt(14, length)
    with DaemonProcess(tmp_path) as daemon:
        at = address(daemon, transport)
        for number in range(2):
            engine = engine_at(tiny_model, at, async_scheduling=async_scheduling, extra=TAILS)
            wait_attached(engine, at)
            found = hits(engine, ids, 8)
            assert found == (length - 1 if number else 0)
            assert total(engine, names.HIT_TOKENS, REMOTE) == found
            turn = ids + play(ids, 8)[0]
            engine.drop_gpu_cache()
            # The full block at the position of the tail is reused too.
            assert hits(engine, turn, 1) >= (length + 7) // 4 * 4
            engine.assert_at_rest()
            engine.close()


def test_tail_alone_causes_no_daemon_lookup(tiny_model: Path, async_scheduling: bool) -> None:
    ids = seeded_prompt(15, 39)
    with FaultyDaemon() as daemon:
        engine = engine_at(
            tiny_model, daemon.address, async_scheduling=async_scheduling, extra=TAILS
        )
        ask(engine, ids, 1)
        request = engine.requests["r0"]
        keys = engine.half._key_maker.keys_for(request)
        tail = tail_of(request, keys, 4)
        assert tail is not None
        assert engine.half.index.lookup(tail.key) is Lookup.HIT
        engine.half.index.remove(tail.key)
        asked = sum(isinstance(request, Match) for request in daemon.seen)
        engine.drop_gpu_cache()
        assert hits(engine, ids, 1) == 36
        assert sum(isinstance(request, Match) for request in daemon.seen) == asked
        engine.close()


# ---- unsupported combinations -------------------------------------------------------------------


def test_sliding_windows_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"reuse_partial_tail.*full attention in all layers"):
        tailed(tiny_model, windows=(None, 8))


def test_lazy_stores_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r'reuse_partial_tail.*"store": "eager"'):
        tailed(tiny_model, extra={"store": "lazy"})
