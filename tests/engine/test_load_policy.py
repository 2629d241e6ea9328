"""vLLM's scheduler, our connector and a daemon that is faster or slower than the model.

Which of the two is faster is beyond doubt here, by a factor of ten or more: what is tested is that
the measurements reach the decision and that the tokens are right either way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.made_configs import WITH_RECURRENT_STATES
from tests.engine.toy_asking import total
from tests.engine.toy_at_daemon import REMOTE, engine_at, prompts, serve, whole_blocks
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_groups import STATE
from tests.remote.faulty_daemon import FaultyDaemon
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.core.transfer import ProbeJob, PutJob
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.wire.messages import Get, Match

pytestmark = pytest.mark.engine

CPU = Tier.CPU.value


@pytest.fixture(autouse=True)
def by_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERED_KV_LOAD_POLICY")


def slow_down(toy: ToyEngine, seconds_per_token: float) -> None:
    forward = toy._forward

    def slow(request_id: str, count: int) -> list[int]:
        time.sleep(seconds_per_token * count)
        return forward(request_id, count)

    toy._forward = slow


def decisions(toy: ToyEngine, tier: str) -> dict[str, float]:
    samples = toy.half.recorder.samples(names.LOAD_DECISIONS)
    return {decision: count for (of, decision), count in samples.items() if of == tier}


def test_slow_daemon_is_not_loaded_from(
    tiny_model: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has been heard, however busy this machine is.
    monkeypatch.setattr("vllm_tiered_kv.connector.scheduler.load_policy._MAX_WAIT_SHARE", 100.0)
    asked = prompts(21, 30)
    with FaultyDaemon() as slow:
        first = engine_at(tiny_model, slow.address, async_scheduling=async_scheduling)
        serve(first, asked)
        first.close()
        slow.delay = lambda request: 0.5 if isinstance(request, Get) else 0.0
        second = engine_at(tiny_model, slow.address, async_scheduling=async_scheduling)
        slow_down(second, 0.002)
        serve(second, asked)
        made = decisions(second, REMOTE)
        assert made.get("recompute", 0) >= 1
        assert made.get("probe", 0) >= 1
        assert made.get("load", 0) <= 1, "the first load is the probe"
        held = 4 * whole_blocks(asked)
        found = total(second, names.HIT_TOKENS, REMOTE)
        assert found <= 4 * whole_blocks(asked[:1])
        recomputed = total(second, names.RECOMPUTED_TOKENS, REMOTE)
        assert recomputed > 0
        assert total(second, names.RECOMPUTED_TOKENS, CPU) == 0
        # The rest: requests that did not wait for an answer that was not worth it.
        assert found + recomputed + total(second, names.MISS_TOKENS) == held
        assert total(second, names.LOAD_FAILURES) == 0
        second.half.stats()
        assert total(second, names.PREFILL_SPEED) > 0
        assert 0 < total(second, names.LOAD_SPEED, Tier.MEMORY.value) < 1e6
        second.close()


def test_probes_wait_for_steps_without_prefills(
    tiny_model: Path,
    daemon: DaemonProcess,
    async_scheduling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And an idle engine takes a step for them."""
    monkeypatch.setattr("vllm_tiered_kv.connector.scheduler.remote_tier._MAX_QUIET_TOKENS", 1)
    monkeypatch.setattr("vllm_tiered_kv.connector.scheduler.remote_tier._MAX_PROBE_DELAY_S", 1e9)
    asked = prompts(25, 8, 80, 90)
    first = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    slow_down(second, 0.002)
    for _ in range(3):  # the model was measured, the tier was not
        second.half.load_policy.costs.step_ended(256, 256 * 128, 0.5)
    assert second.half.remote is not None
    take_jobs = second.half.remote.take_jobs
    steps: list[int] = []

    def watched(scheduled: Mapping[str, int]) -> tuple[list[PutJob], list[ProbeJob]]:
        jobs = take_jobs(scheduled)
        if jobs[1]:
            steps.append(max(scheduled.values(), default=0))
        return jobs

    second.half.remote.take_jobs = watched
    for prompt in asked:
        serve(second, [prompt], count=1)  # no decodes: it is idle after each
    assert steps
    assert max(steps) <= 1
    assert total(second, names.LOAD_FAILURES) == 0
    second.run()
    assert not second.half.has_pending_push_work()
    second.half.remote._probes = [ProbeJob("r", 0, daemon.endpoint, ())]
    assert second.half.has_pending_push_work()
    second.step()
    assert not second.half.has_pending_push_work()
    second.close()


def test_fast_daemon_is_used(
    tiny_model: Path, daemon: DaemonProcess, async_scheduling: bool
) -> None:
    asked = prompts(22, 24)
    first = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    slow_down(second, 0.005)
    serve(second, asked, count=1)
    assert decisions(second, REMOTE)["load"] >= 10
    assert total(second, names.LOAD_FAILURES) == 0
    second.close()


def test_first_hits_after_a_restart_are_loaded_from_the_ssd(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its speed nor the model's was ever seen. The daemon knows its disk."""
    monkeypatch.setattr("vllm_tiered_kv.cache.cost_model._ASSUMED_PREFILL", 20.0)
    # A disk that told nothing of itself would be left alone.
    monkeypatch.setattr("vllm_tiered_kv.cache.cost_model._ASSUMED_RATE", 1.0)
    asked = prompts(26, 4, 84, 90)
    with DaemonProcess(
        folder,
        *("--memory", "16MiB", "--ssd", str(folder / "ssd"), "--ssd-space", "64MiB"),
    ) as daemon:
        first = engine_at(tiny_model, daemon.ipc, cpu_blocks=1024)
        serve(first, asked)
        first.close()
        daemon.terminate()
        daemon.restart()
        second = engine_at(tiny_model, daemon.ipc, cpu_blocks=1024)
        slow_down(second, 0.001)
        connector = second.scheduler.connector
        sources: Counter[str] = Counter()
        admit = connector.update_state_after_alloc

        def admitted(request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
            """As vLLM asks, right after it."""
            admit(request, blocks, tokens)
            if tokens and hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):
                sources.update(connector.get_external_cache_hit_sources(request, tokens))

        connector.update_state_after_alloc = admitted
        serve(second, asked, count=1)
        assert decisions(second, REMOTE) == {"load": len(asked)}
        assert total(second, names.HIT_TOKENS, REMOTE) == 4 * whole_blocks(asked)
        assert total(second, names.LOAD_FAILURES) == 0
        if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):  # not in vLLM 0.31
            assert sources == {"disk": 4 * whole_blocks(asked)}
        second.half.stats()
        assert total(second, names.LOAD_SPEED, Tier.SSD.value) > 0
        sources.clear()
        second.drop_gpu_cache()
        serve(second, asked, count=1)
        if hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"):
            assert sources == {"host": 4 * whole_blocks(asked)}, "memory has them now"
        second.close()


def test_first_hits_on_a_gpu_are_loaded_and_their_ends_measure_the_model(
    tiny_model: Path,
    daemon: DaemonProcess,
    async_scheduling: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.cache.cost_model._ASSUMED_PREFILL", 20.0)
    asked = prompts(27, 6, 85, 89)  # 21 whole blocks each
    first = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, daemon.endpoint, async_scheduling=async_scheduling)
    slow_down(second, 0.01)
    costs = second.half.load_policy.costs
    costs._computes_on_cpu = False
    computed: list[int] = []
    for n, ids in enumerate(asked, 1):
        before = total(second, names.HIT_TOKENS, REMOTE)
        serve(second, [ids])
        computed.append(84 - int(total(second, names.HIT_TOKENS, REMOTE) - before))
        assert costs.prefill._count == min(n, 3), "each of these steps was timed"
    assert computed == [8, 8, 8, 0, 0, 0], "a quarter of a step"
    assert decisions(second, REMOTE) == {"shorten": 3, "load": 3}
    assert total(second, names.RECOMPUTED_TOKENS, REMOTE) == 3 * 8
    assert total(second, names.LOAD_FAILURES) == 0
    second.close()


@WITH_RECURRENT_STATES
def test_hit_of_a_recurrent_model_is_loaded_whole_without_a_state_for_a_shorter_one(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it would be computed to measure the model."""
    monkeypatch.setattr("vllm_tiered_kv.cache.cost_model._ASSUMED_PREFILL", 20.0)
    asked = prompts(28, 4, 85, 89)
    settings = {"windows": (None, STATE), "retention": 0}
    first = engine_at(tiny_model, daemon.endpoint, **settings)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, daemon.endpoint, **settings)
    slow_down(second, 0.01)
    second.half.load_policy.costs._computes_on_cpu = False
    serve(second, asked)
    assert decisions(second, REMOTE) == {"load": 4}
    assert total(second, names.HIT_TOKENS, REMOTE) == 4 * 84
    second.close()


def test_prefill_time_that_hits_save_is_estimated(tiny_model: Path) -> None:
    asked = prompts(31, 4, 80, 90)
    with FaultyDaemon() as daemon:
        toy = engine_at(tiny_model, daemon.address, cpu_blocks=400)
        serve(toy, asked, count=1)
        toy.drop_gpu_cache()
        for _ in range(3):
            toy.half.load_policy.costs.step_ended(256, 256 * 128, 0.5)
        assert total(toy, names.SAVED_SECONDS) == 0
        serve(toy, asked, count=1)
        tokens, saved_s = total(toy, names.HIT_TOKENS, CPU), total(toy, names.SAVED_SECONDS, CPU)
        assert tokens == 4 * whole_blocks(asked)
        assert 0 < saved_s < tokens * 0.5 / 256 * 2
        assert total(toy, names.SAVED_SECONDS, REMOTE) == 0
        toy.close()


def test_head_comes_from_the_cpu_tier_and_a_slow_rest_is_computed(tiny_model: Path) -> None:
    asked = prompts(23, 20, 80, 90)
    with FaultyDaemon() as slow:
        first = engine_at(tiny_model, slow.address)
        serve(first, asked)
        first.close()
        slow.delay = lambda request: 0.5 if isinstance(request, Get) else 0.0
        second = engine_at(tiny_model, slow.address, cpu_blocks=400)
        serve(second, asked[:8])
        second.drop_gpu_cache()
        second.half.index.clear()
        serve(second, [prompt[:41] for prompt in asked[8:]])
        second.drop_gpu_cache()
        before = total(second, names.HIT_TOKENS, CPU), total(second, names.HIT_TOKENS, REMOTE)
        serve(second, asked[8:])
        from_cpu = total(second, names.HIT_TOKENS, CPU) - before[0]
        from_daemon = total(second, names.HIT_TOKENS, REMOTE) - before[1]
        assert from_cpu >= 40 * 12
        assert from_daemon == 0
        assert decisions(second, CPU)["load"] >= 12
        second.close()


def test_always_and_never(tiny_model: Path) -> None:
    asked = prompts(24, 4)
    held = 4 * whole_blocks(asked)
    with FaultyDaemon() as slow:
        first = engine_at(tiny_model, slow.address)
        serve(first, asked)
        first.close()
        slow.delay = lambda request: 0.1 if isinstance(request, Get) else 0.0
        always = engine_at(tiny_model, slow.address, extra={"load_policy": "always"})
        serve(always, asked)
        assert decisions(always, REMOTE) == {"load": len(asked)}
        assert total(always, names.HIT_TOKENS, REMOTE) == held
        always.close()

        requests: list[type] = []
        slow.delay = lambda request: requests.append(type(request)) or 0.0
        never = engine_at(tiny_model, slow.address, extra={"load_policy": "never"}, cpu_blocks=400)
        serve(never, asked)
        never.drop_gpu_cache()
        serve(never, asked)
        assert total(never, names.HIT_TOKENS) == 0
        assert total(never, names.STORED_BLOCKS, CPU) > 0
        assert decisions(never, CPU) == {"recompute": len(asked)}
        assert decisions(never, REMOTE) == {}
        assert Match not in requests
        never.close()
