"""A real vLLM engine in this process, and an oracle that can fail.

Dummy weights answer alike whatever the KV cache holds, so weights are drawn anew at a scale that
makes outputs depend on it. At the end of every request the bytes of all its full KV blocks are
kept, by the tokens they stand for: two engines must agree on tokens, logprobs and those bytes.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)

from tests.models import has_bfloat16
from vllm_tiered_kv.api.model_shape import LayerKind, read_config, read_shape
from vllm_tiered_kv.connector.connector import TieredKVConnector
from vllm_tiered_kv.metrics.names import Metric

Tokens = tuple[int, ...]
_DRAFT_INPUTS = ("model.fc.weight", ".input_proj.weight", ".eh_proj.weight")
"""Where draft layers join a token's embedding and the hidden state before it. These weights pass on
the embedding alone: then drafts are often right, whatever the other weights are."""


@dataclass(frozen=True)
class Answer:
    tokens: Tokens
    logprobs: tuple[float, ...]
    cached: int


@dataclass
class RealEngine:
    llm: LLM
    kv_bytes: dict[Tokens, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self._keep_kv_bytes()

    @property
    def connector(self) -> TieredKVConnector:
        connector = self.scheduler.connector
        return getattr(connector, "sub_connectors", [connector])[0]

    @property
    def half(self):
        return self.connector.scheduler_half

    @property
    def worker_half(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        return getattr(group, "sub_connectors", [group])[0].worker_half

    def total(self, metric: Metric, *labels: str) -> float:
        return self.half.recorder.total(metric, *labels)

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        count: int = 6,
        together: bool = False,
        lora_request: Any = None,
        control: dict[str, Any] | None = None,
        **extra: Any,
    ) -> list[Answer]:
        """Answers, one prompt after the other or all at once. `control`: what the requests ask of
        the cache."""
        inputs = [{"prompt_token_ids": list(ids), **extra} for ids in prompts]
        return self.ask_inputs(inputs, count, together, lora_request, control)

    def ask_inputs(
        self,
        inputs: Sequence[dict[str, Any]],
        count: int,
        together: bool = False,
        lora_request: Any = None,
        control: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """Whatever prompts are made of."""
        params = SamplingParams(temperature=0, max_tokens=count, logprobs=1, ignore_eos=True)
        if control is not None:
            params.extra_args = {"kv_transfer_params": {"tiered_kv": control}}
        batches = [inputs] if together else [[one] for one in inputs]
        outputs = [
            output
            for batch in batches
            for output in self.llm.generate(
                list(batch), params, use_tqdm=False, lora_request=lora_request
            )
        ]
        return [
            Answer(
                tuple(o.outputs[0].token_ids),
                tuple(
                    step[token].logprob
                    for step, token in zip(
                        o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True
                    )
                ),
                o.num_cached_tokens,
            )
            for o in outputs
        ]

    def settle(self) -> None:
        """Lets an idle engine store and send what it has, as a server's engine does by itself."""
        end = time.monotonic() + 60
        while self.scheduler.has_requests():
            assert time.monotonic() < end, "the engine never came to rest"
            self.core.step()
            time.sleep(0.001)

    def drop_gpu_cache(self) -> None:
        assert self.llm.reset_prefix_cache()

    def assert_at_rest(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self.half.index.pinned_slots()
        assert not self.half.ledger.has_open_stores
        assert not self.half.ledger._loads
        assert not self.half.ledger.has_open_puts
        assert not self.half._requests
        self.half.index.check()

    def assert_bytes_as_computed_from(self, model: Path) -> None:
        """vLLM's own sizes are those that `tiered-kv model` derives from the config.json: of a
        token, or of a snapshot where the state is recurrent."""
        config = self.scheduler.vllm_config
        found: Counter[LayerKind] = Counter()
        placed = {
            name
            for tensor in self.scheduler.kv_cache_config.kv_cache_tensors
            for name in tensor.layers
        }
        for group in self.scheduler.kv_cache_config.kv_cache_groups:
            for name in placed.intersection(group.layer_names):
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(
                    name, group.kv_cache_spec
                )
                if isinstance(spec, MambaSpec):
                    found[LayerKind.RECURRENT] += spec.state_content_size_bytes
                    continue
                assert spec.unpadded_page_size_bytes % spec.block_size == 0
                kind = LayerKind.FULL
                if isinstance(spec, MLAAttentionSpec):
                    kind = LayerKind.MLA
                elif isinstance(spec, SlidingWindowSpec):
                    kind = LayerKind.WINDOW
                elif isinstance(spec, ChunkedLocalAttentionSpec):
                    kind = LayerKind.CHUNKED
                found[kind] += spec.unpadded_page_size_bytes // spec.block_size
        # On CPUs vLLM keeps recurrent state in float32, on GPUs in the model's dtype.
        state_dtype = config.cache_config.mamba_ssm_cache_dtype
        shape = read_shape(
            {**read_config(model), "mamba_ssm_cache_dtype": state_dtype},
            str(config.model_config.dtype).removeprefix("torch."),
            config.cache_config.cache_dtype,
        )
        assert not shape.guesses
        computed: Counter[LayerKind] = Counter()
        for part in shape.groups:
            computed[part.kind] += part.layers * part.layer_bytes
        assert found == computed, (found, computed)

    def _keep_kv_bytes(self) -> None:
        scheduler, block_size = self.scheduler, self.scheduler.block_size
        free = scheduler._free_request_blocks
        num_blocks = scheduler.kv_cache_config.num_blocks
        groups = scheduler.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or isinstance(groups[0].kv_cache_spec, SlidingWindowSpec):
            return  # no KV cache, several whose blocks mean different spans, or blocks gone by then

        def keep_and_free(request: Any) -> None:
            (ids,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            full = min(request.num_computed_tokens, request.num_tokens - 1) // block_size
            if request.is_finished() and full:
                content = [
                    group_kernel_blocks(cache, num_blocks)[ids[:full]].cpu().flatten(1)
                    for cache in self.runner.kv_caches
                ]
                rows = torch.cat(content, dim=1).contiguous().view(torch.uint8).numpy()
                for position in range(full):
                    name = tuple(request.all_token_ids[: (position + 1) * block_size])
                    self.kv_bytes[name] = rows[position].tobytes()
            free(request)

        scheduler._free_request_blocks = keep_and_free


def _draw_weights(gain: float) -> Callable[[DummyModelLoader, torch.nn.Module, Any], None]:
    """Stands in for vLLM's dummy weights, before they are packed for the CPU's kernels."""

    def draw(loader: DummyModelLoader, model: torch.nn.Module, model_config: Any) -> None:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(7)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(".A"):
                    weight.fill_(-1.0)  # recurrent layers: a state that decays
                elif weight.dim() <= 1:
                    weight.fill_(1.0 if "norm" in name.lower() else 0.0)
                elif name.endswith(_DRAFT_INPUTS) and weight.shape[1] == 2 * weight.shape[0]:
                    first, second = torch.eye(len(weight)), torch.zeros(len(weight), len(weight))
                    halves = (second, first) if "input_proj" in name else (first, second)
                    weight.copy_(torch.cat(halves, dim=1))
                elif weight.is_floating_point():  # tables of hashed experts stay as vLLM drew them
                    inner = gain if "layers." in name else 2.5
                    scale = 1.0 if "embed" in name else inner / weight.shape[-1] ** 0.5
                    weight.normal_(0.0, scale, generator=generator)
        if getattr(model, "finalizes_weights_during_load", False):
            # DeepSeek-V4 on a GPU sums some of its weights as it loads them; vLLM's dummy loader
            # leaves that out, and the first step fails.
            model.process_weights_after_loading()

    return draw


@contextlib.contextmanager
def real_engine(
    model: Path,
    options: dict[str, Any] | None,
    transfer: dict[str, Any] | None = None,
    gain: float = 2.5,
    **engine: Any,
) -> Iterator[RealEngine]:
    """An engine with our connector and these options; with None, vLLM alone.

    With a small `gain` of its layers a token depends on the one before it more than on the rest,
    so that answers repeat themselves.
    """
    if options is not None and transfer is None:
        transfer = {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "vllm_tiered_kv.connector.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": options,
        }
    settings = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 256,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        **engine,
    }
    if settings["dtype"] == "bfloat16" and not has_bfloat16():
        pytest.skip("vLLM's kernels for bfloat16 end in an illegal instruction on this processor")
    try:
        with mock.patch.object(DummyModelLoader, "load_weights", _draw_weights(gain)):
            llm = _open(model, transfer, settings)
        running = RealEngine(llm)
        yield running
        running.core.shutdown()
        del running, llm
    finally:
        # An engine that did not start leaves vLLM's globals behind as well.
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def _open(model: Path, transfer: dict[str, Any] | None, settings: dict[str, Any]) -> LLM:
    return LLM(
        model=str(model),
        load_format="dummy",
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **settings,
    )
