"""A vLLM worker for several ranks on one GPU, for tests of what ranks divide.

NCCL refuses two ranks on one device, so collectives go through the host, over gloo. All other code
is vLLM's own, its attention kernels among it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.platforms import current_platform
from vllm.v1.attention.ops.dcp import MLADCPManager
from vllm.v1.worker.gpu_worker import Worker


class OneDeviceWorker(Worker):
    """vLLM resolves it by name, and so imports this module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "local_rank": 0})


class HostCommunicator(DeviceCommunicatorBase):
    """The collectives of one group. vLLM constructs it on each rank of the group, and calls it from
    the thread of the worker."""

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._of_all_ranks(input_), dim)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Ranks add in the same order, and so agree to the bit."""
        return torch.stack(self._of_all_ranks(input_)).sum(dim=0).to(input_.dtype)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        assert input_.shape[dim] % self.world_size == 0
        parts = self.all_reduce(input_).chunk(self.world_size, dim)
        return parts[self.rank_in_group].contiguous()

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        found = self.all_gather(input_, dim)
        return found if self.rank_in_group == dst else None

    def _of_all_ranks(self, own: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of this shape from each rank. Bytes are gathered: gloo knows few dtypes."""
        on_host = own.contiguous().cpu()
        found = [torch.empty_like(on_host) for _ in range(self.world_size)]
        if own.numel():
            torch.distributed.all_gather(
                [part.flatten().view(torch.uint8) for part in found],
                on_host.flatten().view(torch.uint8),
                group=self.cpu_group,
            )
        return [part.to(own.device) for part in found]


def _gather_kv(manager: MLADCPManager, gathered_kv: torch.Tensor, local_kv: torch.Tensor) -> None:
    gathered_kv.copy_(manager.group.all_gather(local_kv, dim=0))


current_platform.dist_backend = "gloo"
current_platform.get_device_communicator_cls = lambda: f"{__name__}.{HostCommunicator.__name__}"
MLADCPManager.kv_gather = _gather_kv
# Kernels that write to the memory of other devices.
os.environ["VLLM_USE_DIRECT_DCP_Q_GATHER"] = os.environ["VLLM_USE_DIRECT_DCP_KV_GATHER"] = "0"
