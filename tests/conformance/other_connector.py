"""A connector of somebody else's, to share a MultiConnector with ours.

It offers what it is told to offer, asynchronously, and brings it or fails, some steps later. What
it brings it copies from blocks a test has kept: it knows nothing of our tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)


@dataclass
class Errands(KVConnectorMetadata):
    loads: list[tuple[str, list[int]]] = field(default_factory=list)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    offers: ClassVar[dict[str, int]] = {}  # tokens of a prefix, by request
    fails: ClassVar[set[str]] = set()
    deliver: ClassVar[Any] = None  # called with request and blocks when a load arrives
    delay: ClassVar[int] = 2
    is_pushed: ClassVar[bool] = False
    """A peer is told of the blocks while the step is planned, and has written them at once."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._next = Errands()
        self._under_way: list[tuple[int, str, list[int]]] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = max(0, self.offers.get(request.request_id, 0) - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.offers.pop(request.request_id)
            ids = [block.block_id for block in blocks.blocks[0]]
            self._next.loads.append((request.request_id, ids))
            if self.is_pushed:
                type(self).deliver(request.request_id, ids)

    def build_connector_meta(self, scheduler_output: Any) -> Errands:
        metadata, self._next = self._next, Errands()
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Errands)
        self._under_way += [(self.delay, *errand) for errand in metadata.loads]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        waiting = []
        for left, request_id, blocks in self._under_way:
            if left:
                waiting.append((left - 1, request_id, blocks))
                continue
            results.finished_recving.add(request_id)
            if request_id in self.fails:
                results.failed_recving.add(request_id)
            else:
                type(self).deliver(request_id, blocks)
        self._under_way = waiting
        return results
