"""vLLM's contract with a third party's connector, checked at every call of every step.

A `ToyEngine` whose two halves live as if in two processes: whatever crosses between scheduler and
worker is pickled, as vLLM's executors do. Each call of the scheduler to the connector is written
down, and when the engine comes to rest, every container in the scheduler and in the connector must
be as large as it was when nothing had been asked yet.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.engine.toy_engine import ToyEngine, play

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS

# What these hold outlives requests by design: cached blocks, blocks from before a reset (never more
# than the GPU has), measured speeds, counters.
_LASTING = {
    "block_pool",
    "index",
    "_stale_blocks",
    "recorder",
    "prev_step_scheduled_req_ids",
    "_usable_bytes",
    "_logged_reasons",
    "_ready",
}
_SIZED = (dict, set, frozenset, list, deque, Counter)


@dataclass
class Calls:
    """What vLLM's scheduler asked of the connector, by request."""

    asked: list[tuple[str, int | None, bool]] = field(default_factory=list)
    admitted: list[tuple[str, int]] = field(default_factory=list)
    promised: Counter[str] = field(default_factory=Counter)  # asynchronous loads vLLM waits for
    finished: list[str] = field(default_factory=list)

    def loads_of(self, request_id: str) -> int:
        """Loads vLLM was promised for a request and has given blocks for."""
        return sum(1 for name, tokens in self.admitted if name == request_id and tokens)


@dataclass
class ContractEngine(ToyEngine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = Calls()
        self.computed: Counter[str] = Counter()  # tokens vLLM had computed, by request
        self._listen()
        self._at_start = self._sizes()

    # ---- both sides of the process boundary ----------------------------------------------------

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.computed.update(output.num_scheduled_tokens)
        told = pickle.loads(pickle.dumps(output))
        return pickle.loads(pickle.dumps(super()._execute(told)))

    def _listen(self) -> None:
        connector, calls = self.scheduler.connector, self.calls
        ask = connector.get_num_new_matched_tokens
        admit = connector.update_state_after_alloc
        finish = connector.request_finished_all_groups

        def asked(request: Any, computed: int) -> tuple[int | None, bool]:
            tokens, is_async = ask(request, computed)
            calls.asked.append((request.request_id, tokens, is_async))
            assert computed % self.alignment == 0
            assert tokens is None or tokens % self.alignment == 0
            assert tokens is None or computed + tokens < request.num_tokens, "a full hit"
            assert not (is_async and not tokens), "an asynchronous load of nothing"
            return tokens, is_async

        def admitted(request: Any, blocks: Any, tokens: int) -> None:
            calls.admitted.append((request.request_id, tokens))
            if tokens:
                answers = (a for a in reversed(calls.asked) if a[0] == request.request_id)
                calls.promised[request.request_id] += next(answers)[2]
            admit(request, blocks, tokens)

        def finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
            calls.finished.append(request.request_id)
            delay, parameters = finish(request, block_ids)
            assert (delay, parameters) == (False, None), "blocks are never kept past their request"
            return delay, parameters

        connector.get_num_new_matched_tokens = asked
        connector.update_state_after_alloc = admitted
        connector.request_finished_all_groups = finished

    # ---- what a test asks -----------------------------------------------------------------------

    def ask(self, ids: Sequence[int], count: int = 6, **request: Any) -> str:
        """One request from its arrival to its end, with the right tokens."""
        request_id = self.add(ids, count, **request)
        self.run()
        self.assert_said(request_id, ids, count, request.get("salt", ""))
        return request_id

    def assert_said(
        self, request_id: str, ids: Sequence[int], count: int = 6, salt: str = ""
    ) -> None:
        expected = play(ids, count, salt)[0]
        finished = self.finished[request_id]
        if finished.status is RequestStatus.FINISHED_ABORTED:
            expected = expected[: len(finished.tokens)]
        assert finished.tokens == expected

    def until_loading(self, request_id: str) -> None:
        """Steps until vLLM has set the request aside for a load."""
        for _ in range(50):
            if self.requests[request_id].status is LOADING:
                return
            self.step()
        raise AssertionError(f"{request_id} never waited for a load")

    def assert_conforms(self) -> None:
        """All requests have ended: nothing is left of them, and each load was reported once."""
        self.assert_at_rest()
        assert Counter(self.calls.finished) == Counter(self.requests.keys())
        assert Counter(self.reported_loads) == +self.calls.promised
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            assert block.is_null or block.ref_cnt == 0
        grown = {
            name: (before, after)
            for name, after in self._sizes().items()
            if (before := self._at_start.get(name, 0)) != after
        }
        assert not grown, f"left over (was, is): {grown}"

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        scheduler, half = self.scheduler, self.half
        for name, owner in {
            "scheduler": scheduler,
            "kv_cache_manager": scheduler.kv_cache_manager,
            "coordinator": scheduler.kv_cache_manager.coordinator,
            **{
                f"group {number}": manager
                for number, manager in enumerate(
                    scheduler.kv_cache_manager.coordinator.single_type_managers
                )
            },
            "encoder_cache_manager": scheduler.encoder_cache_manager,
            "connector": scheduler.connector,
            "half": half,
            "ledger": half.ledger,
            "stores": half.stores,
            "loads": half.loads,
            "ahead": half.loads.step_policy,
            "load_policy": half.load_policy,
        }.items():
            for attribute, value in vars(owner).items():
                if attribute not in _LASTING and _is_container(value):
                    sizes[f"{name}.{attribute}"] = len(value)
        return sizes


def _is_container(value: object) -> bool:
    """Queues of vLLM's are classes of their own with a length."""
    if isinstance(value, _SIZED):
        return True
    return hasattr(value, "add_request") and hasattr(value, "__len__")
