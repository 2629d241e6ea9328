"""Claims of engines at daemons that share the blocks of a prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.patience import eventually
from vllm_tiered_kv.connector.scheduler.remote_claims import RemoteClaims
from vllm_tiered_kv.core.key import BlockKey
from vllm_tiered_kv.remote.address import EngineIdentity
from vllm_tiered_kv.remote.placement import Cluster, placed_runs
from vllm_tiered_kv.remote.store import ClaimResult

COUNT = 1500


@pytest.fixture(params=[1, 3])
def engines(
    folder: Path, request: pytest.FixtureRequest
) -> Iterator[list[tuple[RemoteClaims, Cluster]]]:
    """Two engines with the same daemons."""
    with ExitStack() as stack:
        daemons = []
        for number in range(request.param):
            place = folder / str(number)
            place.mkdir()
            daemons.append(stack.enter_context(DaemonProcess(place)).endpoint)
        made = []
        for name in ("one", "other"):
            cluster = Cluster(daemons, EngineIdentity(bytes(32), (4096,), "any", name))
            stack.callback(cluster.close)
            made.append((RemoteClaims(cluster, 30.0), cluster))
            stack.callback(made[-1][0].close)
        yield made


def chain(seed: int) -> list[BlockKey]:
    rng = random.Random(seed)
    return [BlockKey(rng.randbytes(17)) for _ in range(COUNT)]


def test_other_engine_learns_what_is_computed_until_it_is_released(
    engines: list[tuple[RemoteClaims, Cluster]],
) -> None:
    (one, _), (other, cluster) = engines
    keys = chain(1)

    def told_to_other() -> ClaimResult | None:
        answer = other.claim(keys, 200, 30.0).result(30)
        return answer if answer.others else None

    # On a busy machine the first calls of an engine may end before they have a connection.
    eventually(lambda: one.claim(keys[:1000], 10, 30.0).result(30).count)
    answer = eventually(told_to_other)
    assert answer.count == 0
    # The daemon of the first block knows of no blocks that lie elsewhere behind its last one.
    runs = list(placed_runs(cluster, keys[:1000], 200))
    assert answer.others == max(stop for _, stop, server in runs if server is runs[0][2]) - 200
    assert 20.0 < answer.wait_s <= 30.0
    assert other.claim(keys, 1000, 30.0).result(30).count > 0, "nobody computes those"
    one.release(keys[:1000], 10)
    assert one.claim(chain(2), 0, 30.0).result(30).count > 0  # after the release
    assert other.claim(keys, 200, 30.0).result(30).count > 0


def test_unreachable_daemons_claim_nothing(folder: Path) -> None:
    cluster = Cluster(
        [f"ipc://{folder}/nobody.sock"], EngineIdentity(bytes(32), (4096,), "any", "engine")
    )
    claims = RemoteClaims(cluster, 1.0)
    assert claims.claim(chain(1), 0, 30.0).result(30) == ClaimResult()
    claims.close()
    assert claims.claim(chain(1), 0, 30.0).result(0) == ClaimResult()
    cluster.close()
