"""A way in for a thread of its own, beside the copier's: blocks from a daemon."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_tiered_kv.core.transfer import Int64Array
from vllm_tiered_kv.device.inbound import DIRECT_CTAS
from vllm_tiered_kv.native import cuda as native
from vllm_tiered_kv.native.cpu import HostRegion


class CudaChannel:
    """Scatters on a stream of its own, behind the fence.

    The fence may be recorded anew by later steps meanwhile; it only ever moves forward on the
    compute stream, so waiting for a later one waits for the right one too.
    """

    def __init__(
        self, device: int, layouts: Mapping[int, native.CudaBlockLayout], fence: native.Event
    ) -> None:
        self._layouts = layouts
        self._fence = fence
        self._stream = native.Stream(device, low_priority=True)

    def scatter(
        self, group_id: int, block_ids: Int64Array, region: HostRegion, offsets: Int64Array
    ) -> None:
        self._stream.wait(self._fence)
        native.scatter(
            self._layouts[group_id],
            block_ids,
            region.address,
            region.nbytes,
            offsets,
            self._stream.handle,
            ctas=DIRECT_CTAS,
        )

    def finish(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self._stream.close()
