"""The shared directory as a backing store (`file://`): the store with its garbage collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_tiered_kv.core.store import Durability, PutItem, PutResult, StoreUsage
from vllm_tiered_kv.errors import ConfigError
from vllm_tiered_kv.native.cpu import HostRegion
from vllm_tiered_kv.stores.registry import BackingOptions
from vllm_tiered_kv.stores.shared_dir.counters import Event
from vllm_tiered_kv.stores.shared_dir.gc import GcThread
from vllm_tiered_kv.stores.shared_dir.store import SharedDirSettings, SharedDirStore

_COLLECT_EVERY_S = 300.0


def check(options: BackingOptions) -> None:
    if not options.url.startswith("file:///"):
        raise ConfigError("backing", f'{options.url!r} is not like "file:///mnt/kv"')
    if not (options.capacity_bytes or options.ttl_s):
        raise ConfigError(
            "backing",
            "the folder would grow until its file system is full; limit its size with "
            "backing_space, or the age of its blocks with backing_ttl",
        )
    least = int(2 * SharedDirSettings.touch_interval_s)  # uses are recorded only this often
    if 0 < options.ttl_s < least:
        raise ConfigError("backing_ttl", f"must be at least {least // 60}min, got {options.ttl_s}s")


def open_store(options: BackingOptions, on_unanswered: Callable[[], None]) -> SharedDirBacking:
    """Has no server that could leave a call unanswered."""
    return SharedDirBacking(
        SharedDirSettings(
            options.url.removeprefix("file://"),
            capacity_bytes=options.capacity_bytes,
            ttl_s=float(options.ttl_s) if options.ttl_s else None,
        )
    )


class SharedDirBacking(SharedDirStore):
    """A shared directory whose garbage is collected in a thread. `open_store` creates it for a
    daemon, where the threads of the backing tier's executors call it; `TokenCache.open_folder`
    creates it for other programs."""

    is_absent = False  # a file system that does not answer hangs; see StoreExecutor
    read_batch = 1  # it may hang with one file alone

    def __init__(
        self, settings: SharedDirSettings, collect_every_s: float = _COLLECT_EVERY_S
    ) -> None:
        super().__init__(settings)
        self._collector = GcThread(self, collect_every_s)

    def put(
        self, items: Sequence[PutItem], durability: Durability = Durability.MEMORY
    ) -> list[PutResult]:
        results = super().put(items, durability)
        if PutResult.DROPPED in results:
            self._collector.wake()
        return results

    def retry(self) -> None:
        """No-op: this store does not pause after a failure."""

    def use_memory(self, memory: HostRegion) -> None:
        """No-op: files are read into any memory."""

    @property
    def damaged_blocks(self) -> int:
        return self._count(Event.DAMAGED, Event.READ_ERROR)

    @property
    def failed_blocks(self) -> int:
        return self._count(Event.WRITE_ERROR, Event.NO_SPACE, Event.BAD_CHECKSUM, Event.BAD_KEY)

    def _count(self, *events: Event) -> int:
        counted = self.counts.snapshot()
        return sum(counted[event] for event in events)

    def known_usage(self) -> StoreUsage:
        return self.usage()

    def close(self) -> None:
        self._collector.stop()
        super().close()
