"""What the ways of an engine to its daemons hold of the system, counted where they are kept.

Pools open connections when several threads need one at a time, memory of daemons is mapped when it
is first asked for, and either has a connection that opens when it is needed: all of that may come
after a baseline was taken, and none of it is a leak. What is not counted here is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.patience import eventually
from vllm_tiered_kv.remote.connection import Connection
from vllm_tiered_kv.remote.shared_memory import SharedMemory

if TYPE_CHECKING:
    from vllm_tiered_kv.connector.scheduler.remote_tier import RemoteTier
    from vllm_tiered_kv.connector.worker.remote_io import RemoteIO

ZMQ_THREAD = "ZMQbg/IO/0"  # one in each context
_OF_CONTEXT = 5  # descriptors
_OF_SOCKET = 4
_OF_LOST_SOCKET = 3  # whose daemon has gone
_OF_MEMORY = 3  # the memory, what Python maps it by, the connection to its daemon


@dataclass(frozen=True)
class Connections:
    contexts: int
    sockets: int
    memories: int

    @classmethod
    def now(cls, scheduler: RemoteTier, worker: RemoteIO) -> Connections:
        """Of both halves; nothing may be under way."""
        memories = _memories(scheduler, worker)
        held = [
            connection._zmq
            for connection in (*_pooled(scheduler, worker), *(m._connection for m in memories))
        ]
        return cls(
            sum(resources.context is not None for resources in held),
            sum(resources.socket is not None for resources in held),
            sum(not memory.closed for memory in memories),
        )

    def more_than(self, before: Connections) -> dict[str, int]:
        """What they account for, as `Footprint.beyond` takes it. Which sockets are lost is known to
        zmq alone: those of before count as if all were, and these as if none was."""
        contexts, memories = self.contexts - before.contexts, self.memories - before.memories
        sockets = _OF_SOCKET * self.sockets - _OF_LOST_SOCKET * before.sockets
        return {
            "threads": 2 * contexts,
            "descriptors": _OF_CONTEXT * contexts + sockets + _OF_MEMORY * memories,
            "memfd_maps": memories,
        }


def _pooled(scheduler: RemoteTier, worker: RemoteIO) -> list[Connection]:
    clusters = (scheduler._cluster, worker._cluster)
    pools = [store._caller.pool for cluster in clusters for store in cluster.stores.values()]
    eventually(lambda: all(pool._free.qsize() == pool._max_connections for pool in pools))
    return [one for pool in pools for one in pool._free.queue if one is not None]


def _memories(scheduler: RemoteTier, worker: RemoteIO) -> set[SharedMemory]:
    found = set(worker.regions._regions)
    for local_daemon in scheduler._lookups._local_daemons.values():
        found |= set(local_daemon._mapped)
    for store in scheduler._cluster.stores.values():
        found |= set(store._memory)  # attached ahead of the first lookup
    return found
