"""Ways to a wrong token, a lost block or a waiting request that only daemons open up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from tests.engine.toy_asking import ask, seeded_prompt, total
from tests.engine.toy_engine import ToyEngine, play
from tests.engine.toy_groups import ToyGroup
from tests.remote.faulty_daemon import FaultyDaemon, forgetful
from vllm_tiered_kv.core.tiers import Tier
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.wire.messages import Get

pytestmark = pytest.mark.engine

CPU, REMOTE = Tier.CPU.value, Tier.REMOTE.value


def engine(model: Path, daemon: FaultyDaemon, **settings) -> ToyEngine:
    extra = {"remote": daemon.address, "remote_lookup_timeout": 5, **settings.pop("extra", {})}
    return ToyEngine(model, extra_config=extra, **settings)


def serve(toy: ToyEngine, asked: list[int], count: int = 3) -> None:
    ask(toy, asked, count)
    toy.assert_at_rest()


def test_blocks_a_daemon_lost_are_kept_when_they_are_computed_again(tiny_model: Path) -> None:
    """A neighbour's blocks are not kept twice; but now there is no first copy."""
    with FaultyDaemon(forgetful) as daemon:
        toy = engine(tiny_model, daemon)
        toy.half.remote.keep_copies = False  # as if it were on this host
        serve(toy, seeded_prompt(1, 41))
        assert total(toy, names.LOAD_FAILURES, REMOTE) == 1
        assert total(toy, names.STORED_BLOCKS, CPU) >= 10
        assert len(daemon.blocks) >= 10
        toy.close()


def test_daemons_failure_is_known_as_such_though_another_rank_ends_later(
    tiny_model: Path,
) -> None:
    """vLLM holds a report back until every rank has made it; what a worker says beside it comes
    at once. What the CPU tier had of the load is still good."""
    with FaultyDaemon() as daemon:
        toy = engine(tiny_model, daemon)
        asked = seeded_prompt(2, 61)
        serve(toy, asked[:33])
        toy.drop_gpu_cache()
        daemon.fault = forgetful
        held_back: list[KVConnectorTransferResults] = []
        results_of_first_rank = toy.worker.get_transfer_results

        def results_of_both_ranks(finished: set[str]) -> KVConnectorTransferResults:
            held_back.append(results_of_first_rank(finished))
            if len(held_back) <= 4:
                return KVConnectorTransferResults()
            return held_back.pop(0)

        toy.worker.get_transfer_results = results_of_both_ranks
        in_tier = len(toy.half.index)
        serve(toy, asked)
        assert total(toy, names.LOAD_FAILURES, REMOTE) == 1
        assert total(toy, names.LOAD_FAILURES, CPU) == 0
        assert total(toy, names.LOADED_BLOCKS, CPU) == 8  # at the second attempt
        assert len(toy.half.index) > in_tier
        toy.close()


@pytest.mark.parametrize("aborted", [False, True], ids=["goes-on", "aborted"])
def test_blocks_built_on_anothers_failed_load_do_not_reach_a_daemon(
    tiny_model: Path, aborted: bool
) -> None:
    """The store of such a block may be reported in the very step that tells of the failure. What a
    daemon has once, every engine that shares it would read."""
    with FaultyDaemon() as daemon:
        first = engine(tiny_model, daemon)
        first.copier.max_delay = 0
        asked = seeded_prompt(3, 41)
        request = first.add(asked, 3)
        # The other connector "loads" what this step computes: nothing is stored before the next.
        plan_stores, first.half._plan_stores = first.half._plan_stores, lambda *_: None
        while first.requests[request].num_computed_tokens < 32:
            first.step()
        first.half._plan_stores = plan_stores
        (table,) = first.scheduler.kv_cache_manager.get_block_ids(request)
        for cache in first.caches:
            cache[table[3:8]] = -7  # what the failed load left there
        first._forward = lambda *_: [3]
        output = first.scheduler.schedule()
        assert output.num_scheduled_tokens
        result = first._execute(output)
        del first._forward
        result.kv_connector_output.invalid_block_ids = {table[3]}
        if aborted:
            first.abort(request)
        first.scheduler.update_from_output(output, result)
        assert not first.half.remote.puts._next, "blocks that may hold something else are sent"
        first.run()
        assert aborted or first.finished[request].tokens == play(asked, 3)[0]
        first.assert_at_rest()
        first.close()

        second = engine(tiny_model, daemon)
        serve(second, asked)  # a wrong byte would be seen by the model
        assert total(second, names.LOADED_BLOCKS, REMOTE) == (0 if aborted else 10)
        second.close()


def test_worker_whose_blocks_are_of_another_size_is_refused(tiny_model: Path) -> None:
    """Only a daemon notices where vLLM carries no handshake, as inside a MultiConnector."""
    with FaultyDaemon() as daemon:
        toy = engine(tiny_model, daemon)
        toy.worker.worker_half.block_bytes = (128,)
        serve(toy, seeded_prompt(4, 41))
        hellos = [request for request in daemon.seen if request.op == "hello"]
        assert {tuple(hello.block_bytes) for hello in hellos} == {(96,), (128,)}
        toy.close()


def test_blocks_loading_during_a_reset_are_not_stored_after_it(tiny_model: Path) -> None:
    """vLLM gives such blocks their hash only when the load has ended, and then serves them."""
    with FaultyDaemon() as daemon:
        first = engine(tiny_model, daemon)
        asked = seeded_prompt(5, 41)
        serve(first, asked)
        first.close()
        toy = engine(tiny_model, daemon, extra={"remote_load_timeout": 30})
        daemon.delay = lambda request: 0.5 if isinstance(request, Get) else 0.0
        loading = toy.add(asked, 3)
        while not toy.half.ledger.is_loading(loading):
            toy.step()
        toy.scheduler.reset_connector_cache()
        toy.run()
        assert toy.reported_loads == [loading]
        serve(toy, [*asked, 7, 8, 9, 10, 11, 12])
        assert total(toy, names.STORED_BLOCKS, CPU) == 0
        toy.drop_gpu_cache()
        serve(toy, asked)
        assert total(toy, names.STORED_BLOCKS, CPU) >= 10
        toy.close()


def test_blocks_sent_to_a_daemon_before_a_reset_are_not_found_after_it(tiny_model: Path) -> None:
    """It cannot be told to forget: other engines still use those blocks. The keys change."""
    with FaultyDaemon() as daemon:
        toy, asked = engine(tiny_model, daemon), seeded_prompt(6, 41)
        serve(toy, asked)
        sent = len(daemon.blocks)
        assert sent >= 10
        toy.scheduler.reset_connector_cache()
        toy.drop_gpu_cache()
        serve(toy, asked)
        assert total(toy, names.HIT_TOKENS) == 0
        assert len(daemon.blocks) >= 2 * sent - 1  # what was computed anew is known by other keys
        toy.close()
        other = engine(tiny_model, daemon)
        serve(other, asked)
        assert total(other, names.HIT_TOKENS, REMOTE) == 40
        other.close()


@pytest.mark.parametrize(
    ("mode", "found"),
    [(KVQuantMode.INT8_PER_TOKEN_HEAD, 0), (KVQuantMode.FP8_PER_TENSOR, 40)],
    ids=["a scale for each token", "a scale for all"],
)
def test_no_load_starts_before_a_first_forward_that_clears_the_cache(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, mode: KVQuantMode, found: int
) -> None:
    """Where scales lie in the cache beside their numbers, vLLM's Triton back-end sets all of them
    to one when it first comes to a layer; without graphs, that is the first request."""
    plain = ToyGroup.spec

    def quantised(group: ToyGroup) -> AttentionSpec:
        return replace(plain.fget(group), kv_quant_mode=mode)

    monkeypatch.setattr(ToyGroup, "spec", property(quantised))
    with FaultyDaemon() as daemon:
        first = engine(tiny_model, daemon)
        asked = [seeded_prompt(seed, 41) for seed in (7, 8)]
        for ids in asked:
            serve(first, ids)
        first.close()
        toy = engine(tiny_model, daemon)
        forward = toy._forward

        def first_forward(request_id: str, count: int) -> list[int]:
            toy._forward = forward
            for cache in toy.caches if mode.is_per_token_head else ():
                cache[:] = -1
            return forward(request_id, count)

        toy._forward = first_forward
        serve(toy, asked[0])
        assert total(toy, names.HIT_TOKENS, REMOTE) == found
        serve(toy, asked[1])
        assert total(toy, names.HIT_TOKENS, REMOTE) == found + 40
        toy.close()
