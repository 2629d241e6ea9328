"""KV events of the tiers, as vLLM publishes them and as routers read them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.router_views import RouterViews
from tests.engine.toy_asking import ask, keys_of, prompt, seeded_prompt
from tests.engine.toy_at_daemon import engine_at
from tests.engine.toy_engine import ToyEngine
from tests.engine.toy_groups import STATE
from vllm_tiered_kv.core.key import BlockKey

ON = {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}


def watch(engine: ToyEngine, views: RouterViews) -> RouterViews:
    publish = engine.scheduler.kv_event_publisher.publish

    def feed(batch: KVEventBatch) -> None:
        views.feed(batch.events)
        publish(batch)

    engine.scheduler.kv_event_publisher.publish = feed
    return views


def external(request: Any) -> list[Any]:
    """vLLM's hashes of a request's blocks, as in events."""
    return [maybe_convert_block_hash(one) for one in request.block_hashes]


def in_tier(engine: ToyEngine) -> set[tuple[bytes, int]]:
    """vLLM's hashes of all readable blocks of the CPU tier."""
    found = set()
    for request_id, request in engine.requests.items():
        for group, keys in zip(engine.groups, keys_of(engine, request_id), strict=True):
            each = group.block_size // engine.half._events._hash_size
            for position, held in enumerate(engine.half.index.are_readable(keys)):
                if held:
                    found.add((external(request)[(position + 1) * each - 1], group.group_id))
    return found


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"extra_config": {"store": "lazy"}, "gpu_blocks": 24},
        {"windows": (None, 10), "cpu_blocks": 48},
        {"windows": (None, STATE), "cpu_blocks": 48},
        {"windows": (None, 10), "block_sizes": (4, 8), "cpu_blocks": 48},
        {"extra_config": {"reuse_partial_tail": True}},
    ],
    ids=["eager", "lazy", "window", "recurrent", "two_sizes", "tail"],
)
def test_routers_know_exactly_what_the_cpu_tier_holds(
    tiny_model: Path, async_scheduling: bool, shape: dict[str, Any]
) -> None:
    engine = ToyEngine(tiny_model, async_scheduling, engine_args=ON, **shape)
    views = watch(engine, RouterViews(4))
    rng = random.Random(1)
    stems = [prompt(rng, 24) for _ in range(3)]
    for _ in range(25):
        ask(engine, [*rng.choice(stems), *prompt(rng, rng.randrange(1, 30))], rng.randrange(1, 9))
        if rng.random() < 0.3:
            engine.drop_gpu_cache()
    engine.step()
    assert set(views.held["CPU"]) == in_tier(engine) != set()
    assert views.removed
    request = engine.requests[ask(engine, seeded_prompt(9, 30), 1)]
    engine.drop_gpu_cache()
    engine.run()
    engine.step()
    engine.scheduler.kv_event_publisher.publish(
        KVEventBatch(ts=0, events=engine.scheduler.kv_cache_manager.take_events())
    )
    if not any(word in shape for word in ("windows", "gpu_blocks")):
        assert views.score(external(request)[:7]) == pytest.approx(0.8 * 7)
    engine.half.reset_cache()
    views.feed(engine.half.take_events())
    assert not views.held["CPU"]
    events = engine.half._events
    assert not [*events._in_cpu, *events._copies, *events._planned]
    engine.assert_at_rest()


def test_removed_and_spoilt_blocks_are_announced_as_removed(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, engine_args=ON)
    views = watch(engine, RouterViews(4))
    request = ask(engine, seeded_prompt(1), 1)
    (keys,) = keys_of(engine, request)
    engine.half.index.remove(keys[3])
    ask(engine, seeded_prompt(2, 9), 1)
    assert (external(engine.requests[request])[3], 0) not in views.held["CPU"]
    assert len(views.held["CPU"]) == 9 + 2
    engine.assert_at_rest()


def test_salts_are_separate_blocks_and_named_in_extra_keys(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, engine_args=ON)
    views = watch(engine, RouterViews(4, salt_keys=True))
    for salt in ("", "a", "b"):
        ask(engine, seeded_prompt(1, 21), 1, salt=salt)
    assert len(views.held["CPU"]) == 15
    salted = [event for event in views.held["CPU"].values() if any(event.extra_keys)]
    assert {event.extra_keys[0] for event in salted} == {("a",), ("b",)}


def test_blocks_with_one_vllm_hash_are_announced_once(tiny_model: Path) -> None:
    """As with EAGLE, or adapters of one name."""
    engine = ToyEngine(tiny_model, engine_args=ON)
    views = watch(engine, RouterViews(4))
    request = ask(engine, seeded_prompt(1, 9), 1)
    events, group = engine.half._events, engine.half._groups[0]
    twin = BlockKey(b"another key of ma\0")
    events.planned(engine.requests[request], group, [twin], [0])
    slot = engine.half.index.reserve(twin, None, group.size_class)
    engine.half.index.commit(slot)
    events.committed([twin])
    assert events.take() == []
    engine.half.index.remove(twin)
    assert events.take() == []
    engine.half.index.remove(keys_of(engine, request)[0][0])
    views.feed(events.take())
    assert len(views.held["CPU"]) == 1


def test_planned_stores_that_never_end_are_bounded(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model, engine_args=ON, gpu_blocks=16)
    request = engine.requests[ask(engine, seeded_prompt(1, 21), 1)]
    for n in range(100):
        keys = [BlockKey(b"%d" % n)] * 5
        engine.half._events.planned(request, engine.half._groups[0], keys, range(5))
    assert len(engine.half._events._planned) <= 32


def test_events_off_cost_nothing(tiny_model: Path) -> None:
    engine = ToyEngine(tiny_model)
    ask(engine, seeded_prompt(1), 1)
    assert engine.half._events is None
    assert list(engine.scheduler.connector.take_events()) == []
    without_hashes = ToyEngine(tiny_model, engine_args=ON, prefix_caching=False)
    assert without_hashes.half._events is None


def test_daemon_blocks_are_announced_as_storage_until_the_daemon_lacks_them(
    tiny_model: Path, daemon: DaemonProcess
) -> None:
    engine = engine_at(tiny_model, daemon.endpoint, engine_args=ON)
    views = watch(engine, RouterViews(4))
    ids = seeded_prompt(1, 41)
    request = ask(engine, ids, 1)
    ask(engine, seeded_prompt(2, 9), 1)  # one more step, with the events of the last put
    assert len(views.held["STORAGE"]) == len(views.held["CPU"]) == 12
    (keys,) = keys_of(engine, request)
    for key in keys:
        engine.half.index.remove(key)
    engine.half.remote._lookups._delete(keys[4:])
    engine.drop_gpu_cache()
    ask(engine, ids, 1, store=False)
    engine.step()
    views.feed(engine.half.take_events())
    hashes = [one for one, _ in views.held["STORAGE"]]
    blocks = external(engine.requests[request])
    assert set(hashes) & set(blocks) == set(blocks[:4])
    engine.assert_at_rest()
    engine.close()


@pytest.fixture
def subscriber(folder: Path) -> Iterator[tuple[str, zmq.Socket]]:
    address = f"ipc://{folder}/events"
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv")
    socket.connect(address)
    yield address, socket
    context.destroy(linger=0)


@pytest.mark.slow
def test_real_engine_publishes_the_tiers_to_vllms_subscribers(
    random_model: Path, subscriber: tuple[str, zmq.Socket]
) -> None:
    from tests.engine.real_engine import real_engine

    address, socket = subscriber
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=address, topic="kv"
    )
    views = RouterViews(32)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with real_engine(random_model, {"cpu_memory": "1MiB"}, kv_events_config=config) as engine:
        rng = random.Random(3)
        prompts = [[rng.randrange(3, 200) for _ in range(100)] for _ in range(12)]
        answers = engine.ask(prompts, 4)
        engine.settle()
        assert all(answers)
        engine.drop_gpu_cache()
        engine.ask([prompts[-1]], 4)
        engine.settle()
        end, events = time.monotonic() + 10, 0
        last = len(engine.half._events._in_cpu)
        while len(views.held["CPU"]) != last or not views.removed:
            assert time.monotonic() < end, "the events of the tier never arrived"
            assert socket.poll(10_000), "no event arrived"
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv"
            assert int.from_bytes(number, "big") == events
            views.feed(decoder.decode(payload).events)
            events += 1
        assert len(views.held["CPU"]) == last > 0
        assert {event.group_idx for event in views.held["CPU"].values()} == {0}
