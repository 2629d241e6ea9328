"""Copies blocks from a daemon to the device on a separate CUDA stream."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.copier import PinnedBlocks
from vllm_tiered_kv.device.inbound import Direct
from vllm_tiered_kv.native import cuda as native
from vllm_tiered_kv.native.cpu import HostRegion


class CudaChannel:
    """The `Channel` of `CudaCopier`: scatters on its own stream, after the fence.

    The thread that loads from daemons uses it. Later steps may record the fence again meanwhile.
    The fence only moves forward on the compute stream, so waiting for a later one is correct too.
    """

    def __init__(
        self, device: int, layouts: Mapping[int, native.CudaBlockLayout], fence: native.Event
    ) -> None:
        self._direct = Direct(layouts)
        self._fence = fence
        self._stream = native.Stream(device, low_priority=True)

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        self._stream.wait(self._fence)
        self._direct.enqueue(PinnedBlocks(group_id, block_ids, region, offsets), self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._stream.close()
