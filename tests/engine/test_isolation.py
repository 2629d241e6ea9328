"""Trying to leak: requests and engines that agree in every token and must share nothing.

The toy's KV depends on salt, adapter and model as a real one's does, so a block that crosses over
is a wrong read; and every test counts hits besides: none for strangers, all for the owner.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.daemon.daemon_process import DaemonProcess
from tests.engine.toy_engine import ToyEngine, play
from vllm_tiered_kv.connector.identity.request_keys import RequestKeys
from vllm_tiered_kv.core.tiers import Lookup
from vllm_tiered_kv.metrics import names

IDS = [3 + 7 * n % 47 for n in range(41)]
WHOLE = 40
Who = dict[str, Any]  # arguments of a request, besides its tokens


@dataclass
class Engine(ToyEngine):
    """May differ from others of its kind in what vLLM's configuration says."""

    changes: dict[str, Any] = field(default_factory=dict)
    keys_of: dict[str, RequestKeys] = field(default_factory=dict)

    def _adjust(self, config: VllmConfig) -> None:
        for path, value in self.changes.items():
            part, name = path.split(".")
            setattr(getattr(config, part), name, value)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        self.scheduler.max_num_encoder_input_tokens = 1000

    def hits(self, who: Who, drop: bool = True) -> int:
        """Asks as somebody; how many tokens came from the tiers."""
        if drop:
            self.drop_gpu_cache()
        before = self.half.recorder.total(names.HIT_TOKENS)
        request = self.add(IDS, 4, **who)
        self.run()
        truth = who.get("salt", "") + who.get("model", "")
        assert self.finished[request].tokens == play(IDS, 4, truth)[0]
        self.assert_at_rest()
        return int(self.half.recorder.total(names.HIT_TOKENS) - before)


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def image(name: str) -> dict[str, Any]:
    feature = MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=hashlib.sha256(name.encode()).hexdigest(),
        mm_position=PlaceholderRange(offset=0, length=6),
    )
    return {"mm_features": [feature], "model": f"image {name}"}


@pytest.fixture
def strangers(tmp_path: Path) -> dict[str, Who]:
    """People with one prompt, each of whom must be told apart from all others."""
    one, two = adapter(tmp_path / "one", b"1" * 64), adapter(tmp_path / "two", b"2" * 64)
    return {
        "plain": {},
        "salt a": {"salt": "a"},
        "salt b": {"salt": "b"},
        "salt with a zero": {"salt": "a\0"},
        "adapter": {"lora_request": LoRARequest("tune", 1, str(one)), "model": "1"},
        "same name, other files": {
            "lora_request": LoRARequest("tune", 2, str(two)),
            "model": "2",
        },
        "adapter and salt": {
            "lora_request": LoRARequest("tune", 1, str(one)),
            "salt": "a",
            "model": "3",
        },
        "image": image("cat"),
        "other image": image("horse"),
    }


def test_isolation_in_the_cpu_tier(
    tiny_model: Path, strangers: dict[str, Who], async_scheduling: bool
) -> None:
    engine = Engine(tiny_model, async_scheduling, cpu_blocks=200)
    assert {name: engine.hits(who) for name, who in strangers.items()} == dict.fromkeys(
        strangers, 0
    )
    assert {name: engine.hits(who) for name, who in strangers.items()} == dict.fromkeys(
        strangers, WHOLE
    )


def test_adapter_whose_files_were_changed(tiny_model: Path, tmp_path: Path) -> None:
    """In place: vLLM still computes with what it loaded, so nothing is read or written for it.
    Another engine, which loads what is there now, finds nothing either."""
    path = adapter(tmp_path / "one", b"1" * 64)
    old = {"lora_request": LoRARequest("tune", 1, str(path)), "model": "1"}
    engine = Engine(tiny_model, cpu_blocks=200)
    assert [engine.hits(old), engine.hits(old)] == [0, WHOLE]
    adapter(path, b"2" * 64)
    os.utime(path / "adapter_model.safetensors", (2, 2))
    stored = engine.half.recorder.total(names.STORED_BLOCKS)
    assert [engine.hits(old), engine.hits(old)] == [0, 0]
    assert engine.half.recorder.total(names.STORED_BLOCKS) == stored
    # Nor for one that vLLM loads anew, as its prefix cache takes it for the old one.
    new = {"lora_request": LoRARequest("tune", 7, str(path)), "model": "2"}
    assert [engine.hits(new), engine.hits(new)] == [0, 0]
    moved = path.rename(tmp_path / "moved")
    new = {"lora_request": LoRARequest("tune", 7, str(moved)), "model": "2"}
    assert [engine.hits(new), engine.hits(new)] == [0, WHOLE]


def replace_files(path: Path, content: bytes) -> Path:
    adapter(path, content)
    os.utime(path / "adapter_model.safetensors", (2, 2))
    return path


def stored_of(engine: Engine, request: str, first: int) -> set[bool]:
    """Whether the blocks of a request from position `first` on are in the tier."""
    keys = engine.keys_of[request]
    keys.extend(engine.requests[request], engine.requests[request].num_tokens - 1)
    filled = keys.of_group[0][first:]
    assert len(filled) > 5
    return {engine.half.index.lookup(key) is Lookup.HIT for key in filled}


@pytest.mark.parametrize("starts_over", [False, True])
@pytest.mark.parametrize("how", ["another path", "the same path", "not found"])
def test_adapter_that_is_replaced_while_it_is_in_use(
    tiny_model: Path, tmp_path: Path, how: str, starts_over: bool
) -> None:
    """What its requests fill from then on comes from both, and is stored as neither: also if they
    start over, and if the new one cannot be cached itself."""
    one, copy, two = (adapter(tmp_path / name, name[:3].encode()) for name in ("one", "on", "two"))
    adapter(copy, b"one")
    engine = Engine(tiny_model, cpu_blocks=200)
    others = list(reversed(IDS))
    replaced = engine.add(IDS, 40, lora_request=LoRARequest("tune", 1, str(one)), model="1")
    kept = engine.add(others, 40, lora_request=LoRARequest("tune", 2, str(copy)), model="1")
    for _ in range(5):
        engine.step()
    engine.keys_of = {r: engine.half._requests[r].keys for r in (replaced, kept)}
    computed = max(engine.requests[r].num_computed_tokens for r in (replaced, kept))
    path = {
        "another path": lambda: two,
        "the same path": lambda: replace_files(one, b"new"),
        "not found": lambda: tmp_path / "nowhere",
    }[how]()
    new = LoRARequest("tune", 1, str(path), load_inplace=True)
    engine.add(IDS[5:], 1, lora_request=new, model="2")
    if starts_over:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert stored_of(engine, replaced, computed // 4 + 1) == {False}
    assert stored_of(engine, kept, computed // 4 + 1) == {True}
    engine.assert_at_rest()


def test_answers_after_an_adapter_was_replaced_are_not_built_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Though answers are not stored: vLLM has them under the name of the old one."""
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    engine = Engine(tiny_model, cpu_blocks=200, extra_config={"store_decode": False})
    engine.add(IDS, 40, lora_request=LoRARequest("tune", 1, str(one)), model="1")
    for _ in range(5):
        engine.step()
    new = LoRARequest("tune", 1, str(two), load_inplace=True)
    engine.add(IDS[5:], 1, lora_request=new, model="2")
    engine.run()
    asked = IDS + play(IDS, 39, "1")[0] + IDS
    old = LoRARequest("tune", 3, str(one))
    later = engine.add(asked, 1, lora_request=old, model="1")
    engine.keys_of = {later: engine.half._requests[later].keys}
    engine.run()
    assert stored_of(engine, later, len(IDS) // 4 + 3) == {False}
    engine.assert_at_rest()


def test_adapter_that_vllm_reads_again_in_each_step(tiny_model: Path, tmp_path: Path) -> None:
    """As it does for those loaded in place: what is there by then is not what it came with."""
    path = adapter(tmp_path / "one", b"one")
    engine = Engine(tiny_model, cpu_blocks=200)
    lora = LoRARequest("tune", 1, str(path), load_inplace=True)
    request = engine.add(IDS, 60, lora_request=lora, model="1")
    for _ in range(5):
        engine.step()
    engine.keys_of = {request: engine.half._requests[request].keys}
    computed = engine.requests[request].num_computed_tokens
    replace_files(path, b"two")
    engine.run()
    assert stored_of(engine, request, computed // 4 + 1) == {False}
    assert engine.half.index.held > 5  # what it had filled before


def test_reset_loads_no_adapter(tiny_model: Path, tmp_path: Path) -> None:
    """Requests that are under way get other keys, but what vLLM has under a number stays."""
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    engine = Engine(tiny_model, cpu_blocks=200)
    old = LoRARequest("tune", 1, str(one), load_inplace=True)
    engine.add(IDS, 60, lora_request=old, model="1")
    new = LoRARequest("tune", 1, str(two), load_inplace=True)
    engine.add(IDS, 1, lora_request=new, model="2")
    while not engine.finished:
        engine.step()
    assert engine.half.reset_cache()
    (state,) = engine.half._requests.values()
    assert state.lost_adapter
    # vLLM computes with the second one, whatever the path of this request says.
    late = engine.add(IDS[5:], 1, lora_request=LoRARequest("tune", 1, str(one)), model="2")
    assert late in engine.half._uncached
    engine.run()
    assert not engine.half.index.held
    engine.assert_at_rest()


Way = Callable[[str], str]
"""Which daemon the engine of this name talks to."""


def through(way: str, folder: Path) -> Iterator[Way]:
    """Ways blocks take from one engine to another."""
    (folder / "shared").mkdir()
    lower = {
        "ssd": ["--ssd", str(folder / "ssd"), "--ssd-space", "1GiB"],
        "shared_dir": ["--backing", f"file://{folder / 'shared'}", "--backing-ttl", "1d"],
    }.get(way, [])
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    with DaemonProcess(folder / "a", "--memory", "16MiB", *lower) as daemon:
        if way == "shared_dir":
            with DaemonProcess(folder / "b", "--memory", "16MiB", *lower) as second:
                yield lambda who: (daemon if who == "writer" else second).endpoint
            return

        def address(who: str) -> str:
            if way == "ssd" and who == "reader":
                assert daemon.terminate() == 0
                daemon.restart()
            return daemon.ipc if way == "ipc" else daemon.endpoint

        yield address


@pytest.fixture(params=["tcp", "ipc", "ssd", "shared_dir"])
def way(request: pytest.FixtureRequest, folder: Path) -> Iterator[Way]:
    yield from through(request.param, folder)


def engine_at(model: Path, address: str, **settings: Any) -> Engine:
    extra = {
        "remote": address,
        "remote_lookup_timeout": 10,
        "remote_landing": "64KiB",
        **settings.pop("extra", {}),
    }
    return Engine(model, cpu_blocks=200, extra_config=extra, **settings)


def settle(engine: Engine) -> None:
    """Everything has left for the daemon, and from there for the tiers below it."""
    engine.run()
    engine.close()


def test_requests_of_two_engines(tiny_model: Path, strangers: dict[str, Who], way: Way) -> None:
    """Each of them stores what only its like may find, in a daemon both engines share."""
    writer = engine_at(tiny_model, way("writer"))
    owners = ("plain", "salt a", "adapter", "image")
    for name in owners:
        assert writer.hits(strangers[name]) == 0
    settle(writer)
    reader = engine_at(tiny_model, way("reader"))
    found = {name: reader.hits(who) for name, who in strangers.items()}
    assert found == {name: WHOLE if name in owners else 0 for name in strangers}
    reader.close()


ENGINES: dict[str, dict[str, Any]] = {
    "namespace": {"extra": {"namespace": "them"}},
    "rope": {"engine_args": {"hf_overrides": {"rope_theta": 5e5}}},
    "rope scaling": {
        "engine_args": {
            "hf_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        }
    },
    "layers": {"engine_args": {"hf_overrides": {"num_hidden_layers": 3}}},
    "weights": {"engine_args": {"seed": 3}},
    "dtype": {"engine_args": {"dtype": "float32"}},
    "revision": {"changes": {"model_config.revision": "v2"}},
    "quantization": {"changes": {"model_config.quantization": "fp8"}},
    "kv dtype": {"changes": {"cache_config.cache_dtype": "fp8_e5m2"}},
    "tensor parallel": {"changes": {"parallel_config.tensor_parallel_size": 2}},
    "pipeline parallel": {"changes": {"parallel_config.pipeline_parallel_size": 2}},
}


def test_engines_that_differ(tiny_model: Path, way: Way) -> None:
    """One prompt, no salt: everything else that decides what its blocks hold keeps them apart."""
    writer = engine_at(tiny_model, way("writer"))
    assert writer.hits({}) == 0
    settle(writer)
    address = way("reader")
    found = {}
    for name, settings in ENGINES.items():
        other = engine_at(tiny_model, address, **{k: dict(v) for k, v in settings.items()})
        found[name] = other.hits({"model": name}, drop=False)
        settle(other)
    assert found == dict.fromkeys(ENGINES, 0)
    twin = engine_at(tiny_model, address)
    assert twin.hits({}, drop=False) == WHOLE
    settle(twin)


def test_tests_above_can_fail(
    tiny_model: Path, strangers: dict[str, Who], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys that forget the scope, a stranger's block is found, and read as wrong."""
    from vllm_tiered_kv.connector.identity import request_keys

    monkeypatch.setattr(request_keys, "root_digest", lambda namespace, scope: bytes(32))
    engine = Engine(tiny_model, cpu_blocks=200)
    engine.hits(strangers["salt a"])
    with pytest.raises(AssertionError):
        engine.hits(strangers["salt b"])
