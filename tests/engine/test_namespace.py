"""Which engines share blocks: those of one namespace, told apart by all that changes the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig, WeightTransferConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.engine.engine_apart import connector
from tests.engine.keyed_requests import flat, make_request
from tests.engine.made_configs import engine_config, one_group
from tests.models import TINY_LLAMA, write_config, write_model
from vllm_tiered_kv.config import TieredKVConfig
from vllm_tiered_kv.connector import assembly
from vllm_tiered_kv.connector.identity import model_fingerprint
from vllm_tiered_kv.connector.identity.model_fingerprint import fingerprint
from vllm_tiered_kv.core.key import BlockKey


def namespaces_hex(model: str) -> list[str]:
    """With dummy weights, with those of the folder, and with the model as its own draft model."""
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    engines = ({"load_format": "dummy"}, {}, {"speculative_config": drafts})
    return [
        fingerprint(engine_config(Path(model), **{"load_format": "auto", **engine}), one_group())
        .namespace()
        .hex()
        for engine in engines
    ]


@pytest.mark.slow
def test_another_process_finds_the_same_namespace(tmp_path: Path) -> None:
    """Another hash seed, another name of the folder, the same engine."""
    program = f"import sys; from {__name__} import namespaces_hex as n; print(*n(sys.argv[1]))"
    processes = []
    for seed in ("0", "4711"):
        model = write_model(tmp_path / f"under the name {seed}")
        (model / "model.safetensors").write_bytes(bytes(2 << 20))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(model)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    mine = namespaces_hex(str(model))
    assert len(set(mine)) == 3
    for process in processes:
        printed, complaint = process.communicate(timeout=300)
        assert process.returncode == 0, complaint[-3000:]
        assert printed.splitlines()[-1].split() == mine


def test_engine_changes_the_namespace(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cache = one_group()
    base = fingerprint(engine_config(model), cache)
    assert base == fingerprint(engine_config(model), one_group())
    others = {
        "dtype": fingerprint(engine_config(model, dtype="bfloat16"), cache),
        "config": fingerprint(
            engine_config(write_model(tmp_path / "other", rope_theta=5e5)), cache
        ),
        "overrides": fingerprint(engine_config(model, hf_overrides={"rope_theta": 5e5}), cache),
        "seed": fingerprint(engine_config(model, seed=3), cache),
        "block size": fingerprint(engine_config(model), one_group(block_size=32)),
        "heads": fingerprint(engine_config(model), one_group(num_kv_heads=4)),
        "cache dtype": fingerprint(engine_config(model), one_group(dtype=torch.float16)),
    }
    namespaces = {name: one.namespace() for name, one in others.items()}
    assert len({base.namespace(), *namespaces.values()}) == 1 + len(others)
    # What does not touch the bytes of a block does not separate engines.
    for harmless in ({"max_num_seqs": 3}, {"max_model_len": 256}, {"served_model_name": "x"}):
        assert fingerprint(engine_config(model, **harmless), cache) == base, harmless


def test_tokens_that_a_rank_holds_of_a_block_change_the_namespace(tmp_path: Path) -> None:
    """Decode context parallelism: by how many ranks divide a block, and how."""
    model = write_model(tmp_path / "model", num_key_value_heads=1)
    alone = connector({})
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    beside_nixl = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [nixl]},
    )

    def namespace(ranks: int, transfer: KVTransferConfig = alone, **engine: object) -> bytes:
        config = engine_config(
            model, tensor_parallel_size=4, decode_context_parallel_size=ranks, **engine
        )
        config.kv_transfer_config = transfer
        before = config.parallel_config.cp_kv_cache_interleave_size
        found = fingerprint(config, one_group()).namespace()
        assert config.parallel_config.cp_kv_cache_interleave_size == before
        return found

    spread = {n: namespace(2, cp_kv_cache_interleave_size=n) for n in (1, 4, 16)}
    assert len({namespace(1), namespace(4), *spread.values()}) == 2 + len(spread)
    assert namespace(2) == spread[1]
    # The name before, and a neighbour for which vLLM sets whole blocks in its workers.
    assert namespace(2, dcp_kv_cache_interleave_size=4) == spread[4]
    assert namespace(2, beside_nixl) == spread[16]
    # Without it there is nothing to divide.
    assert namespace(1, cp_kv_cache_interleave_size=4) == namespace(1)


def test_draft_model_changes_the_namespace_by_its_content(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", TINY_LLAMA)
    (model / "model.safetensors").write_bytes(b"weights")

    def head(name: str, weights: bytes = b"draft", **changes: object) -> Path:
        folder = write_config(tmp_path / name, {**TINY_LLAMA, "num_hidden_layers": 1, **changes})
        (folder / "model.safetensors").write_bytes(weights)
        return folder

    def namespace(**drafts: object) -> bytes:
        config = {"num_speculative_tokens": 2, **drafts} if drafts else None
        engine = engine_config(model, load_format="safetensors", speculative_config=config)
        return fingerprint(engine, one_group()).namespace()

    def eagle(folder: Path, **changes: object) -> bytes:
        return namespace(method="eagle", model=str(folder), **changes)

    one = head("one")
    base = eagle(one)
    others = [
        namespace(),
        eagle(head("weights", b"DRAFT")),
        eagle(head("config", rope_theta=5e5)),
        eagle(one, parallel_drafting=True),
        namespace(method="draft_model", model=str(one)),
        namespace(method="draft_model", model=str(model)),
    ]
    assert len({base, *others}) == 1 + len(others)
    # Names, and how many tokens are drafted, change no KV.
    assert eagle(head("copy")) == base
    assert eagle(one, num_speculative_tokens=3) == base
    assert eagle(one, disable_padded_drafter_batch=True) == base
    # Nor does a method without KV: such engines share blocks with those that do not speculate.
    assert namespace(method="ngram", prompt_lookup_max=4) == namespace()


def test_mtp_modules_change_the_namespace_by_how_far_they_read(tmp_path: Path) -> None:
    modules = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 3}
    model = write_model(tmp_path / "model", **modules)
    (model / "model.safetensors").write_bytes(b"weights")

    def namespace(tokens: int) -> bytes:
        drafts = {"method": "mtp", "num_speculative_tokens": tokens}
        engine = engine_config(model, load_format="safetensors", speculative_config=drafts)
        return fingerprint(engine, one_group()).namespace()

    assert len({namespace(tokens) for tokens in (1, 2, 3)}) == 3
    before = namespace(1)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert namespace(1) != before


def test_kernels_that_write_blocks_otherwise_change_the_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout has the same name in all of them."""
    model = write_model(tmp_path / "model")

    def namespace() -> bytes:
        config = engine_config(model)
        config.device_config.device_type = device
        return fingerprint(config, one_group()).namespace()

    def of_cpu(machine: str, **instructions: bool) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
            patch.setattr("platform.machine", lambda: machine)
            return namespace()

    device = "cpu"
    found = []
    for version in ("0.32.0", "0.32.1"):
        monkeypatch.setattr("vllm.__version__", version)
        found += [
            of_cpu("x86_64", avx512_f=True),
            of_cpu("x86_64", avx512_f=True, amx_tile=True),
            of_cpu("x86_64", avx512_f=True, amx_tile=True, amx_fp8=True),
            of_cpu("aarch64", neon=True),
        ]
    assert len(set(found)) == len(found)
    # What kernels do not pack for keeps nobody apart, nor does who built the release.
    assert of_cpu("x86_64", avx512_f=True, amx_tile=False, sha=True) == found[4]
    monkeypatch.setattr("vllm.__version__", "0.32.1+cpu")
    assert of_cpu("x86_64", avx512_f=True) == found[4]
    device = "cuda"
    assert namespace() not in found
    assert of_cpu("x86_64") == of_cpu("aarch64")


def test_engines_that_promise_the_same_bits_share_only_among_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have computed is as good, but has other bits."""
    model = write_model(tmp_path / "model")
    device = "a GPU"

    def namespace(eager: bool = True, backend: str = "FLASH_ATTN") -> bytes:
        config = engine_config(model, enforce_eager=eager)
        config.attention_config.backend = AttentionBackendEnum[backend]
        return fingerprint(config, one_group()).namespace()

    monkeypatch.setattr(current_platform, "get_device_name", lambda: device)
    plain = namespace()
    assert namespace(eager=False) == namespace(backend="TRITON_ATTN") == plain
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    found = [plain, namespace(), namespace(eager=False), namespace(backend="TRITON_ATTN")]
    assert namespace() == found[1]
    device = "another GPU"
    found.append(namespace())
    assert len(set(found)) == len(found)


def test_weights_replaced_while_an_engine_loads_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(bytes(64))
    config = engine_config(model, load_format="auto")
    options = TieredKVConfig.load({"cpu_memory": "1MiB", "remote": "ipc:///nobody/is/here"})

    def keys() -> set[BlockKey]:
        half = assembly.make_scheduler_half(options, config, one_group())
        half.shutdown()
        return set(flat(make_request(), maker=half._key_maker))

    monkeypatch.setattr(model_fingerprint, "_process_start_ns", lambda: 1 << 62)
    first = keys()
    assert keys() == first
    assert "has changed while" not in caplog.text
    monkeypatch.setattr(model_fingerprint, "_process_start_ns", lambda: 0)
    assert not keys() & first
    assert "has changed while this engine started" in caplog.text


@pytest.mark.parametrize("setting", [None, "weight_transfer_config", "worker_extension_cls"])
def test_weights_that_may_come_from_elsewhere_are_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str | None
) -> None:
    """A trainer sends them before the first request, when there is no cache to be reset yet. Often
    the engine has loaded dummies until then: those of all trainings are alike."""
    config = engine_config(write_model(tmp_path / "model"))
    if setting == "weight_transfer_config":
        config.weight_transfer_config = WeightTransferConfig(backend="nccl")
    elif setting is not None:
        config.parallel_config.worker_extension_cls = "trainer.Worker"
    options = TieredKVConfig.load({"cpu_memory": "1MiB"})
    caplog.set_level("INFO")
    one, other = (assembly.make_scheduler_half(options, config, one_group()) for _ in range(2))
    assert one._key_maker._namespace == other._key_maker._namespace
    mine = flat(make_request(), maker=one._key_maker)
    assert mine == flat(make_request(), maker=one._key_maker)
    shared = set(mine) & set(flat(make_request(), maker=other._key_maker))
    assert shared == (set() if setting else set(mine))
    assert str(setting) in caplog.text or setting is None
    named = f"namespace {one._key_maker._namespace.hex()[:32]}: model {tmp_path / 'model'}"
    assert named in caplog.text
