"""Claims: who computes a block, and how long others are told to wait for it."""

from __future__ import annotations

import pytest

from tests.daemon.conftest import Connect, StartDaemon
from tests.daemon.raw_client import key
from tests.patience import eventually
from vllm_tiered_kv.core.store import StoreKey
from vllm_tiered_kv.server.requests import claims as claims_module
from vllm_tiered_kv.server.requests.claims import Claims
from vllm_tiered_kv.wire import messages as wire

WIDTH = 16  # a key without the suffix of a rank
ONE, OTHER = bytes([1]) * 16, bytes([2]) * 16


def keys(count: int, start: int = 0) -> list[bytes]:
    return [key(n)[:WIDTH] for n in range(start, start + count)]


def claim(names: list[bytes], owner: bytes, ttl_ms: int) -> wire.Claim:
    return wire.Claim(WIDTH, names, owner, ttl_ms)


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def claims(now: list[float]) -> Claims:
    return Claims(lambda: now[0])


def names(count: int, start: int = 0) -> list[StoreKey]:
    return [StoreKey(name) for name in keys(count, start)]


def test_second_client_learns_how_many_and_how_long(start: StartDaemon, connect: Connect) -> None:
    endpoint = start().endpoint
    first, second = connect(endpoint), connect(endpoint)
    assert first.ask(claim(keys(8), ONE, 60_000)) == wire.ClaimReply(8, 0, 0)
    reply = second.ask(claim(keys(20), OTHER, 60_000))
    assert (reply.count, reply.others) == (0, 8)
    assert 50_000 < reply.wait_ms <= 60_000
    assert second.stats()["claims"] == 8
    assert second.ask(claim(keys(20), ONE, 60_000)).count == 20, "another session of one owner"
    assert second.ask(claim(keys(20), OTHER, 0)).count == 0, "it has none"
    assert second.ask(claim(keys(20), ONE, 0)).count == 20
    assert first.ask(claim(keys(8), OTHER, 1)) == wire.ClaimReply(8, 0, 0)
    eventually(lambda: first.stats()["claims"] == 0)


def test_namespaces_have_claims_of_their_own(start: StartDaemon, connect: Connect) -> None:
    endpoint = start().endpoint
    first, second = connect(endpoint), connect(endpoint, namespace=bytes([7]) * 32)
    assert first.ask(claim(keys(8), ONE, 60_000)).count == 8
    assert second.ask(claim(keys(8), OTHER, 60_000)).count == 8


def test_claim_behind_free_blocks_is_reported_in_full(claims: Claims) -> None:
    assert claims.take(names(4, start=4), ONE, 5.0) == (4, 0, 0.0)
    assert claims.take(names(10), OTHER, 9.0) == (4, 4, 5.0)


def test_claim_that_has_ended_is_free(claims: Claims, now: list[float]) -> None:
    claims.take(names(4), ONE, 5.0)
    now[0] += 5.0
    assert claims.take(names(4), OTHER, 5.0) == (4, 0, 0.0)
    claims.expire()
    assert len(claims) == 4
    now[0] += 5.0
    claims.expire()
    assert len(claims) == 0


def test_extended_claim_does_not_end_before(claims: Claims, now: list[float]) -> None:
    claims.take(names(4), ONE, 5.0)
    now[0] += 3.0
    assert claims.take(names(4), ONE, 5.0) == (4, 0, 0.0)
    now[0] += 3.0
    assert claims.take(names(4), OTHER, 5.0) == (0, 4, 2.0)


def test_full_table_grants_no_claims_and_causes_no_waits(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_MAX_CLAIMS", 6)
    assert claims.take(names(4), ONE, 5.0) == (4, 0, 0.0)
    assert claims.take(names(4, start=10), OTHER, 5.0) == (2, 0, 0.0)
    assert claims.take(names(4), ONE, 5.0) == (4, 0, 0.0), "extended"
    assert len(claims) == 6


def test_repeated_keys_are_released_once(claims: Claims) -> None:
    claims.take(names(2), ONE, 5.0)
    assert claims.release([*names(2), *names(2)], ONE) == 2
