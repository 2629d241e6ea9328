"""How a large put is cut into requests."""

from __future__ import annotations

import pytest

from vllm_tiered_kv.remote.transfers import (
    SMALL_WRITE_BYTES,
    WRITE_BYTES,
    _cut,
    _read_bytes,
    _write_bytes,
)
from vllm_tiered_kv.wire.messages import Limits

MIB = 1 << 20


def sizes(lengths: list[int], limits: Limits | None = None) -> list[int]:
    cut = list(_cut(range(len(lengths)), lengths, _write_bytes, limits or Limits()))
    assert [n for some in cut for n in some] == list(range(len(lengths)))  # all, in their order
    assert all(cut)
    return [sum(lengths[n] for n in some) for some in cut]


@pytest.mark.parametrize("nbytes", [MIB, MIB // 3, 4 * MIB])
def test_first_and_the_last_requests_are_small(nbytes: int) -> None:
    requests = sizes([nbytes] * (256 * MIB // nbytes))
    assert requests[0] <= SMALL_WRITE_BYTES
    assert requests[-1] <= SMALL_WRITE_BYTES
    assert max(requests) <= WRITE_BYTES
    assert len(requests) <= 256 * MIB // WRITE_BYTES + 6
    assert requests[1:] == sorted(requests[1:], reverse=True)


def test_blocks_larger_than_a_request_go_alone() -> None:
    assert sizes([32 * MIB, MIB, 32 * MIB]) == [32 * MIB, MIB, 32 * MIB]


def test_puts_are_split_within_the_limits_of_the_daemon() -> None:
    assert sizes([MIB] * 4, Limits(message_bytes=2 * MIB)) == [2 * MIB, 2 * MIB]
    assert sizes([1000] * 5, Limits(frames=2)) == [2000, 2000, 1000]
    assert sizes([]) == []


def test_reads_are_all_alike() -> None:
    cut = list(_cut(range(10), [MIB] * 10, _read_bytes, Limits()))
    assert [len(some) for some in cut] == [4, 4, 2]
