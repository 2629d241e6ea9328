"""Engines with a Mooncake Store or a Redis behind their CPU tier, without a daemon."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.toy_asking import total
from tests.engine.toy_at_daemon import REMOTE, engine_at, prompts, serve, whole_blocks
from tests.patience import eventually
from tests.stores.mooncake_servers import MemoryUse, mooncake_servers
from tests.stores.redis_servers import redis_server
from vllm_tiered_kv.metrics import names

pytestmark = pytest.mark.engine

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["mooncake", "redis"])
def shared_store(request: pytest.FixtureRequest) -> Iterator[str]:
    with mooncake_servers() if request.param == "mooncake" else redis_server() as servers:
        yield servers.url


@pytest.fixture
def url(shared_store: str) -> str:
    """With blocks of its own for each test."""
    separator = "&" if "?" in shared_store else "?"
    return f"{shared_store}{separator}prefix=test-{next(_numbers)}"


def test_second_engine_is_served_what_the_first_one_stored(
    tiny_model: Path, url: str, async_scheduling: bool
) -> None:
    asked = prompts(1, 6)
    first = engine_at(tiny_model, url, async_scheduling=async_scheduling)
    serve(first, asked)
    assert total(first, names.LOADED_BLOCKS) == 0
    assert total(first, names.STORED_BLOCKS, REMOTE) >= whole_blocks(asked)
    first.close()
    second = engine_at(tiny_model, url, async_scheduling=async_scheduling)
    serve(second, asked)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    assert total(second, names.LOAD_FAILURES) == 0
    second.half.stats()
    assert total(second, names.DAEMON_UP, url) == 1
    second.close()


def test_blocks_move_between_the_memory_of_the_worker_and_mooncake(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = MemoryUse(monkeypatch)
    asked = prompts(6, 6)
    with mooncake_servers() as servers:
        for loaded in (0, whole_blocks(asked)):
            before = len(use.moved)
            toy = engine_at(tiny_model, servers.url)
            serve(toy, asked)
            assert total(toy, names.LOADED_BLOCKS, REMOTE) == loaded
            assert len(use.moved) >= before + whole_blocks(asked)
            toy.close()
    assert use.is_registered()


@pytest.mark.slow
def test_ranks_load_their_own_shards(tiny_model: Path, url: str) -> None:
    asked = prompts(2, 4)
    first = engine_at(tiny_model, url, ranks=2)
    serve(first, asked)
    first.close()
    second = engine_at(tiny_model, url, ranks=2)
    serve(second, asked)
    assert total(second, names.LOADED_BLOCKS, REMOTE) == whole_blocks(asked)
    second.close()


def test_node_killed_during_loads_and_stores_costs_no_wrong_token(tiny_model: Path) -> None:
    """Blocks have one replica, so those of the node are lost."""
    with mooncake_servers() as servers:
        asked = prompts(3, 24)
        first = engine_at(tiny_model, servers.url)
        serve(first, asked)
        first.close()
        second = engine_at(tiny_model, servers.url, extra={"load_policy": "always"})

        def kill() -> None:
            eventually(lambda: total(second, names.LOADED_BLOCKS, REMOTE))
            servers.nodes[0].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        serve(second, asked)
        killer.join()
        serve(second, prompts(4, 6))
        assert total(second, names.LOADED_BLOCKS, REMOTE) < whole_blocks(asked)
        servers.nodes[0].start()
        servers.wait_for_nodes(2)
        third = engine_at(tiny_model, servers.url)

        def is_served() -> bool:
            fresh = prompts(time.monotonic_ns(), 1)
            before = total(third, names.LOADED_BLOCKS, REMOTE)
            serve(second, fresh)
            serve(third, fresh)
            return total(third, names.LOADED_BLOCKS, REMOTE) == before + whole_blocks(fresh)

        eventually(is_served)
        second.close()
        third.close()


def test_store_that_is_not_there_costs_nothing_but_misses(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mooncake_servers() as servers:
        servers.kill()
        toy = engine_at(tiny_model, servers.url)
        serve(toy, prompts(5, 6))
        toy.half.stats()
        assert total(toy, names.DAEMON_UP, servers.url) == 0
        assert total(toy, names.LOOKUPS, REMOTE, "miss") == 0
        assert total(toy, names.LOOKUPS, REMOTE, "unavailable") > 0
        assert "cannot reach the Mooncake master" in caplog.text
        begin = time.monotonic()
        toy.close()
        assert time.monotonic() - begin < 10
