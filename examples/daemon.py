"""Restart an engine: the second one finds the prompt of the first one in a cache daemon.

    .venv/bin/python examples/daemon.py        (`make demo` makes the environment)

Starts `tiered-kv-server` and, one after the other, two vLLM engines with a small real model, each
in a process of its own. Both answer the same question about a long text. `num_cached_tokens` says
how many prompt tokens vLLM did not compute: none in the first engine, nearly all in the second one.
The exit status is 0 only if that is so and both answers are equal. Without a GPU the model runs in
float32. In bfloat16 vLLM's own prefix cache can change an answer by rounding, and a loaded prefix
likewise: there the answers are only shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smollm2 import cache_folder, ensure_model

TEXT = Path(__file__).with_name("long_text.txt")
QUESTION = "What is the name of the ferry, and what colour is it?"
PATIENCE_S = 60.0


@contextlib.contextmanager
def daemon(folder: Path, log: Path) -> Iterator[str]:
    """A running daemon; its address."""
    address = f"ipc://{folder}/kv.sock"
    command = [
        str(Path(sys.executable).with_name("tiered-kv-server")),
        *("--memory", "1GiB", "--listen", address, "--http", "off"),
    ]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (folder / "kv.sock").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the daemon did not start: {log.read_text()}")
                time.sleep(0.05)
            yield address
        finally:
            process.terminate()


def engine(address: str, model: str) -> None:
    """One life of an engine: answers, waits until the daemon has the blocks, prints one line."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, read by CPU builds only
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        model=model,
        dtype="float32" if current_platform.is_cpu() else "auto",
        max_model_len=4096,
        enforce_eager=True,  # starts sooner
        disable_log_stats=False,  # the counters below are vLLM's own
        kv_transfer_config={
            "kv_connector": "TieredKVConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_memory": "1GiB", "remote": address},
        },
    )
    prompt = f"{TEXT.read_text(encoding='utf-8').strip()}\n\n{QUESTION}"
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    (output,) = llm.chat([{"role": "user", "content": prompt}], sampling, use_tqdm=False)
    tokens = len(output.prompt_token_ids)
    blocks = tokens // llm.llm_engine.vllm_config.cache_config.block_size
    answer = {
        "prompt_tokens": tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "text": " ".join(output.outputs[0].text.split()),
        "is_exact": str(llm.llm_engine.model_config.dtype) == "torch.float32",
    }
    deadline = time.monotonic() + PATIENCE_S
    while not answer["num_cached_tokens"] and at_daemon(llm) < blocks:
        if time.monotonic() > deadline:
            raise SystemExit(f"the daemon has {at_daemon(llm):.0f} blocks of {blocks}")
        llm.llm_engine.step()  # an engine in this process reports when it is stepped
        time.sleep(0.01)
    print(json.dumps(answer))


def at_daemon(llm: Any) -> float:
    return float(
        sum(
            metric.value
            for metric in llm.get_metrics()
            if metric.name == "vllm:tiered_kv_stored_blocks" and metric.labels["tier"] == "remote"
        )
    )


def answer_of_an_engine(address: str, model: Path, log: Path) -> dict[str, Any]:
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, __file__, address, str(model)], stdout=subprocess.PIPE, stderr=output
        )
    if done.returncode != 0:
        raise SystemExit(f"the engine failed; its log: {log}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> int:
    model = ensure_model()
    log = cache_folder() / "daemon-example.log"
    log.unlink(missing_ok=True)
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        with daemon(Path(folder), log.with_suffix(".daemon.log")) as address:
            for name in ("first engine", "after its restart"):
                print(f"{name}: starting (half a minute or more)", flush=True)
                answers.append(answer_of_an_engine(address, model, log))
                print(
                    "  num_cached_tokens {num_cached_tokens} of {prompt_tokens}: {text}".format(
                        **answers[-1]
                    )
                )
    before, after = answers
    if before["num_cached_tokens"] or not after["num_cached_tokens"]:
        print("FAILED  the second engine should find what the first one stored")
        return 1
    equal = before["text"] == after["text"]
    if not equal and after["is_exact"]:
        print("FAILED  the answers differ")
        return 1
    print(f"The second engine loaded the prompt; the answers {'are equal' if equal else 'differ'}.")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        engine(*sys.argv[1:])
    else:
        sys.exit(main())
