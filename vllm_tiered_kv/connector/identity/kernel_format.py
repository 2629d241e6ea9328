"""Names the format in which vLLM's kernels write a block, beyond the order of its dimensions.

The format is private to the kernels and the layout's name does not tell it: another vLLM release
may use another format, and on a CPU vLLM packs keys to suit the CPU's matrix instructions.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKED_FOR = ("amx", "avx512")  # prefixes of the CPU instructions that vLLM packs keys for


def kv_format(vllm_config: VllmConfig) -> str:
    """Returns a text that is equal for engines whose kernels can read each other's blocks."""
    import vllm
    from vllm import envs

    device = str(vllm_config.device_config.device_type)
    facts = [f"vLLM {vllm.__version__.partition('+')[0]}", device]
    if device == "cpu":
        facts += [platform.machine(), *sorted(_instructions())]
    if envs.VLLM_BATCH_INVARIANT:
        facts += _batch_invariant_facts(vllm_config)
    return " ".join(facts)


def _batch_invariant_facts(vllm_config: VllmConfig) -> list[str]:
    """Returns what decides the exact bits of a block. With batch invariance vLLM promises
    reproducible bits, but another GPU or attention back-end rounds differently. Without it even one
    engine's blocks differ in rounding, so that these facts do not matter."""
    from vllm.platforms import current_platform

    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return [
        "batch-invariant",
        str(current_platform.get_device_name()),
        str(getattr(backend, "name", backend)),
        str(getattr(vllm_config.compilation_config, "mode", None)),
    ]


def _instructions() -> Iterator[str]:
    """Yields the relevant instruction sets of the scheduler's CPU. vLLM's workers run on the same
    kind of CPU."""
    import torch

    for name, is_there in torch.cpu.get_capabilities().items():
        if is_there is True and name.startswith(_PACKED_FOR):
            yield name
