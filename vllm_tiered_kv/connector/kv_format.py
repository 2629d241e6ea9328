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

    device = str(vllm_config.device_config.device_type)
    facts = [f"vLLM {vllm.__version__.partition('+')[0]}", device]
    if device == "cpu":
        facts += [platform.machine(), *sorted(_instructions())]
    return " ".join(facts)


def _instructions() -> Iterator[str]:
    """Of the scheduler's CPU. Workers run on the same kind, or nothing else of theirs would fit."""
    import torch

    for name, is_there in torch.cpu.get_capabilities().items():
        if is_there is True and name.startswith(_PACKED_FOR):
            yield name
