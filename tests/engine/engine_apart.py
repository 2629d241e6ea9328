"""Engines in processes of their own: how a test starts one, how it opens there, and how it tells
what it answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_MARK = "RESULT "


def run_apart(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a module of this folder reports, run to its end."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.engine.{module}", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": path},
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    found = told_in(out)
    # All of it: the traceback of a worker comes long before that of its engine.
    assert found is not None, errors + out
    return found


def tell(found: dict[str, Any]) -> None:
    """In the process of the engine."""
    print(_MARK + json.dumps(found), flush=True)


def told_in(output: str) -> dict[str, Any] | None:
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else None


def open_engine(model: str, options: dict[str, Any], **settings: Any) -> Any:
    """In its process: vLLM with our connector and these options."""
    from vllm import LLM

    return LLM(
        model=model,
        skip_tokenizer_init=True,
        seed=0,
        disable_log_stats=False,
        kv_transfer_config=connector(options),
        **{"dtype": "float32", "max_model_len": 1024, **settings},
    )


def connector(options: dict[str, Any]) -> Any:
    """Our connector with these options, as vLLM is told of it."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="TieredKVConnector",
        kv_connector_module_path="vllm_tiered_kv.connector.connector",
        kv_role="kv_both",
        kv_connector_extra_config=options,
    )


def answers(llm: Any, prompts: Sequence[Sequence[int]], count: int = 8) -> list[dict[str, Any]]:
    """To one prompt after the other, in a form that can be reported."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
    told = []
    for ids in prompts:
        (out,) = llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
        told.append(answer_of(out))
    return told


def answer_of(out: Any) -> dict[str, Any]:
    tokens = list(out.outputs[0].token_ids)
    steps = zip(out.outputs[0].logprobs, tokens, strict=True)
    return {
        "tokens": tokens,
        "logprobs": [step[token].logprob for step, token in steps],
        "cached": out.num_cached_tokens,
    }
