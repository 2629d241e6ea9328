"""Run in a process of its own by test_refused_release.py: one engine, one answer.

Prints whether the plugin was loaded and what the model said, or ends as vLLM ends it.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(model: str, transfer: dict[str, Any] | None) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=64,
        enforce_eager=True,
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    result = {
        "tokens": list(output.outputs[0].token_ids),
        "registered": "TieredKVConnector" in KVConnectorFactory._registry,
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
