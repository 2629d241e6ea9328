"""How vLLM's kernels write the numbers of a block, beyond the order of its dimensions.

That is theirs alone: another release may write them in another way, and so does a CPU with other
instructions, for which vLLM packs keys as its matrix units like them. The layout has the same name.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKED_FOR = ("amx", "avx512")  # beginnings of names of instructions that vLLM packs keys for


def kv_format(vllm_config: VllmConfig) -> str:
    """Equal where the kernels of one engine can read what those of another have written."""
    import vllm
    from vllm import envs

    device = str(vllm_config.device_config.device_type)
    facts = [f"vLLM {vllm.__version__.partition('+')[0]}", device]
    if device == "cpu":
        facts += [platform.machine(), *sorted(_instructions())]
    if envs.VLLM_BATCH_INVARIANT:
        facts += _what_decides_bits(vllm_config)
    return " ".join(facts)


def _what_decides_bits(vllm_config: VllmConfig) -> list[str]:
    """Where vLLM promises the same bits whatever else is computed: other kernels read the numbers
    as well, but have computed them a little differently, as engines without the promise have."""
    from vllm.platforms import current_platform

    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return [
        "batch-invariant",
        str(current_platform.get_device_name()),
        str(getattr(backend, "name", backend)),
        str(getattr(vllm_config.compilation_config, "mode", None)),
    ]


def _instructions() -> Iterator[str]:
    """Of the scheduler's CPU. Workers run on the same kind, or nothing else of theirs would fit."""
    import torch

    for name, is_there in torch.cpu.get_capabilities().items():
        if is_there is True and name.startswith(_PACKED_FOR):
            yield name
