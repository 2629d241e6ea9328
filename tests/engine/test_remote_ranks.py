"""Ranks, replicas and engines of other sizes over one daemon."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import total
from tests.engine.toy_at_daemon import (
    REMOTE,
    TRANSPORTS,
    address,
    engine_at,
    prompts,
    serve,
    wait_attached,
    whole_blocks,
)
from tests.engine.toy_engine import play
from tests.patience import eventually, in_turn
from tests.remote.daemon_facts import leases_of
from tests.remote.faulty_daemon import FaultyDaemon, Frames, framed
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.core.store import PutResult
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.wire.messages import Get, GetReply, Put, PutReply, Request, put_codes

pytestmark = pytest.mark.engine

SECOND_RANK = RankTag(tp=1).encode()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_is_served_its_own_shard(
    tiny_model: Path, daemon: DaemonProcess, transport: str, async_scheduling: bool
) -> None:
    at = address(daemon, transport)
    asked = prompts(1, 6)
    first = engine_at(tiny_model, at, ranks=2, async_scheduling=async_scheduling)
    wait_attached(first, at)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, at, ranks=2, async_scheduling=async_scheduling)
    wait_attached(second, at)
    serve(second, asked)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    assert total(second, names.LOAD_FAILURES) == 0
    second.close()
    eventually(lambda: leases_of(daemon) == 0)


@pytest.mark.parametrize(
    ("transport", "sizes"),
    in_turn({"tcp": "tcp", "ipc": "ipc"}, {"growing": (1, 2, 4), "shrinking": (4, 2, 1)}),
)
def test_engines_of_other_sizes_never_share(
    tiny_model: Path, daemon: DaemonProcess, transport: str, sizes: tuple[int, ...]
) -> None:
    """The first shard of two has the key, the rank and, here, the length of an only one. A larger
    engine would miss the other shards anyway; a smaller one would find all that it asks for."""
    at = address(daemon, transport)
    asked = prompts(2, 4)
    for ranks in sizes:
        toy = engine_at(tiny_model, at, ranks)
        wait_attached(toy, at)
        serve(toy, asked)
        assert total(toy, names.HIT_TOKENS) == 0
        toy.close()
    for ranks in sizes:
        toy = engine_at(tiny_model, at, ranks)
        wait_attached(toy, at)
        serve(toy, asked)
        assert total(toy, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
        toy.close()


def _loses_puts_of_second_rank(
    daemon: FaultyDaemon, request_id: int, request: Request
) -> list[Frames] | None:
    if isinstance(request, Put) and request.keys[0].endswith(SECOND_RANK):
        results = [PutResult.DROPPED] * len(request.keys)
        return [framed(request_id, PutReply(put_codes(results)))]
    return None


def _forgets_blocks_of_second_rank(
    daemon: FaultyDaemon, request_id: int, request: Request
) -> list[Frames] | None:
    if isinstance(request, Get) and request.keys[0].endswith(SECOND_RANK):
        return [framed(request_id, GetReply([], [], []))]
    return None


def test_blocks_one_rank_could_not_send_are_a_miss_for_all(tiny_model: Path) -> None:
    asked = prompts(3, 3)
    with FaultyDaemon(_loses_puts_of_second_rank) as daemon:
        first = engine_at(tiny_model, daemon.address, ranks=2)
        serve(first, asked)
        assert total(first, names.STORED_BLOCKS, REMOTE) == 0
        assert total(first, names.DROPPED_BLOCKS, REMOTE) >= whole_blocks(asked)
        first.close()
        assert len(daemon.blocks) >= whole_blocks(asked)  # all of the first rank's
        second = engine_at(tiny_model, daemon.address, ranks=2)
        serve(second, asked)
        assert total(second, names.HIT_TOKENS, REMOTE) == 0
        second.close()


def test_blocks_one_rank_cannot_load_are_recomputed_on_all(tiny_model: Path) -> None:
    asked = prompts(4, 3)
    with FaultyDaemon() as daemon:
        first = engine_at(tiny_model, daemon.address, ranks=2)
        serve(first, asked)
        first.close()
        daemon.fault = _forgets_blocks_of_second_rank
        second = engine_at(tiny_model, daemon.address, ranks=2)
        serve(second, asked)
        assert total(second, names.LOAD_FAILURES, REMOTE) == len(asked)
        assert total(second, names.LOADED_BLOCKS, REMOTE) == 0
        daemon.fault = None
        second.half.index.clear()
        second.drop_gpu_cache()
        serve(second, asked)
        assert total(second, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
        second.close()


def _dense_replica(number: int) -> dict:
    """As vLLM leaves the configuration of a dense model's replica: on its own but for a number."""
    return {"data_parallel_index": number, "data_parallel_rank_local": number}


def _expert_replica(number: int) -> dict:
    return {
        "data_parallel_size": 2,
        "data_parallel_rank": number,
        "data_parallel_rank_local": number,
        "data_parallel_index": number,
    }


@pytest.mark.parametrize(
    ("ranks", "replica"),
    in_turn({"1": 1, "2": 2}, {"dense": _dense_replica, "experts": _expert_replica}),
)
def test_data_parallel_replicas_share_a_daemon_and_nothing_else(
    tiny_model: Path, daemon: DaemonProcess, ranks: int, replica: Callable[[int], dict]
) -> None:
    at = daemon.ipc
    replicas = [engine_at(tiny_model, at, ranks, parallel_config=replica(n)) for n in range(2)]
    for toy in replicas:
        wait_attached(toy, at)
    assert replicas[0].half._identity.namespace == replicas[1].half._identity.namespace
    asked = prompts(5, 8)
    for turn, prompt in enumerate(asked):
        serve(replicas[turn % 2], [prompt])
        assert not total(replicas[1 - turn % 2], names.HIT_TOKENS, Tier.CPU.value)
        loaded = total(replicas[1 - turn % 2], names.LOADED_BLOCKS, REMOTE)
        serve(replicas[1 - turn % 2], [prompt])
        now = total(replicas[1 - turn % 2], names.LOADED_BLOCKS, REMOTE)
        assert now - loaded == whole_blocks([prompt])
    # Both at once, each with its own order of steps.
    rng = random.Random(5)
    for toy in replicas:
        toy.drop_gpu_cache()
    ids = [{toy.add(prompt, 4): prompt for prompt in asked} for toy in replicas]
    while any(toy.scheduler.has_requests() or toy._in_flight for toy in replicas):
        rng.choice(replicas).step()
    for toy, of_toy in zip(replicas, ids, strict=True):
        for request, prompt in of_toy.items():
            assert toy.finished[request].tokens == play(prompt, 4)[0]
        toy.assert_at_rest()
    replicas[0].close()  # the other goes on
    replicas[1].half.index.clear()
    replicas[1].drop_gpu_cache()
    serve(replicas[1], asked)
    replicas[1].close()
    eventually(lambda: leases_of(daemon) == 0)
