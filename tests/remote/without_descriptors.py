"""A process that runs out of descriptors for a while: `python -m ... return|attach ADDRESS`.

It prints "well" if its background threads have completed their work afterwards.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.patience import eventually
from tests.remote.engine import IDENTITY, NBYTES, block_keys, within
from vllm_tiered_kv.connector.worker.shared_region import SharedRegions
from vllm_tiered_kv.core.key import RankTag
from vllm_tiered_kv.remote.local_daemon import LocalDaemon
from vllm_tiered_kv.remote.store import RemoteStore


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def called(owner: Any, name: str) -> threading.Event:
    """Returns an event that is set when the method was called again, even if it raised."""
    ended, call = threading.Event(), getattr(owner, name)

    def watched(*args: Any) -> Any:
        try:
            return call(*args)
        finally:
            ended.set()

    setattr(owner, name, watched)
    return ended


def leases_come_back(store: RemoteStore) -> None:
    local = LocalDaemon(store)
    chain = block_keys("a chain", 6)

    def lease() -> Callable[[], None]:
        match = local.lookup(chain, [RankTag(tp=0), RankTag(tp=1)], NBYTES, within(20))
        assert match is not None
        assert match.lease is not None
        return match.lease.release

    lease()()
    release = lease()
    memory = local.current
    assert memory is not None
    eventually(lambda: memory.is_settled)
    memory._connection.close()  # like after a lost session
    tried = called(memory, "settle")
    with no_descriptors():
        release()
        assert tried.wait(60)
    eventually(lambda: memory.is_settled)
    local.close()


def memory_is_attached(store: RemoteStore, address: str) -> None:
    tried = called(store, "attach")
    with no_descriptors():
        regions = SharedRegions({address: store}, None, None)
        assert tried.wait(60)
    eventually(lambda: regions.of(address) is not None)
    regions.close()


if __name__ == "__main__":
    what, address = sys.argv[1:]
    store = RemoteStore(address, IDENTITY, timeout_s=20.0, connect_timeout_s=10.0)
    if what == "return":
        leases_come_back(store)
    else:
        memory_is_attached(store, address)
    store.close()
    print("well")
