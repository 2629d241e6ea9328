"""Why requests compute their tokens: each cause really occurs, under vLLM's real schedulers."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_asking import ask, keys_of, seeded_prompt, total, workload
from tests.engine.toy_at_daemon import engine_at
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_groups import STATE
from tests.remote.faulty_daemon import FaultyDaemon
from vllm_tiered_kv.connector.scheduler.account import Account
from vllm_tiered_kv.connector.scheduler.miss_causes import MissCauses
from vllm_tiered_kv.connector.scheduler.remote_lookups import RemoteLookups
from vllm_tiered_kv.connector.scheduler.request_state import RequestState
from vllm_tiered_kv.metrics import names
from vllm_tiered_kv.remote.store import RemoteStore
from vllm_tiered_kv.wire.messages import Match

pytestmark = pytest.mark.engine

IDS = seeded_prompt(1, 42)  # ten whole blocks of four tokens, and two tokens


LOGGER = "vllm_tiered_kv.connector.scheduler.miss_causes"


class Explained:
    """A toy engine that keeps the account of each request."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self.responses: list[dict[str, Any]] = []
        finish = engine.scheduler.connector.request_finished_all_groups

        def spy(request: Any, block_ids: Any) -> Any:
            answer = finish(request, block_ids)
            self.responses.append(answer[1])
            return answer

        engine.scheduler.connector.request_finished_all_groups = spy

    def ask(self, ids: list[int], count: int = 1, salt: str = "", **control: Any) -> dict[str, Any]:
        """Sends a prompt and returns its account."""
        ask(self.engine, ids, count, salt, explain=True, **control)
        return self.last()

    def last(self) -> dict[str, Any]:
        answers = [answer for answer in self.responses if answer is not None]
        account = answers[-1]["tiered_kv"]["explain"]
        tiers = ("gpu", "cpu", "memory", "ssd", "backing", "computed")
        assert sum(account[tier] for tier in tiers) == account["prompt_tokens"]
        assert sum(miss["tokens"] for miss in account["missed"]) == account["computed"]
        return account

    def counted(self) -> dict[str, float]:
        """The computed tokens by cause."""
        samples = self.engine.half.recorder.samples(names.COMPUTED_TOKENS)
        return {cause: tokens for (cause,), tokens in samples.items()}


def causes(account: dict[str, Any]) -> dict[str, int]:
    return {miss["cause"]: miss["tokens"] for miss in account["missed"]}


def adapted(folder: Path) -> dict[str, Any]:
    """Arguments of a request with a LoRA adapter."""
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"1" * 64)
    return {"lora_request": LoRARequest("tune", 1, str(folder)), "model": "tune"}


def fill(engine: ToyEngine, prompts: int, seed: int = 100) -> None:
    """Stores other prompts of ten blocks each."""
    for number in range(prompts):
        ask(engine, seeded_prompt(seed + number, 41), 1)
        engine.drop_gpu_cache()


def test_first_request_was_never_stored_and_the_next_one_has_hits(
    tiny_model: Path, async_scheduling: bool
) -> None:
    explained = Explained(ToyEngine(tiny_model, async_scheduling))
    account = explained.ask(IDS)
    assert causes(account) == {"never_stored": 40, "partial_block": 2}
    assert causes(explained.ask(IDS)) == {"partial_block": 2}
    assert explained.last()["gpu"] == 40
    explained.engine.drop_gpu_cache()
    account = explained.ask(IDS)
    assert (account["gpu"], account["cpu"], causes(account)) == (0, 40, {"partial_block": 2})
    longer = explained.ask([*IDS[:40], *seeded_prompt(2, 10)])
    assert (longer["gpu"], causes(longer)) == (40, {"never_stored": 8, "partial_block": 2})
    assert explained.counted() == {"never_stored": 48, "partial_block": 8}
    explained.engine.assert_at_rest()


def test_account_is_only_in_the_response_of_a_request_that_asks(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model))
    ask(explained.engine, IDS, 1)
    assert explained.responses == [None]
    assert causes(explained.ask(IDS))
    assert total(explained.engine, names.REQUEST_CONTROLS, "explain") == 1


def test_evicted_blocks_are_named_with_tier_and_age_and_what_follows_was_never_stored(
    tiny_model: Path, async_scheduling: bool
) -> None:
    explained = Explained(ToyEngine(tiny_model, async_scheduling, cpu_blocks=20))
    engine = explained.engine
    ask(engine, IDS, 1)
    engine.drop_gpu_cache()
    fill(engine, 2)
    account = explained.ask([*IDS[:41], *seeded_prompt(2, 8)])
    first, second, _ = account["missed"]
    assert (first["cause"], first["tokens"], first["tier"]) == ("evicted", 40, "cpu")
    assert 0 <= first["seconds_ago"] < 600
    assert (second["cause"], second["tokens"]) == ("never_stored", 8)
    # It would have needed 10 blocks more than the 20 of the tier.
    assert total(engine, names.WOULD_HIT_TOKENS, "2x") == 40
    assert total(engine, names.WOULD_HIT_TOKENS, "4x") == 40
    engine.assert_at_rest()


def test_evicted_long_ago_would_be_held_by_the_larger_tier_only(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=20))
    ask(explained.engine, IDS, 1)
    explained.engine.drop_gpu_cache()
    fill(explained.engine, 6)
    assert causes(explained.ask(IDS)) == {"evicted": 40, "partial_block": 2}
    assert total(explained.engine, names.WOULD_HIT_TOKENS, "2x") == 0
    assert total(explained.engine, names.WOULD_HIT_TOKENS, "4x") == 40


def test_partly_evicted_prefix_hits_its_head(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=24))
    ask(explained.engine, IDS, 1)
    explained.engine.drop_gpu_cache()
    fill(explained.engine, 2)
    account = explained.ask(IDS)
    assert account["cpu"] == 16
    assert causes(account) == {"evicted": 24, "partial_block": 2}


def test_dropped_block_is_named_with_its_reason(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=8, extra_config={"pin_share": 1}))
    engine = explained.engine
    ask(engine, seeded_prompt(5, 33), 1, pin_seconds=3600)  # fills the tier
    ask(engine, IDS, 1)
    engine.drop_gpu_cache()
    miss = explained.ask(IDS)["missed"][0]
    assert (miss["cause"], miss["reason"], miss["tokens"]) == ("dropped", "tier_full", 40)
    engine.half.retention.reset()


def test_failed_copy_is_a_dropped_block(tiny_model: Path, async_scheduling: bool) -> None:
    explained = Explained(ToyEngine(tiny_model, async_scheduling))
    engine = explained.engine
    engine.copier.drop_stores = 1.0
    ask(engine, IDS, 1)
    engine.copier.drop_stores = 0.0
    engine.drop_gpu_cache()
    account = explained.ask(IDS)
    miss = account["missed"][0]
    assert (miss["cause"], miss["reason"]) == ("dropped", "copy_failed")
    assert miss["tokens"] == 40 - account["cpu"]


def test_block_that_another_request_computes_is_pending(tiny_model: Path) -> None:
    engine = ToyEngine(
        tiny_model, max_tokens_per_step=16, engine_args={"long_prefill_token_threshold": 4}
    )
    explained = Explained(engine)
    engine.add(IDS, 1)
    engine.step()
    engine.add(IDS, 1, control={"explain": True})
    engine.run()
    assert causes(explained.last())["pending"] > 0
    engine.assert_at_rest()


@pytest.mark.parametrize(
    ("control", "loaded", "missed"),
    [
        ({"load": False}, 0, 40),
        ({"max_load_tokens": 8}, 8, 32),
        ({"tiers": ["remote"]}, 0, 40),
    ],
)
def test_control_of_the_request_forbids_loads(
    tiny_model: Path, control: dict[str, Any], loaded: int, missed: int
) -> None:
    explained = Explained(ToyEngine(tiny_model))
    ask(explained.engine, IDS, 1)
    explained.engine.drop_gpu_cache()
    account = explained.ask(IDS, **control)
    assert account["cpu"] == loaded
    assert causes(account) == {"control": missed, "partial_block": 2}


def test_policy_that_never_loads_is_the_cause(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_KV_LOAD_POLICY", "never")
    explained = Explained(ToyEngine(tiny_model))
    ask(explained.engine, IDS, 1)
    explained.engine.drop_gpu_cache()
    assert causes(explained.ask(IDS)) == {"policy": 40, "partial_block": 2}


def test_verified_tokens_are_computed_for_verification(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model, extra_config={"verify_fraction": 1}))
    ask(explained.engine, IDS, 1)
    explained.engine.drop_gpu_cache()
    assert causes(explained.ask(IDS)) == {"verification": 40, "partial_block": 2}


def test_failed_load_moves_its_tokens_to_load_failed(tiny_model: Path, step_loads: str) -> None:
    explained = Explained(ToyEngine(tiny_model))
    engine = explained.engine
    ask(engine, IDS, 1)
    engine.drop_gpu_cache()
    engine.copier.fail_ahead = engine.copier.fail_every = 1.0
    account = explained.ask(IDS)
    assert total(engine, names.LOAD_FAILURES) == 1
    assert (account["cpu"], causes(account)) == (0, {"load_failed": 40, "partial_block": 2})
    assert explained.counted()["load_failed"] == 40


def test_state_that_was_not_kept_is_incomplete(tiny_model: Path) -> None:
    """vLLM keeps a recurrent state at few places; the tokens between them cannot be continued."""
    explained = Explained(ToyEngine(tiny_model, windows=(None, STATE), cpu_blocks=128))
    ids = seeded_prompt(1, 64)
    ask(explained.engine, ids, 1)
    explained.engine.drop_gpu_cache()
    account = explained.ask([*ids[:30], *seeded_prompt(2, 20)])
    assert causes(account) == {"incomplete": 28, "never_stored": 20, "partial_block": 2}


def test_evicted_window_is_named_though_the_tokens_are_held(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, windows=(None, 10), cpu_blocks=128)
    explained = Explained(engine)
    request = ask(engine, IDS, 1)
    engine.drop_gpu_cache()
    full, window = keys_of(engine, request)
    fill(engine, 12)
    held = sum(engine.half.index.are_readable(full)), sum(engine.half.index.are_readable(window))
    account = explained.ask(IDS)
    assert account["cpu"] < 40
    assert set(causes(account)) <= {"evicted", "incomplete", "never_stored", "partial_block"}, held
    assert causes(account).keys() & {"evicted", "incomplete"}


def test_replaced_adapter_is_the_cause(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model))
    engine = explained.engine
    ask(engine, IDS, 1)
    engine.drop_gpu_cache()
    request = engine.add(IDS, 1, control={"explain": True})
    engine.half._requests[request].lost_adapter = True
    engine.run()
    assert causes(explained.last()) == {"adapter_replaced": 40, "partial_block": 2}


def test_tail_that_was_not_stored_is_never_stored(tiny_model: Path) -> None:
    explained = Explained(ToyEngine(tiny_model, extra_config={"reuse_partial_tail": True}))
    assert causes(explained.ask(IDS)) == {"never_stored": 41, "partial_block": 1}
    explained.engine.drop_gpu_cache()
    account = explained.ask(IDS)
    assert (account["cpu"], causes(account)) == (41, {"partial_block": 1})


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"windows": (None, 10)},
        {"windows": (None, STATE)},
        {"windows": (None, 10), "block_sizes": (4, 8)},
        {"extra_config": {"reuse_partial_tail": True}},
        {"extra_config": {"verify_fraction": 0.5}},
    ],
    ids=["full", "window", "recurrent", "sizes", "tail", "verified"],
)
def test_accounts_add_up_in_a_busy_engine(
    tiny_model: Path,
    async_scheduling: bool,
    shape: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accounts: list[Account] = []
    admitted = MissCauses.admitted

    def checked(self: MissCauses, state: RequestState, *rest: Any) -> None:
        before, state.account = state.account, None
        admitted(self, state, *rest)
        account = state.account
        assert account is not None
        assert account.gpu + sum(account.loaded.values()) + account.computed == (
            state.request.num_tokens
        )
        accounts.append(account)
        state.account = before or account

    monkeypatch.setattr(MissCauses, "admitted", checked)
    engine = ToyEngine(tiny_model, async_scheduling, cpu_blocks=20, gpu_blocks=40, **shape)
    engine.copier.drop_stores = 0.1
    workload(engine, 3, 60)
    engine.assert_at_rest()
    assert len(accounts) >= 50
    assert len({miss.cause for account in accounts for miss in account.missed}) >= 3


# ---- other salts and adapters -------------------------------------------------------------------


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """The computed tokens of a cause according to the debug log."""
    caplog.set_level(logging.DEBUG, LOGGER)

    def tokens(cause: str) -> int:
        return sum(map(int, re.findall(rf"(\d+) computed \({cause}\)", caplog.text)))

    return tokens


def test_only_the_log_tells_of_another_salt(
    tiny_model: Path, async_scheduling: bool, logged: Callable[[str], int]
) -> None:
    explained = Explained(ToyEngine(tiny_model, async_scheduling))
    ask(explained.engine, IDS, 1, "mine")
    account = explained.ask(IDS, salt="theirs")
    assert logged("other_salt") == 40
    assert explained.counted() == {"never_stored": 80, "partial_block": 4}
    never_asked = explained.ask(seeded_prompt(2, 42), salt="theirs")
    assert account == never_asked


@pytest.mark.parametrize("salt", ["", "mine"])
def test_other_adapter_is_told_to_those_with_the_same_salt(
    tiny_model: Path, tmp_path: Path, salt: str, logged: Callable[[str], int]
) -> None:
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=128))
    engine, tune = explained.engine, adapted(tmp_path)
    explained.ask(IDS, salt=salt)
    # What another salt holds must not change the answer either.
    ask(engine, IDS, 1, "theirs")
    engine.add(IDS, 1, salt, control={"explain": True}, **tune)
    engine.run()
    assert causes(explained.last()) == {"other_adapter": 40, "partial_block": 2}
    engine.add(IDS, 1, "third", control={"explain": True}, **tune)
    engine.run()
    assert causes(explained.last()) == {"never_stored": 40, "partial_block": 2}
    counted = {"never_stored": 120, "other_adapter": 40, "partial_block": 8}
    assert explained.counted() == counted
    assert logged("other_salt") == 80
    engine.drop_gpu_cache()
    assert explained.ask([*IDS[:20], *seeded_prompt(2, 22)], salt=salt)["cpu"] == 20
    assert explained.counted()["other_adapter"] == 40


@pytest.mark.parametrize(
    "shape",
    [
        {"windows": (10,)},
        {"windows": (None, 10), "block_sizes": (4, 8)},
        {"windows": (None, STATE)},
        {"extra_config": {"reuse_partial_tail": True}},
    ],
    ids=["window", "sizes", "recurrent", "tail"],
)
def test_other_salt_is_found_with_any_groups(
    tiny_model: Path, shape: dict[str, Any], logged: Callable[[str], int]
) -> None:
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=128, **shape))
    ask(explained.engine, IDS, 1, "mine")
    explained.ask(IDS, salt="theirs")
    assert logged("other_salt") >= 40
    explained.ask(IDS[:3], salt="theirs")  # shorter than a block
    explained.engine.assert_at_rest()


def test_other_salt_counts_while_its_first_block_is_stored(
    tiny_model: Path, logged: Callable[[str], int]
) -> None:
    explained = Explained(ToyEngine(tiny_model))
    engine = explained.engine
    engine.copier.store_delay = 1000
    engine.add(IDS, 1, "mine")
    engine.step()
    engine.add(IDS, 1, "theirs")
    engine.step()
    assert logged("other_salt") == 40


@pytest.mark.parametrize(("before", "after", "counted"), [(0, 14, 40), (0, 15, 0), (14, 14, 40)])
def test_only_the_last_sixteen_scopes_are_looked_up(
    tiny_model: Path, before: int, after: int, counted: int, logged: Callable[[str], int]
) -> None:
    """The own one is among them."""
    explained = Explained(ToyEngine(tiny_model, cpu_blocks=256))
    engine = explained.engine
    ask(engine, IDS, 1, "mine")
    for number in range(before):
        ask(engine, seeded_prompt(2, 9), 1, f"before {number}")
    ask(engine, seeded_prompt(3, 9), 1, "mine")
    for number in range(after):
        ask(engine, seeded_prompt(2, 9), 1, f"after {number}")
    already = logged("other_salt")
    explained.ask(IDS, salt="theirs")
    assert logged("other_salt") == already + counted


def test_scope_from_before_a_change_of_weights_does_not_count(
    tiny_model: Path, logged: Callable[[str], int]
) -> None:
    explained = Explained(ToyEngine(tiny_model))
    ask(explained.engine, IDS, 1, "mine")
    explained.engine.half._key_maker.new_epoch(b"1" * 16)  # and the tier still has the blocks
    explained.ask(IDS, salt="theirs")
    assert logged("other_salt") == 0
    explained.ask(IDS, salt="third")
    assert logged("other_salt") == 40


def test_debug_log_has_a_line_for_each_request(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ToyEngine(tiny_model)
    with caplog.at_level(logging.DEBUG, LOGGER):
        request = ask(engine, IDS, 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert line == (
        f"request {request}: 42 prompt tokens: 40 computed (never_stored), "
        "2 computed (partial_block)"
    )


def test_account_is_a_span_in_the_trace_of_its_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace as api
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(api, "get_tracer", provider.get_tracer)
    endpoint = {"otlp_traces_endpoint": "http://127.0.0.1:1"}
    engine = ToyEngine(tiny_model, engine_args=endpoint)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    for request_headers, salt in ((headers, ""), (None, ""), (headers, "theirs")):
        engine.add(IDS, 1, salt, trace_headers=request_headers)
        engine.run()
    span, of_other_salt = spans.get_finished_spans()
    assert of_other_salt.attributes == span.attributes
    assert span.name == "tiered_kv"
    assert f"{span.context.trace_id:032x}" == trace_id
    assert span.attributes == {
        "tiered_kv.prompt_tokens": 42,
        "tiered_kv.gpu": 0,
        "tiered_kv.computed": 42,
        "tiered_kv.computed.never_stored": 40,
        "tiered_kv.computed.partial_block": 2,
    }


# ---- daemons ------------------------------------------------------------------------------------


def test_loads_from_a_daemon_are_named_by_its_tier(tiny_model: Path, daemon: DaemonProcess) -> None:
    engine = engine_at(tiny_model, daemon.endpoint)
    ask(engine, IDS, 1)
    engine.close()
    explained = Explained(engine_at(tiny_model, daemon.endpoint))
    account = explained.ask(IDS)
    assert (account["memory"], causes(account)) == (40, {"partial_block": 2})
    explained.engine.drop_gpu_cache()
    account = explained.ask(seeded_prompt(3, 42))
    assert causes(account) == {"never_stored": 40, "partial_block": 2}
    other = explained.ask(seeded_prompt(4, 42), tiers=["cpu"])
    assert causes(other) == {"control": 40, "partial_block": 2}
    explained.engine.close()


def test_block_that_a_daemon_lost_too_was_evicted_there(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    engine = engine_at(tiny_model, daemon.endpoint, cpu_blocks=20)
    explained = Explained(engine)
    request = ask(engine, IDS, 1)
    assert total(engine, names.STORED_BLOCKS, "remote") == 10
    engine.drop_gpu_cache()
    fill(engine, 3)
    assert explained.ask(IDS)["memory"] == 40
    engine.drop_gpu_cache()
    fill(engine, 3, seed=200)
    engine.half.remote._lookups._delete(keys_of(engine, request)[0])  # as if the daemon evicted it
    miss = explained.ask(IDS)["missed"][0]
    assert (miss["cause"], miss["tier"], miss["tokens"]) == ("evicted", "remote", 40)
    engine.close()


def test_daemon_that_does_not_answer_in_time_is_a_lookup_timeout(
    tiny_model: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    match = RemoteLookups._match

    def match_later(self: RemoteLookups, *arguments: Any) -> Any:
        may_answer.wait(60)
        return match(self, *arguments)

    monkeypatch.setattr(RemoteLookups, "_match", match_later)
    engine = engine_at(tiny_model, daemon.endpoint, extra={"remote_lookup_timeout": 0.05})
    explained = Explained(engine)
    assert causes(explained.ask(IDS)) == {"lookup_timeout": 40, "partial_block": 2}
    assert explained.last()["missed"][0]["tier"] == "remote"
    assert total(engine, names.LOOKUPS, "remote", "timeout") == 1
    may_answer.set()
    engine.close()


def test_daemon_that_answers_too_late_is_no_miss(tiny_model: Path) -> None:
    """The deadline of the query and that of the lookup pass at the same time."""
    with FaultyDaemon() as daemon:
        daemon.delay = lambda request: 60.0 if isinstance(request, Match) else 0.0
        engine = engine_at(tiny_model, daemon.address, extra={"remote_lookup_timeout": 0.05})
        explained = Explained(engine)
        for number in range(4):
            explained.ask(seeded_prompt(number, 42))
            assert causes(explained.last()).keys() & {"lookup_timeout", "daemon_unavailable"}
        assert total(engine, names.LOOKUPS, "remote", "miss") == 0
        engine.close()


def test_daemon_that_is_gone_is_unavailable(tiny_model: Path, daemon: DaemonProcess) -> None:
    engine = engine_at(tiny_model, daemon.endpoint)
    ask(engine, IDS, 1)
    explained = Explained(engine)
    engine.half.index.clear()
    engine.drop_gpu_cache()
    daemon.kill()
    seen = set()
    for _ in range(6):  # until the breaker is open
        seen |= set(causes(explained.ask(IDS, store=False)))
        engine.drop_gpu_cache()
    assert seen <= {"lookup_timeout", "daemon_unavailable", "partial_block"}
    assert "daemon_unavailable" in causes(explained.last())
    engine.close()


def test_blocks_of_the_same_model_in_other_namespaces_are_logged_once(
    tiny_model: Path, tmp_path: Path, daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    other_model = tmp_path / "other"
    shutil.copytree(tiny_model, other_model)
    for model, name in ((tiny_model, "a"), (tiny_model, "b"), (tiny_model, ""), (other_model, "c")):
        engine = engine_at(model, daemon.endpoint, extra={"namespace": name})
        ask(engine, IDS, 1)
        engine.close()
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm_tiered_kv"):
        engine = engine_at(tiny_model, daemon.endpoint)
        end = time.monotonic() + 30
        while "other namespaces" not in caplog.text:  # before the first request
            assert time.monotonic() < end
            time.sleep(0.01)
        for number in range(3):
            ask(engine, seeded_prompt(number, 42), 1)
        engine.close()
        line = f"the daemon at {daemon.endpoint} holds 20 blocks of {tiny_model} under 2 other"
        assert caplog.text.count(line) == caplog.text.count("other namespaces") == 1


def test_other_namespaces_of_a_daemon_that_answers_later_are_logged_once(
    tiny_model: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = RemoteStore.other_namespaces
    unanswered: list[bool] = []

    def answer_the_second_time(store: RemoteStore, deadline: float) -> list[int] | None:
        return None if unanswered and unanswered.pop() else answer(store, deadline)

    monkeypatch.setattr(RemoteStore, "other_namespaces", answer_the_second_time)
    ssd = ("--ssd", str(folder / "ssd"), "--ssd-space", "128MiB")
    caplog.set_level(logging.INFO, "vllm_tiered_kv")

    def ask_until_it_answers(engine: ToyEngine, seed: int) -> None:
        answered, end = total(engine, names.LOOKUPS, "remote", "miss"), time.monotonic() + 30
        while (
            total(engine, names.LOOKUPS, "remote", "miss") == answered
            or "other namespaces" not in caplog.text
        ):
            assert time.monotonic() < end
            seed += 1
            ask(engine, seeded_prompt(seed, 42), 1)

    with DaemonProcess(folder, "--memory", "16MiB", *ssd) as daemon:
        other = engine_at(tiny_model, daemon.endpoint, extra={"namespace": "a"})
        ask(other, IDS, 1)
        other.close()
        daemon.terminate()
        unanswered.append(True)
        engine = engine_at(tiny_model, daemon.endpoint)
        ask(engine, IDS, 1)
        for seed in (1000, 2000):
            daemon.restart()
            ask_until_it_answers(engine, seed)
            daemon.kill()
        engine.close()
    assert not unanswered
    assert caplog.text.count("holds 10 blocks of") == caplog.text.count("other namespaces") == 1
